"""Errors of half-precision gradients relative to float32 gradients, and the selection of the initial loss scale.

For each leaf and each loss scale, the device computes a few numbers, such as a squared error, from which the host then
computes the error of the leaf.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure import all_finite
from jax_lossscale.diagnostics._bits import magnitudes, reduced
from jax_lossscale.diagnostics._in_precision import Evaluator
from jax_lossscale.diagnostics._loss_call import LossCall, value_and_leaves
from jax_lossscale.diagnostics._report import Progress
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

# If a change to the parameters by a few units in the last place of float32 changes the gradient of a leaf by more than
# this fraction, the gradient consists of rounding errors.
_MOSTLY_ROUNDING = 0.05
# The parameters are changed by this fraction to measure rounding errors. The fraction is close to the smallest relative
# change that float32 can represent.
PERTURBATION = 2.0**-22
# Gradients count as wrong if the relative error of the whole gradient exceeds the first limit or the relative error of
# a single leaf exceeds the second limit. If training works, the error of the whole gradient is usually below 0.01 in
# float16 and below 0.05 in bfloat16.
LARGE_ERROR = 0.1
LARGE_LEAF_ERROR = 0.5
# A relative error of the float16 loss above this limit is reported even if the gradients are accurate.
_NOTED_ERROR_OF_THE_LOSS = 0.01
# A loss scale is considered as accurate as the best scale if its error is at most this many times as large.
_AS_GOOD = 1.5
# The recommended initial loss scale is at least this many powers of two below the largest scale with finite gradients,
# so that training does not start with skipped steps.
_LOG2_HEADROOM = 3
# Long vectors are padded with zeros and divided into rows of this length before their elements are added.
_ROW = 4096
_FIRST_SENTENCE = re.compile(r"^\w*(?:Error|Exception): (.+?(?:\.(?=\s)|\n\n|\Z))", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafGradientError:
    """The errors of the gradient of one leaf at each loss scale.

    Attributes:
      path: the path of the leaf in the pytree, as formatted by `jax.tree_util.keystr`.
      shape: the shape of the leaf.
      norm: the Euclidean norm of the float32 gradient.
      largest: the largest magnitude in the float32 gradient; 0 if the leaf is empty.
      smallest: the smallest nonzero magnitude in the float32 gradient; 0 if all elements are zero.
      nonzero: the number of nonzero elements of the float32 gradient.
      relative_error: for each loss scale, the norm of the difference between the half-precision and the float32
        gradient, divided by the norm of the float32 gradient. The relative error is infinite if the half-precision
        gradient is not finite. The error of all leaves together does not include finite differences in leaves whose
        float32 gradient is zero.
      lost: for each loss scale, the fraction of the nonzero elements of the float32 gradient that are zero in half
        precision.
      nonfinite: for each loss scale, the fraction of the elements that are not finite in half precision.
      rounding: the relative change of the float32 gradient if the parameters change by a few units in the last place.
        If ``rounding`` is large, the float32 gradient consists of rounding errors, and ``relative_error`` is
        meaningless. For example, the gradient of a bias before a batch normalization layer consists of rounding errors.
    """

    path: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    smallest: float
    nonzero: int
    relative_error: tuple[float, ...]
    lost: tuple[float, ...]
    nonfinite: tuple[float, ...]
    rounding: float

    @property
    def is_zero(self) -> bool:
        """Whether all elements of the float32 gradient are zero."""
        return self.norm == 0

    @property
    def is_rounding(self) -> bool:
        """Whether the float32 gradient consists of rounding errors."""
        return self.rounding > _MOSTLY_ROUNDING and math.isfinite(self.norm)


class Measurement(NamedTuple):
    """The difference between the gradient of one leaf at one loss scale and the float32 gradient of this leaf.

    The fields ``largest``, ``smallest``, ``norm`` and ``nonzero`` describe the float32 gradient.
    """

    largest: float  # the largest magnitude; NaN if any element is NaN
    smallest: float  # the smallest nonzero magnitude; infinite if all elements are zero
    norm: float  # the Euclidean norm
    nonzero: float  # the number of nonzero elements
    relative_error: float  # the norm of the difference, divided by `norm`; infinite if this ratio is not finite
    lost: float  # the number of nonzero elements that are zero in half precision
    nonfinite: float  # the number of elements that are not finite in half precision


def measure(leaves: Mapping[Any, ArrayLike], exact: Mapping[Any, ArrayLike], scale: float) -> list[Measurement]:
    """Return the measurements of each leaf as numbers on the host.

    One program is compiled for all leaves of the same shape and dtype.

    Args:
      leaves: the scaled gradients by path.
      exact: the float32 gradients by path.
      scale: the loss scale of ``leaves``.
    """
    on_device = [_measure(leaf, exact[path], jnp.float32(scale)) for path, leaf in leaves.items()]
    return [_on_host(map(float, numbers)) for numbers in jax.device_get(on_device)]


def _on_host(numbers: Iterable[float]) -> Measurement:
    """Convert the numbers that `_measure` returns to a `Measurement`, in float64."""
    largest, smallest, squares, squared_errors, nonzero, lost, nonfinite = numbers
    norm, relative_error = largest * math.sqrt(squares), math.sqrt(_ratio(squared_errors, squares))
    return Measurement(largest, smallest, norm, nonzero, relative_error, lost, nonfinite)


@jax.jit
def _measure(leaf: ArrayLike, exact: ArrayLike, scale: ArrayLike) -> Sequence[jax.Array]:
    """Return the numbers from which `_on_host` computes the measurements of one leaf.

    The numbers are, in this order:

    1. the largest magnitude and the smallest nonzero magnitude of the float32 gradient,
    2. the sum of the squares of the float32 gradient, divided by the square of its largest magnitude,
    3. the sum of the squared errors, divided by the same square, and
    4. the counts ``nonzero``, ``lost`` and ``nonfinite`` of `Measurement`.

    All sums are computed in one pass over the leaf, so no intermediate result as large as the leaf is stored. The
    squares of the float32 gradient are added in the same order as the squared errors. Therefore, if the half-precision
    gradient is zero, its relative error is exactly 1.
    """
    (unscaled,), (reference,) = _tree.unscale([_in_rows(leaf)], scale), _tree.widen([_in_rows(exact)])
    sizes = jnp.abs(reference)
    # The smallest magnitude has the largest bitwise complement. The bitwise complement of a finite magnitude is never
    # zero.
    largest, complement = reduced(largest=[sizes, jnp.where(sizes > 0, ~magnitudes(sizes), 0)])
    smallest = jnp.where(complement > 0, jax.lax.bitcast_convert_type(~complement, sizes.dtype), jnp.inf)
    # The gradients are divided by this number so that their squares do not overflow or underflow.
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = [jnp.square(jnp.abs(each) / unit) for each in (reference, unscaled - reference)]
    flags = sizes > 0, (sizes > 0) & (unscaled == 0), ~jnp.isfinite(unscaled)
    return [largest, smallest, *reduced(sums=[*squares, *flags])]


def _in_rows(leaf: ArrayLike) -> jax.Array:
    """Reshape a long vector to a matrix, because `reduced` adds all floats of a vector one by one."""
    leaf = jnp.asarray(leaf)
    if leaf.ndim != 1 or leaf.size <= _ROW:
        return leaf
    return jnp.pad(leaf, (0, -leaf.size % _ROW)).reshape(-1, _ROW)


class Float32Gradients(NamedTuple):
    """The value and the gradients of a function in float32, which serve as the reference for half precision."""

    value: Any
    leaves: dict[str, Any]  # the gradients by path
    # For each leaf, the measurement of its gradient at slightly changed parameters. These measurements show the
    # rounding errors of the float32 gradients.
    rounding: list[Measurement]

    def reports_of(
        self, measured: Sequence[Sequence[Measurement]]
    ) -> tuple[list[LeafGradientError], LeafGradientError]:
        """Return the errors of the gradient of each leaf, and the errors of the whole gradient.

        The errors of the whole gradient are computed from the measurements of all leaves, because relative errors
        cannot be added. The attribute ``rounding`` of each result measures the rounding errors of the float32 gradient
        itself.

        Args:
          measured: the measurements for each loss scale and each leaf.
        """
        # For each leaf, `at_scales` contains the measurement at changed parameters, followed by one for each loss
        # scale.
        of_leaves = zip(self.leaves.items(), self.rounding, *measured, strict=True)
        reports = [_report_of(path, np.shape(leaf), *at_scales) for (path, leaf), *at_scales in of_leaves]
        size = sum(map(np.size, self.leaves.values()))
        return reports, _report_of("all leaves", (size,), *map(whole_gradient, [self.rounding, *measured]))


def _report_of(path: str, shape: tuple[int, ...], rounding: Measurement, *measured: Measurement) -> LeafGradientError:
    """Return the errors of one gradient, given its measurements at changed parameters and at each loss scale."""
    return LeafGradientError(
        path=path,
        shape=shape,
        norm=rounding.norm,
        largest=rounding.largest,
        smallest=rounding.smallest if rounding.nonzero else 0.0,
        nonzero=int(rounding.nonzero),
        relative_error=tuple(each.relative_error for each in measured),
        lost=tuple(each.lost / max(rounding.nonzero, 1) for each in measured),
        nonfinite=tuple(each.nonfinite / max(math.prod(shape), 1) for each in measured),
        rounding=rounding.relative_error,
    )


def whole_gradient(leaves: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of all leaves at one loss scale, as if the leaves were one array."""
    # If the float32 gradient of a leaf is zero, its relative error is meaningless. Only non-finite elements then count
    # as an error.
    known = [leaf.relative_error * leaf.norm if leaf.relative_error and leaf.norm else 0.0 for leaf in leaves]
    errors = [math.inf if leaf.nonfinite else error for leaf, error in zip(leaves, known, strict=True)]
    norm = math.hypot(*(leaf.norm for leaf in leaves))
    return Measurement(
        largest=float(np.max([leaf.largest for leaf in leaves])),  # NaN if any element is NaN
        smallest=min(leaf.smallest for leaf in leaves),
        norm=norm,
        nonzero=sum(leaf.nonzero for leaf in leaves),
        relative_error=math.hypot(*errors) / (norm or 1.0),
        lost=sum(leaf.lost for leaf in leaves),
        nonfinite=sum(leaf.nonfinite for leaf in leaves),
    )


def noted_error_of_loss(dtype: jnp.dtype) -> float:
    """Return the relative error above which the error of a loss is reported.

    The limit is 0.01 for float16 and larger for dtypes with less precision. It is also the default tolerance of
    `find_precision`.
    """
    return min(_NOTED_ERROR_OF_THE_LOSS * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float16).eps), LARGE_ERROR)


def relative_error(value: Any, exact: Any) -> float:
    """Return the relative error of ``value``, or infinity if ``value`` or ``exact`` is not finite."""
    return _ratio(abs(float(value) - float(exact)), abs(float(exact)))


def _ratio(error: float, reference: float) -> float:
    """Return ``error / reference``, or 0 if there is no error, or infinity if the ratio is not finite."""
    if error == 0:
        return 0.0
    ratio = error / reference if reference else math.inf
    return ratio if math.isfinite(ratio) else math.inf


class GradientErrors(NamedTuple):
    """The errors of the value and gradients of a function at several loss scales."""

    gradients: TracedGradients
    leaves: list[LeafGradientError]
    total: LeafGradientError  # the errors of the whole gradient, which consists of the gradients of all leaves
    scales: Sequence[float]  # in ascending order
    value: float  # the value of the function in half precision; NaN if the program raises an error at every scale
    reference_value: float  # the value of the function in float32
    opaque_operations: tuple[str, ...]  # the operations that cannot be evaluated in float32
    # A dictionary that maps each loss scale at which the program raises an error to the first sentence of the message.
    run_time_errors: dict[float, str]

    @property
    def loss_dtype(self) -> jnp.dtype:
        """The dtype of the value."""
        return self.gradients.program.jaxpr.out_avals[0].dtype

    @property
    def is_loss_wrong(self) -> bool:
        """Whether the relative error of the loss is above `LARGE_ERROR`."""
        return relative_error(self.value, self.reference_value) > LARGE_ERROR

    @property
    def is_loss_noted(self) -> bool:
        """Whether the error of the loss is large enough to be reported."""
        return relative_error(self.value, self.reference_value) > noted_error_of_loss(self.gradients.dtype)

    @property
    def true_leaves(self) -> list[LeafGradientError]:
        """The leaves whose float32 gradient is not zero and does not consist of rounding errors."""
        return [leaf for leaf in self.leaves if leaf.norm > 0 and not leaf.is_rounding]

    def finite(self) -> list[int]:
        """Return the indices of the loss scales at which all gradients are finite."""
        return [n for n in range(len(self.scales)) if not any(leaf.nonfinite[n] for leaf in self.leaves)]

    def inaccurate_leaves(self, n: int) -> list[LeafGradientError]:
        """Return the leaves whose gradients are wrong at the loss scale with index ``n``, sorted by decreasing norm."""
        wrong = [leaf for leaf in self.true_leaves if leaf.relative_error[n] > LARGE_LEAF_ERROR]
        return sorted(wrong, key=lambda leaf: -leaf.norm)

    def working(self) -> list[int]:
        """Return the indices of the loss scales at which all gradients are accurate."""
        errors = self.total.relative_error
        return [n for n in self.finite() if errors[n] <= LARGE_ERROR and not self.inaccurate_leaves(n)]

    def best(self) -> int:
        """Return the index of the best loss scale among the scales with finite gradients.

        The best scale has the fewest inaccurate leaves. If several scales have the same number of inaccurate leaves,
        the relative errors of the whole gradient are rounded to one digit, and the scale with the smallest rounded
        error is selected. If the rounded errors at several scales are equal, the largest of these scales is the best,
        because the fewest gradients underflow at it.
        """
        errors = self.total.relative_error
        return min(self.finite(), key=lambda n: (len(self.inaccurate_leaves(n)), float(f"{errors[n]:.1g}"), -n))

    def start(self) -> float:
        """Return the recommended initial loss scale.

        The recommended scale is the largest scale that is about as accurate as the best scale and at least a factor of
        ``2**_LOG2_HEADROOM`` below the largest scale with finite gradients. If no accurate scale leaves this much
        headroom, the smallest accurate scale is returned.
        """
        best, finite, errors, scales = self.best(), self.finite(), self.total.relative_error, self.scales
        fewest = len(self.inaccurate_leaves(best))
        good = [n for n in finite if len(self.inaccurate_leaves(n)) <= fewest]
        as_good = [scales[n] for n in good if errors[n] <= _AS_GOOD * errors[best] + 1e-6]
        return _largest_with_headroom(as_good, scales[finite[-1]])


def _largest_with_headroom(scales: Sequence[float], largest_finite: float) -> float:
    """Return the largest loss scale that leaves enough headroom below the largest scale with finite gradients.

    If there is no such scale, return the first one.
    """
    return max([scale for scale in scales if scale <= largest_finite * 2.0**-_LOG2_HEADROOM] or [scales[0]])


def errors_by_scale(gradients: TracedGradients, scales: Sequence[float] | None, progress: Progress) -> GradientErrors:
    """Compute the errors of the gradients at several loss scales.

    If a callback raises an error at a loss scale, all gradients at this scale count as non-finite.

    Args:
      gradients: the traced gradients of the function.
      scales: the loss scales to compare, in ascending order, or ``None`` to choose them according to the largest
        gradient.
      progress: a function that wraps the sequence of loss scales, for example in a progress bar.
    """
    program = gradients.program
    reference, opaque = _float32_gradients(gradients)
    scales = scales or _default_scales([leaf.largest for leaf in reference.rounding], gradients.dtype)
    compiled = jax.jit(jaxpr_as_fun(program.jaxpr))

    def measured_at(scale: float) -> tuple[float, list[Measurement]]:
        """Return the value of the function and the measurements of the gradients at a loss scale.

        The gradients are freed when this function returns, so only the gradients at one loss scale are in memory at a
        time.
        """
        value, leaves = value_and_leaves(program, compiled(*gradients.inputs_at(scale)))
        return float(value), measure(leaves, reference.leaves, scale)

    # The value of the function does not depend on the loss scale. It is NaN if the program fails at every loss scale.
    value, measured, run_time_errors = math.nan, list[list[Measurement]](), dict[float, str]()
    for scale in progress(scales):
        try:
            value, measurements = measured_at(scale)
        # If a callback raises an exception, JAX raises either a `RuntimeError` or a `ValueError`, depending on the
        # program.
        except (RuntimeError, ValueError) as error:
            raise_unless_in_callback(error)
            run_time_errors[scale] = first_sentence(error)
            # The gradients at this scale are unknown, so every element is counted as not finite. The other fields of a
            # measurement describe the float32 gradients, which do not depend on the scale.
            measurements = [
                each._replace(relative_error=math.inf, lost=0.0, nonfinite=float(np.size(leaf)))
                for each, leaf in zip(reference.rounding, reference.leaves.values(), strict=True)
            ]
        measured.append(measurements)
    leaves, total = reference.reports_of(measured)
    return GradientErrors(gradients, leaves, total, scales, value, float(reference.value), opaque, run_time_errors)


def initial_scale(gradients: TracedGradients) -> float:
    """Return the largest default loss scale that is far enough below the scales at which the gradients overflow.

    The largest loss scale with finite gradients is determined by bisection. If the gradients are not finite at any loss
    scale, the smallest default loss scale is returned. If there are no gradients, 1 is returned.
    """
    program, evaluator = gradients.program, Evaluator(jnp.dtype(jnp.float32))
    in_float32 = jax.jit(lambda *inputs: evaluator.evaluate(program.jaxpr, inputs))
    _, exact = value_and_leaves(program, in_float32(*gradients.inputs_at(1.0)))
    if not exact:
        return 1.0
    scales = _default_scales([leaf.largest for leaf in measure(exact, exact, 1.0)], gradients.dtype)
    are_finite = jax.jit(lambda *inputs: all_finite(program.filled(jaxpr_as_fun(program.jaxpr)(*inputs))[0][1]))

    def overflow(scale: float) -> bool:
        try:
            return not are_finite(*gradients.inputs_at(scale))
        except (RuntimeError, ValueError) as error:
            raise_unless_in_callback(error)
            return True

    finite = scales[: bisect.bisect_left(scales, True, key=overflow)] or scales[:1]
    return _largest_with_headroom(finite, finite[-1])


def _float32_gradients(gradients: TracedGradients) -> tuple[Float32Gradients, tuple[str, ...]]:
    """Compute the float32 gradients, and list the operations that cannot be evaluated in float32."""
    call, reference, evaluator = gradients.call, gradients.reference, Evaluator(jnp.dtype(jnp.float32))
    moved = perturbed(call, keep_dtypes=reference is not None)
    if reference is None:
        program, moved = gradients.program, [np.float32(1), *moved]
        computed = jax.jit(lambda *inputs: evaluator.evaluate(program.jaxpr, inputs))
    else:
        program = reference.value_and_grad()
        computed = jax.jit(jaxpr_as_fun(program.jaxpr))
    # The changed parameters are freed before the second run to save memory.
    _, of_moved = value_and_leaves(program, computed(*program.inputs_from(moved, call.kwargs)))
    del moved
    value, leaves = value_and_leaves(program, computed(*program.inputs))
    return Float32Gradients(value, leaves, measure(of_moved, leaves, 1.0)), tuple(evaluator.opaque_operations)


def of_zeros(leaves: Sequence[LeafGradientError]) -> str:
    """Return a sentence about the leaves whose float32 gradient is zero, or "" if there are none.

    For example, if the weights of a layer are initialized to zero, the gradients of all layers below it are zero.
    """
    zero = [leaf for leaf in leaves if leaf.is_zero]
    share = sum(math.prod(leaf.shape) for leaf in zero) / max(sum(math.prod(leaf.shape) for leaf in leaves), 1)
    return (
        f"The gradients of {len(zero)} of {len(leaves)} leaves ({share:.1%} of all elements) are zero even in float32, "
        "so they cannot be compared. Repeat the analysis after a training step."
        if zero
        else ""
    )


def raise_unless_in_callback(error: Exception) -> None:
    """Re-raise an error unless it came from a callback in the program.

    For example, linear solvers use a callback to raise an error if their input is not finite.
    """
    if "callback" not in str(error).lower():
        raise error


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without the traceback of a callback that precedes the message."""
    found = _FIRST_SENTENCE.search(str(error))
    return " ".join(found[1].split()) if found else str(error).partition("\n")[0]


def _default_scales(largest_of_leaves: Sequence[float], dtype: jnp.dtype) -> list[float]:
    """Return the loss scales that are compared by default, which are powers of two.

    The usual scales lie between 2**-8 and 2**24. The scale that fits a gradient is the largest power of two at which
    the gradient does not overflow. If the scale that fits the largest gradient is below 2**-4 or above 2**20, powers of
    two around it are added to the usual scales.

    Args:
      largest_of_leaves: the largest magnitude in each leaf of the float32 gradients.
      dtype: the half-precision dtype.
    """
    largest = float(np.max(largest_of_leaves))  # NaN if any element is NaN
    exponents = {-8, -4, 0, 4, 8, 12, 15, 18, 21, 24}
    if 0 < largest < math.inf:
        fitting = math.floor(math.log2(float(jnp.finfo(dtype).max)) - math.log2(largest))
        exponents |= set() if -4 <= fitting <= 20 else {fitting + step for step in (-12, -8, -4, 0, 4)}
    return [2.0**exponent for exponent in sorted(exponents) if -100 <= exponent <= 127]


def perturbed(call: LossCall, *, keep_dtypes: bool, by: float = PERTURBATION) -> list[Any]:
    """Return the arguments of a call with small random changes to all differentiated elements.

    Each element is multiplied by ``1 + by`` or by ``1 - by``.

    Args:
      call: the call.
      keep_dtypes: whether to cast the changed leaves back to their original dtypes. If ``keep_dtypes`` is False,
        changed half-precision leaves are returned in float32.
      by: the relative size of the change.
    """
    chosen = [call.args[position] for position in call.positions]
    leaves, structure = jax.tree.flatten(chosen)
    most = max(map(np.size, leaves), default=0)
    signs = jnp.asarray(np.random.default_rng(0).choice(np.array([-1, 1], np.int8), most + len(leaves)))
    moved_leaves = [_perturbed(leaf, signs, n, by, keep_dtypes) for n, leaf in enumerate(leaves)]
    return _tree.with_replaced(call.args, call.positions, jax.tree.unflatten(structure, moved_leaves))


@functools.partial(jax.jit, static_argnums=4)
def _perturbed(leaf: Any, signs: jax.Array, start: int, by: float, keep_dtype: bool) -> jax.Array:
    (widened,) = _tree.widen([leaf])
    sign = jax.lax.dynamic_slice_in_dim(signs, start, widened.size).reshape(widened.shape).astype(widened.real.dtype)
    perturbed = widened * (1 + by * sign)
    return perturbed.astype(leaf.dtype) if keep_dtype else perturbed
