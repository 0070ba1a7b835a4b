"""Gradients at several loss scales, each compared with float32's, leaf by leaf; which scale to start from.

A few numbers are measured on the device, and become a report on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics._bits import reduced
from jax_lossscale.diagnostics._in_precision import Evaluator
from jax_lossscale.diagnostics._loss_call import LossCall
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

# Where a few units in the last place of float32 change the reference by so much, there is no true gradient to compare.
_MOSTLY_ROUNDING = 0.05
# A change of the parameters that float32 can just express. A gradient that it changes much is made of rounding.
NUDGE = 2.0**-22
# Above these the gradients of all leaves together, and those of one, are wrong. Float16 that works stays below 0.01 as
# a rule, bfloat16 below 0.05; a leaf that is half rounding, or half gone, learns something else.
LARGE_ERROR = 0.1
_LARGE_ERROR_OF_A_LEAF = 0.5
# A loss that is further off than this, in float16, is worth a word though its gradients are right.
_NOTED_ERROR_OF_THE_LOSS = 0.01
# Two scales are as good as one another if their errors are within this factor.
_AS_GOOD = 1.5
# From the largest scale with finite gradients down to where a run starts, so that it does not begin with skipped steps.
_LOG2_HEADROOM = 3
_FIRST_SENTENCE = re.compile(r"^\w*(?:Error|Exception): (.+?(?:\.(?=\s)|\n\n|\Z))", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class LeafGradientError:
    """The errors of the gradients of one leaf.

    Attributes:
      path: where the leaf is, as `jax.tree_util.keystr` writes it.
      shape: its shape.
      norm: the Euclidean norm of the reference.
      largest: the largest magnitude of the reference; 0 if there is none.
      smallest: its smallest magnitude that is not zero; 0 if there is none.
      nonzero: how many of its numbers are not zero.
      relative_error: for each loss scale, the norm of the difference from the reference over the norm of the reference;
        infinite where a gradient is not finite.
      lost: for each loss scale, the share of the reference's non-zero numbers that are zero.
      nonfinite: for each loss scale, the share of all numbers that are not finite.
      rounding: the relative change of the reference when the parameters are changed by a few units in the last place of
        float32. If it is large, the true gradient is nothing but rounding (a bias in front of a batch normalization has
        such a gradient), and its errors mean nothing.
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
        """Whether the true gradient is zero, in every number."""
        return self.norm == 0

    @property
    def is_rounding(self) -> bool:
        """Whether the true gradient is nothing but rounding."""
        return self.rounding > _MOSTLY_ROUNDING and math.isfinite(self.norm)


class Measurement(NamedTuple):
    """What is measured of one leaf at one scale; sums of squares are of numbers divided by ``largest``."""

    largest: Any
    smallest: Any
    squares: Any
    squared_errors: Any
    nonzero: Any
    lost: Any
    nonfinite: Any


def measure(leaves: Mapping[Any, ArrayLike], exact: Mapping[Any, ArrayLike], scale: float) -> list[Measurement]:
    """Measure each leaf, for the host; this is compiled once for all leaves of one shape."""
    measured = [_measure_leaf(leaf, exact[path], jnp.float32(scale)) for path, leaf in leaves.items()]
    return list(jax.device_get(measured))


@jax.jit
def _measure_leaf(leaf: ArrayLike, exact: ArrayLike, scale: ArrayLike) -> Measurement:
    (unscaled,), (reference,) = _tree.unscale([leaf], scale), _tree.widen([exact])
    magnitudes = jnp.abs(reference)
    (largest,) = reduced(largest=[magnitudes])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    is_nonzero = magnitudes > 0
    smallest = jnp.min(magnitudes, initial=jnp.inf, where=is_nonzero)
    squares = (jnp.sum(jnp.square(each / unit)) for each in (magnitudes, jnp.abs(unscaled - reference)))
    flags = is_nonzero, is_nonzero & (unscaled == 0), ~jnp.isfinite(unscaled)
    counts = (jnp.sum(flag, dtype=jnp.uint32).astype(jnp.float32) for flag in flags)
    return Measurement(largest, smallest, *squares, *counts)


def overflown(measured: Measurement, exact: Any) -> Measurement:
    """Give what is measured of a leaf where no gradient is finite."""
    return measured._replace(squared_errors=math.inf, lost=0.0, nonfinite=float(jnp.size(exact)))


def reports_of(
    exact: dict[str, Any], measured: Sequence[Sequence[Measurement]], rounding: Sequence[Measurement]
) -> tuple[list[LeafGradientError], LeafGradientError]:
    """Report on each leaf, and on all as one, from the measurements by scale and leaf.

    In ``rounding`` the reference was nudged.
    """
    # Each field is ``[1 + scales, leaves]``; what is only of the reference is alike in all rows.
    of = Measurement(*np.moveaxis(np.array([rounding, *measured], float), -1, 0))
    sizes, nonzero = np.array([np.size(leaf) for leaf in exact.values()]), of.nonzero[0]

    def with_all(of_leaves: Any, of_all: Any) -> Any:
        return np.concatenate([of_leaves, np.expand_dims(of_all, -1)], axis=-1).T.tolist()

    with np.errstate(all="ignore"):
        norms, ratios = of.largest[0] * np.sqrt(of.squares[0]), np.sqrt(of.squared_errors / of.squares)
        relative = np.where(of.squared_errors == 0, 0, np.where(np.isfinite(ratios), ratios, math.inf))
        parts = np.where((relative > 0) & (norms != 0), relative * norms, 0)
        norm = math.hypot(*norms)
        relative_of_all = [math.hypot(*row) / norm if norm else 0.0 for row in parts]
    columns = zip(
        [*exact, "all leaves"],
        [*map(np.shape, exact.values()), (int(sizes.sum()),)],
        with_all(norms, norm),
        with_all(of.largest[0], np.max(of.largest[0])),  # which keeps NaN
        with_all(of.smallest[0], np.min(of.smallest[0])),
        with_all(nonzero, nonzero.sum()),
        with_all(relative, relative_of_all),
        with_all(of.lost / np.maximum(nonzero, 1), of.lost.sum(axis=1) / max(nonzero.sum(), 1)),
        with_all(of.nonfinite / np.maximum(sizes, 1), of.nonfinite.sum(axis=1) / max(sizes.sum(), 1)),
        strict=True,
    )
    *leaves, total = (
        LeafGradientError(
            *(path, shape, norm, largest, smallest if number else 0.0, int(number)),
            *(tuple(relative[1:]), tuple(lost[1:]), tuple(nonfinite[1:]), relative[0]),
        )
        for path, shape, norm, largest, smallest, number, relative, lost, nonfinite in columns
    )
    return leaves, total


def noted_error_of_loss(dtype: jnp.dtype) -> float:
    """Give the error of a loss that is worth a word: more in a dtype with fewer digits than float16."""
    return min(_NOTED_ERROR_OF_THE_LOSS * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float16).eps), LARGE_ERROR)


def relative_error(value: Any, exact: Any) -> float:
    """Tell how far one number is from another, relative to that; infinite if one is not finite."""
    error = abs(float(value) - float(exact))
    if error == 0:
        return 0.0
    return error / abs(float(exact)) if float(exact) and math.isfinite(error) else math.inf


class GradientErrors(NamedTuple):
    """The errors of each leaf, and of all together, at each of the scales; value and reference."""

    dtype: jnp.dtype
    leaves: list[LeafGradientError]
    total: LeafGradientError
    scales: Sequence[float]
    value: float
    loss_dtype: jnp.dtype
    reference_value: float
    opaque_operations: tuple[str, ...]
    run_time_errors: dict[float, str]  # by scale, what the program raised there

    @property
    def error_of_loss(self) -> float:
        """How far the loss is from that of the reference, relative to it; infinite if it is not finite."""
        return relative_error(self.value, self.reference_value)

    @property
    def is_loss_wrong(self) -> bool:
        """Whether the loss, too, is far from that of the reference."""
        return self.error_of_loss > LARGE_ERROR

    @property
    def is_loss_noted(self) -> bool:
        """Whether the error of the loss is large enough to be reported."""
        return self.error_of_loss > noted_error_of_loss(self.dtype)

    @property
    def is_loss_too_small(self) -> bool:
        """Whether the loss is below the range of its own dtype."""
        info = jnp.finfo(self.loss_dtype)
        return info.bits < 32 and 0 < abs(self.reference_value) < float(info.smallest_normal)

    @property
    def true_leaves(self) -> list[LeafGradientError]:
        """The leaves with a true gradient."""
        return [leaf for leaf in self.leaves if leaf.norm > 0 and not leaf.is_rounding]

    def finite(self) -> list[int]:
        """List the scales at which all gradients are finite, by their positions."""
        return [n for n in range(len(self.scales)) if not any(leaf.nonfinite[n] for leaf in self.leaves)]

    def inaccurate_leaves(self, n: int) -> list[LeafGradientError]:
        """List the leaves whose gradient is not only rounding and is wrong at a scale, the largest first."""
        wrong = [leaf for leaf in self.true_leaves if leaf.relative_error[n] > _LARGE_ERROR_OF_A_LEAF]
        return sorted(wrong, key=lambda leaf: -leaf.norm)

    def working(self) -> list[int]:
        """List the scales at which all gradients are right."""
        return [
            n for n in self.finite() if self.total.relative_error[n] <= LARGE_ERROR and not self.inaccurate_leaves(n)
        ]

    def best(self) -> int:
        """Find the scale with the smallest errors; of scales that are alike, the largest, which loses least."""
        errors = self.total.relative_error
        return min(self.finite(), key=lambda n: (len(self.inaccurate_leaves(n)), float(f"{errors[n]:.1g}"), -n))

    def start(self) -> float:
        """Give the largest scale that is as good as the best, with room above it if there is any; else the least."""
        finite, errors, scales = self.finite(), self.total.relative_error, self.scales
        if not finite:
            return scales[0]
        best = self.best()
        wrong = len(self.inaccurate_leaves(best))
        good = [
            scales[n]
            for n in finite
            if len(self.inaccurate_leaves(n)) <= wrong and errors[n] <= _AS_GOOD * errors[best] + 1e-6
        ]
        roomy = scales[finite[-1]] * 2.0**-_LOG2_HEADROOM
        return max([scale for scale in good if scale <= roomy] or [good[0]])


def errors_by_scale(
    gradients: TracedGradients,
    float32_program: Traced | None = None,
    scales: Sequence[float] | None = None,
    progress: Callable[[Sequence[float]], Iterable[float]] = iter,
) -> GradientErrors | None:
    """Give the errors of the gradients; ``None`` if there are none.

    Args:
      gradients: the traced gradients of the function.
      float32_program: the program of the reference, without a loss scale. By default it is made from the function.
      scales: those to compare; by default useful ones.
      progress: what wraps them.
    """
    call, program = gradients.call, gradients.program
    moved = nudged(call, keep_dtypes=float32_program is not None)
    evaluator = Evaluator(jnp.dtype(jnp.float32))
    if float32_program is None:
        float32_program, moved = program, [np.float32(1), *moved]
        computed = jax.jit(lambda *inputs: evaluator.evaluate(program.jaxpr, inputs))
    else:
        computed = jax.jit(jaxpr_as_fun(float32_program.jaxpr))
    reference_value, exact = value_and_leaves(float32_program.result(computed(*float32_program.inputs)), call.has_aux)
    if not exact:
        return None
    of_moved = computed(*float32_program.inputs_from(moved, call.kwargs))
    rounding = measure(value_and_leaves(float32_program.result(of_moved), call.has_aux)[1], exact, 1.0)
    del of_moved  # no two gradients but the reference and those of one scale are held at a time
    scales = scales or _useful_scales(float(np.max([leaf.largest for leaf in rounding])), gradients.dtype)
    compiled = jax.jit(jaxpr_as_fun(program.jaxpr), compiler_options={"xla_allow_excess_precision": False})
    value: Any = math.nan  # that of every scale
    measured, run_time_errors = [], dict[float, str]()
    for scale in progress(scales):
        try:
            result = program.result(compiled(jnp.float32(scale), *program.inputs[1:]))
            value, leaves = value_and_leaves(result, call.has_aux)
            measured.append(measure(leaves, exact, scale))
            del result, leaves
        except (RuntimeError, ValueError) as error:  # which of them it is differs from program to program
            if not is_of_the_program(error):
                raise
            run_time_errors[scale] = first_sentence(error)
            measured.append([overflown(*pair) for pair in zip(rounding, exact.values(), strict=True)])
    all_leaves, total = reports_of(exact, measured, rounding)
    loss_dtype, known = program.jaxpr.out_avals[0].dtype, tuple(evaluator.opaque_operations)
    losses = float(value), loss_dtype, float(reference_value)
    return GradientErrors(gradients.dtype, all_leaves, total, scales, *losses, known, run_time_errors)


def of_zeros(leaves: Sequence[LeafGradientError]) -> str:
    """Say how many gradients are zero in float32, as behind a layer that begins with zeros; "" if none are."""
    zero = [leaf for leaf in leaves if leaf.is_zero]
    share = sum(math.prod(leaf.shape) for leaf in zero) / max(sum(math.prod(leaf.shape) for leaf in leaves), 1)
    return (
        f"{len(zero)} of {len(leaves)} leaves, {share:.1%} of all gradients, are zero in float32, too, so nothing is "
        "known of them: ask again after a step of training."
        if zero
        else ""
    )


def is_of_the_program(error: Exception) -> bool:
    """Tell whether a program raised the error by itself, in a callback, as solvers do that refuse infinities."""
    return "callback" in str(error).lower()


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without the traceback of a callback at its beginning."""
    found = _FIRST_SENTENCE.search(str(error))
    return " ".join(found[1].split()) if found else str(error).partition("\n")[0]


def _useful_scales(largest: float, dtype: jnp.dtype) -> list[float]:
    """Choose powers of two around 1 and the default, and around those that bring the largest gradient near the top."""
    exponents = {-8, -4, 0, 4, 8, 12, 15, 18, 21, 24}
    if 0 < largest < math.inf:
        fitting = math.floor(math.log2(float(jnp.finfo(dtype).max)) - math.log2(largest))
        exponents |= {fitting + step for step in (-12, -8, -4, 0, 4)} if not -4 <= fitting <= 20 else set()
    return [2.0**exponent for exponent in sorted(exponents) if -100 <= exponent <= 127]


def nudged(call: LossCall, *, keep_dtypes: bool, by: float = NUDGE) -> list[Any]:
    """Give the arguments, those that are differentiated changed a little."""
    chosen = [call.args[position] for position in call.positions]
    leaves, structure = jax.tree.flatten(chosen)
    most = max(map(np.size, leaves), default=0)
    signs = jnp.asarray(np.random.default_rng(0).choice(np.array([-1, 1], np.int8), most + len(leaves)))
    moved_leaves = [_nudge(leaf, signs, n, by, keep_dtypes) for n, leaf in enumerate(leaves)]
    moved = dict(zip(call.positions, jax.tree.unflatten(structure, moved_leaves), strict=True))
    return [moved.get(position, argument) for position, argument in enumerate(call.args)]


@functools.partial(jax.jit, static_argnums=4)
def _nudge(leaf: Any, signs: jax.Array, start: int, by: float, keep_dtype: bool) -> jax.Array:
    (widened,) = _tree.widen([leaf])
    sign = jax.lax.dynamic_slice_in_dim(signs, start, widened.size).reshape(widened.shape).astype(widened.real.dtype)
    nudged = widened * (1 + by * sign)
    return nudged.astype(leaf.dtype) if keep_dtype else nudged


def value_and_leaves(result: Any, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    """Give the value, and the gradients by path."""
    value, grads = result
    with_paths = jax.tree_util.tree_leaves_with_path(grads)
    return value[0] if has_aux else value, {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
