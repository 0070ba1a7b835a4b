"""Evaluation of the value and the gradients of a function with some of its matmuls in half precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_lossscale._autocast import PrecisionPolicy, autocast
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics import _gradient_errors as errors
from jax_lossscale.diagnostics import _precision_probes as probes
from jax_lossscale.diagnostics._loss_call import LossCall, value_and_leaves
from jax_lossscale.diagnostics._report import Progress

# The maximum number of times that a search evaluates the gradients of each batch.
MOST_GRADIENTS = 30
# Changing the parameters by the fraction `_COARSE` changes the signs of ReLU inputs about as often as rounding to
# float16 in every layer does. If this change to the parameters causes large errors even in float32, the precision of
# the matmuls is not the cause, and the tolerance is increased by a factor of up to `_MOST_SENSITIVE`.
_COARSE = 2.0**-9
_MOST_SENSITIVE = 10.0
# If a leaf contributes less than the fraction `_SMALL_SHARE` to the norm of the whole gradient, its error tolerance is
# `_SMALL_LEAF` times as large, because small gradients are often the result of cancellation. For a leaf whose
# contribution is below `_TINY_SHARE`, only elements that become zero or non-finite count as errors.
_SMALL_SHARE = 0.01
_TINY_SHARE = 0.001
_SMALL_LEAF = 10.0


class Evaluation(NamedTuple):
    """The value and the gradients from one evaluation of one batch."""

    value: Any
    leaves: dict[str, Any]  # the gradients by path, multiplied by the loss scale
    # The measurements of the probes, ``float32[sites, 2 * roles, fields]``, or None if there are no probes.
    measured: Any = None


class Gradients:
    """The value and the gradients of a function for one or more batches, at different precisions of its matmuls.

    The program with probes is compiled only once. The batches are evaluated one by one when the returned iterator
    requests their results, so only the gradients of one batch are in memory at a time.

    Args:
      batches: the calls of the function, one per batch.
      dtype: the half-precision dtype.
      names_parameters: whether the sites contain the paths of parameters.
      progress: a function that wraps a sequence, such as `tqdm`.

    Attributes:
      batches: the calls of the function, one per batch.
      dtype: the half-precision dtype.
      sites: the sites of the matmuls that `autocast` computes in half precision by default.
      numbers: the number of matmuls at each site, ``int[sites]``.
      spent: the number of evaluations per batch so far.
    """

    def __init__(self, batches: list[LossCall], dtype: jnp.dtype, names_parameters: bool, progress: Progress) -> None:
        self.batches, self.dtype, self.spent = batches, dtype, 0
        self._steps = iter(progress(range(MOST_GRADIENTS)))
        found: probes.MatmulsBySite = {}
        probed = probes.with_probes(batches[0].fun, dtype, names_parameters, found)
        self._traced = Traced(*batches[0]._replace(fun=probed).scaled())
        self.sites = tuple(found)
        self.numbers = np.array([len(equations) for equations in found.values()], int)
        # For each row of measurements, the index of the matmul site and the role of the measured value.
        self._sites_and_roles = probes.RoundingEvaluator(dtype).names(self._traced.jaxpr)
        self._compiled = jax.jit(partial(_evaluated, self._traced.jaxpr, dtype))

    def with_levels(self, levels: np.ndarray, scale: float, by: float = 0.0) -> Iterator[Evaluation]:
        """For each batch, evaluate the program with probes.

        Args:
          levels: the precision of each site, ``int[sites]``: `HALF`, `FLOAT32_RESULT` or `FLOAT32`.
          scale: the loss scale.
          by: the fraction by which the parameters are changed.
        """
        self._count()
        return (self._result(batch, levels, scale, by) for batch in self.batches)

    def in_float32(self, scale: float, by: float = 0.0) -> Iterator[Evaluation]:
        """Evaluate the program with probes for each batch, with all matmuls in float32."""
        return self.with_levels(np.full(len(self.sites), probes.FLOAT32), scale, by)

    def measured(self, scale: float) -> probes.ProbeMeasurements:
        """Return the measurements of the probes in float32, as arrays ``float32[sites, 2 * roles]``."""
        return largest_of(self.in_float32(scale))

    def with_policy(self, policy: PrecisionPolicy, scale: float) -> Iterator[Evaluation]:
        """Evaluate the original function under `autocast` with a policy, for each batch."""
        self._count()
        call = self.batches[0]
        traced = Traced(*call._replace(fun=autocast(call.fun, self.dtype, policy=policy)).scaled())
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr))
        inputs = (traced.inputs_from((np.float32(scale), *batch.args), batch.kwargs) for batch in self.batches)
        return (Evaluation(*value_and_leaves(traced, compiled(*each))) for each in inputs)

    def _count(self) -> None:
        self.spent += 1
        next(self._steps, None)

    def _result(self, batch: LossCall, levels: np.ndarray, scale: float, by: float) -> Evaluation:
        args = errors.perturbed(batch, keep_dtypes=False, by=by) if by else batch.args
        inputs = self._traced.inputs_from((np.float32(scale), *args), batch.kwargs)
        are_rounded = jnp.asarray([levels < probes.FLOAT32_RESULT, levels < probes.FLOAT32])
        outputs, rows = self._compiled(are_rounded, inputs)
        measured = np.zeros((len(self.sites), probes.COTANGENTS.stop, len(probes.ProbeMeasurements._fields)))
        for site_and_role, row in zip(self._sites_and_roles, np.asarray(rows), strict=True):
            measured[site_and_role] = np.maximum(measured[site_and_role], row)
        return Evaluation(*value_and_leaves(self._traced, outputs), measured)


def _evaluated(program: ClosedJaxpr, dtype: jnp.dtype, are_rounded: Any, inputs: Sequence[Any]) -> Any:
    """Evaluate a program with probes and return its outputs and the measurements of the probes."""
    outputs, rows = probes.RoundingEvaluator(dtype, are_rounded).evaluate(program, inputs)
    return outputs, jnp.asarray(rows)


def largest_of(results: Iterable[Evaluation]) -> probes.ProbeMeasurements:
    """Return the maxima of the measurements over all batches."""
    largest = np.max([result.measured for result in results], axis=0)
    return probes.ProbeMeasurements(*np.moveaxis(largest, -1, 0))


class Target(NamedTuple):
    """The float32 gradients for one batch, which a trial must reproduce, and the accepted errors."""

    float32: errors.Float32Gradients
    # The tolerances of the value, of each leaf and of the whole gradient. A tolerance of 0 means that the error is
    # ignored, unless it is infinite because a result in half precision is not finite.
    tolerances: list[float]

    def is_finite(self) -> bool:
        """Return whether the value and the gradients are finite."""
        numbers = [self.float32.value, *(leaf.largest for leaf in self.float32.rounding)]
        return all(map(math.isfinite, numbers))

    def errors_of(self, evaluation: Evaluation, scale: float) -> list[tuple[float, float, str]]:
        """Return ``(error / tolerance, error, name)`` for the value, the gradient of each leaf, and the whole gradient.

        Args:
          evaluation: an evaluation for the same batch.
          scale: the loss scale of this evaluation.
        """
        if not math.isfinite(evaluation.value):
            return [(math.inf, math.inf, "the value")]
        measured = errors.measure(evaluation.leaves, self.float32.leaves, scale)
        whole = errors.whole_gradient(measured)
        found = [("the value", errors.relative_error(evaluation.value, self.float32.value))]
        for path, leaf in zip(self.float32.leaves, measured, strict=True):
            is_tiny = leaf.norm < _TINY_SHARE * whole.norm and not leaf.nonfinite
            error = leaf.lost / max(leaf.nonzero, 1) if is_tiny else leaf.relative_error
            found.append((f"the gradient of {path or 'the only leaf'}", error))
        found.append(("the whole gradient", whole.relative_error))
        with_tolerances = zip(found, self.tolerances, strict=True)
        return [(error / tolerance, error, name) for (name, error), tolerance in with_tolerances if tolerance]


class _Changes(NamedTuple):
    """The changes in the float32 results for one batch that are caused by a perturbation of the parameters."""

    value: float  # the relative change of the value
    leaves: list[errors.Measurement]  # the changes in the gradient of each leaf
    whole: errors.Measurement  # the change in the whole gradient


def targets_of(gradients: Gradients, tolerance: float) -> tuple[list[Target], probes.ProbeMeasurements]:
    """Evaluate the float32 gradients for the original parameters, and for two small random perturbations of them.

    Return the target for each batch, and the measurements of the probes without a loss scale.
    """
    exact = list(gradients.in_float32(1.0))

    def changes(exact: Evaluation, moved: Evaluation) -> _Changes:
        leaves = errors.measure(moved.leaves, exact.leaves, 1.0)
        return _Changes(errors.relative_error(moved.value, exact.value), leaves, errors.whole_gradient(leaves))

    # `map` frees the gradients of each batch before the next batch is evaluated.
    fine, coarse = (list(map(changes, exact, gradients.in_float32(1.0, by))) for by in (errors.PERTURBATION, _COARSE))
    targets = [
        Target(errors.Float32Gradients(value, leaves, small.leaves), _tolerances(tolerance, small, large))
        for (value, leaves, _), small, large in zip(exact, fine, coarse, strict=True)
    ]
    return targets, largest_of(exact)


def _tolerances(tolerance: float, fine: _Changes, coarse: _Changes) -> list[float]:
    """Return the tolerances of the value, of each leaf and of the whole gradient, as in `Target`.

    A result in half precision can be judged only if the result is reliable in float32. Two perturbations of the
    parameters measure how reliable the value and the gradient of each leaf are:

    - The fine perturbation multiplies each parameter by ``1 ± 2**-22``, a change of a few float32 rounding errors. If
      it changes a result by more than half the tolerance, the result consists of rounding errors, and its error is
      ignored.
    - The coarse perturbation multiplies each parameter by ``1 ± 2**-9``, a change of a few float16 rounding errors. If
      it changes a result disproportionately, for example because the inputs of ReLUs change sign, the tolerance of the
      result is increased.

    Args:
      tolerance: the tolerance of the user.
      fine: the changes after a perturbation by `errors.PERTURBATION`.
      coarse: the changes after a perturbation by `_COARSE`.
    """

    def allowed(fine_change: float, coarse_change: float) -> float:
        """Return the tolerance for a reliable result, given its relative changes after both perturbations."""
        # The changes of a smooth function are proportional to the perturbations. If the coarse change is
        # disproportionately large, the function has kinks. Rounding to half precision crosses the same kinks, even if
        # all matmuls are in float32.
        if coarse_change <= 2 * fine_change * _COARSE / errors.PERTURBATION:
            return tolerance
        return min(max(coarse_change, tolerance), _MOST_SENSITIVE * tolerance)

    # A tolerance of 0 means that the error of the result is ignored, for example because a gradient is zero. If a leaf
    # contributes little to the whole gradient, its tolerance is `_SMALL_LEAF` times that of the other leaves.
    tolerances = [allowed(fine.value, coarse.value) if fine.value <= tolerance / 2 else 0.0]
    for small, large in zip(fine.leaves, coarse.leaves, strict=True):
        is_reliable = small.norm > 0 and small.relative_error <= tolerance / 2
        times = _SMALL_LEAF if small.norm < _SMALL_SHARE * fine.whole.norm else 1.0
        tolerances.append(times * allowed(small.relative_error, large.relative_error) if is_reliable else 0.0)
    # The error of the whole gradient is never ignored, so that at least one error is always checked.
    return [*tolerances, allowed(fine.whole.relative_error, coarse.whole.relative_error)]
