"""Trials of `find_precision`: value and gradients with some products wide, compared with float32's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jax_lossscale._autocast import PrecisionPolicy, autocast
from jax_lossscale._limits import limits_of
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics.asked._question import gradient_program
from jax_lossscale.diagnostics.errors._gradient_error import Measurement, measure, report_of_all, reports_of_leaves
from jax_lossscale.diagnostics.errors._gradients_by_scale import NUDGE, nudged, relative_error, value_and_leaves
from jax_lossscale.diagnostics.precision._probes import NUMBER_OF_ROLES, Measured, Probes, RoundingEvaluator

_EXACT = {"xla_allow_excess_precision": False}
# What becomes of the products of a site.
NARROW, WIDE_RESULT, WIDE = range(3)
# How far the loss scale is below the largest that fits, since batches differ.
_LOG2_HEADROOM = 1
# Parameters moved by this much turn the sign of what goes into a ReLU as often as float16 does, layer after layer. The
# products are not to blame for what that changes, up to so many times the tolerance.
_COARSE = 2.0**-9
_MOST_SENSITIVE = 10.0
# A leaf with less than this share of the gradient may have ten times its error: it is small because much cancels.
_SMALL_SHARE = 0.01
_SMALL_LEAF = 10.0


class Trial(NamedTuple):
    """What was found with some products wide.

    Attributes:
      levels: ``int[sites]``: `NARROW`, `WIDE_RESULT` or `WIDE`.
      scale: the loss scale.
      error: the worst error of the value, of all gradients, or of a leaf that counts; infinite if it is not finite.
      where: of what that error is, in words.
    """

    levels: np.ndarray
    scale: float
    error: float
    where: str


class _Exact(NamedTuple):
    """What float32 gives for a batch.

    Attributes:
      value: the value.
      leaves: the gradients by path.
      rounding: how much of each gradient is rounding in float32, too.
      weights: how much the errors of the value, of each leaf and of all count.
    """

    value: Any
    leaves: dict[str, Any]
    rounding: list[Measurement]
    weights: list[float]

    def errors(self, value: Any, leaves: dict[str, Any], scale: float) -> list[tuple[float, str]]:
        """Give the weighted errors of a result at a loss scale, and of what each is."""
        reports = reports_of_leaves(self.leaves, [measure(leaves, self.leaves, scale)], self.rounding)
        errors = (leaf.relative_error[0] for leaf in (*reports, report_of_all(reports)))
        names = ["the value", *(f"the gradient of {leaf.path or 'the only leaf'}" for leaf in reports)]
        names.append("the whole gradient")
        judged = zip([relative_error(value, self.value), *errors], self.weights, names, strict=True)
        return [(error * weight, name) for error, weight, name in judged if weight]


class Trials:
    """A function on some batches, that is tried with some products wide.

    Attributes:
      sites: the products that `autocast` makes narrow.
      numbers: how many products there are at each site.
      spent: how many gradients have been computed, for each batch.
      largest: ``float[sites, 2 * roles]``: the largest magnitude that each probe meets in float32, unscaled.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        batches: Sequence[Sequence[Any]],
        kwargs: Any,
        argnums: Any,
        has_aux: bool,
        dtype: jnp.dtype,
        tolerance: float,
        names_parameters: bool = True,
    ) -> None:
        self._fun = fun
        self._tolerance = tolerance
        self._argnums = argnums
        self._has_aux = has_aux
        self.dtype = dtype
        self._kwargs = kwargs
        self.batches = batches
        self.spent = 0
        probes = Probes(fun, dtype, names_parameters)
        self._traced = self._traced_with(probes)
        self.sites = tuple(probes.sites)
        self.numbers = np.array([len(probes.equations[site]) for site in self.sites], int)
        self._known: dict[bytes, Trial] = {}

        def measured(strengths: Any, scale: Any, inputs: Any) -> Any:
            return RoundingEvaluator(dtype, strengths).measured(self._traced.jaxpr, [scale, *inputs])

        self._compiled = jax.jit(measured, compiler_options=_EXACT)
        self._slope = jax.jit(jax.grad(self._deviation))
        wide = np.full(len(self.sites), WIDE)
        exact = self._run(wide, 1.0, batches)
        self.largest = np.max([measured[..., 0] for *_, measured in exact], axis=0)
        moved = ([nudged(args, argnums, keep_dtypes=False, by=by) for args in batches] for by in (NUDGE, _COARSE))
        results = zip(exact, *(self._run(wide, 1.0, each) for each in moved), strict=True)
        self.exact = [self._exact(*(result[:2] for result in of_batch)) for of_batch in results]

    def trial(self, levels: np.ndarray) -> Trial:
        """Try the products of each site narrow or wide, at the best loss scale; what was tried before is known."""
        if levels.tobytes() not in self._known:
            scale = self.best_scale(levels)
            error, where = self._worst([result[:2] for result in self._run(levels, scale, self.batches)], scale)
            self._known[levels.tobytes()] = Trial(levels, scale, error, where)
        return self._known[levels.tobytes()]

    def verified(self, policy: PrecisionPolicy) -> tuple[float, str]:
        """Give the error of the function itself, under `autocast` with a policy, and of what it is."""
        self.spent += 1
        traced = self._traced_with(autocast(self._fun, self.dtype, policy=policy))
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr), compiler_options=_EXACT)
        scale = policy.loss_scale or 1.0
        inputs = (traced.inputs_from((np.float32(scale), *batch), self._kwargs) for batch in self.batches)
        return self._worst([value_and_leaves(traced.result(compiled(*each)), self._has_aux) for each in inputs], scale)

    def is_exact_finite(self) -> bool:
        """Tell whether value and gradients are finite in float32."""
        numbers = (number for each in self.exact for number in (each.value, *(leaf.largest for leaf in each.rounding)))
        return all(map(math.isfinite, numbers))

    def measured_at(self, scale: float) -> np.ndarray:
        """Give what the probes meet in float32, at a loss scale: ``float32[sites, 2 * roles, 2]``."""
        results = self._run(np.full(len(self.sites), WIDE), scale, self.batches)
        return np.max([measured for *_, measured in results], axis=0)

    def best_scale(self, levels: np.ndarray) -> float:
        """Give the largest power of two with which no cotangent of a narrow product overflows, with a little room."""
        if self.dtype != jnp.float16:
            return 1.0
        largest = self.largest[levels < WIDE, NUMBER_OF_ROLES:].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        log2 = math.floor(math.log2(limits_of(self.dtype).overflow / largest)) - _LOG2_HEADROOM
        return 2.0 ** min(max(log2, -100), 100)

    def damages(self, levels: np.ndarray, scale: float) -> np.ndarray | None:
        """Give what rounding the result of each product, and all else of it, adds to the error: ``float[2, sites]``.

        To first order: rounding errors times the derivative of the deviation from float32, in the direction that it
        has with these levels. ``None`` if JAX cannot differentiate the gradients, as of a loop of unknown length.
        """
        self.spent += 3
        total = np.zeros((2, len(self.sites)))
        at_levels = self._run(levels, scale, self.batches)
        for batch, (value, leaves, _), exact in zip(self.batches, at_levels, self.exact, strict=True):
            results = [value, *(leaf / scale for leaf in leaves.values())]
            exact_results = [exact.value, *exact.leaves.values()]
            *weights, _ = exact.weights  # but that of all leaves together
            directions = [
                _direction(*each) * weight for *each, weight in zip(results, exact_results, weights, strict=True)
            ]
            try:
                slope = self._slope(jnp.zeros_like(total), jnp.float32(scale), self._inputs(batch), directions)
            except (TypeError, ValueError, NotImplementedError):
                return None
            total = np.maximum(total, np.abs(np.nan_to_num(slope, nan=np.inf, posinf=np.inf, neginf=np.inf)))
        return total

    def _worst(self, results: Sequence[Sequence[Any]], scale: float) -> tuple[float, str]:
        """Give the worst error in the values and gradients of the batches, and of what it is."""
        errors = [(0.0, "nothing")]
        for (value, leaves), exact in zip(results, self.exact, strict=True):
            errors += exact.errors(value, leaves, scale)
        return max((math.inf if math.isnan(error) else error, where) for error, where in errors)

    def _exact(self, exact: Sequence[Any], at_fine: Sequence[Any], at_coarse: Sequence[Any]) -> _Exact:
        """Weigh the errors by what two nudges of the parameters change in float32.

        An error does not count if the fine nudge makes one as large. It counts less if the coarse nudge, which is like
        rounding to half precision, makes one, as where it turns the sign of what goes into a ReLU.
        """
        (value, leaves), (fine, fine_leaves), (coarse, coarse_leaves) = exact, at_fine, at_coarse
        rounding = measure(fine_leaves, leaves, 1.0)
        reports = reports_of_leaves(leaves, [measure(coarse_leaves, leaves, 1.0)], rounding)
        total, of_value = report_of_all(reports), relative_error(fine, value)
        weights = [self._weight(relative_error(coarse, value), of_value) * (of_value <= self._tolerance / 2)]
        for leaf in reports:
            is_judged = leaf.norm > 0 and not leaf.rounding > self._tolerance / 2
            share = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            weights.append(is_judged * self._weight(leaf.relative_error[0], leaf.rounding) / share)
        return _Exact(value, leaves, rounding, [*weights, self._weight(total.relative_error[0], total.rounding)])

    def _weight(self, coarse: float, fine: float) -> float:
        """Weigh by what the two nudges change. Without kinks that is in proportion to the nudges."""
        if coarse <= 2 * fine * _COARSE / NUDGE:
            return 1.0
        return max(self._tolerance / max(coarse, self._tolerance), 1 / _MOST_SENSITIVE)

    def _traced_with(self, fun: Callable[..., Any]) -> Traced:
        args = (self.batches[0], self._kwargs, self._argnums, self._has_aux)
        return gradient_program("find_precision", fun, *args)[0]

    def _inputs(self, batch: Sequence[Any]) -> list[Any]:
        return self._traced.inputs_from((np.float32(1), *batch), self._kwargs)[1:]

    def _run(self, levels: np.ndarray, scale: float, batches: Sequence[Sequence[Any]]) -> list[Any]:
        """Give the value, the gradients by path and what the probes measure, for each batch."""
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < WIDE_RESULT, levels < WIDE]), jnp.float32)
        results = []
        for batch in batches:
            outputs, measured = self._compiled(strengths, jnp.float32(scale), self._inputs(batch))
            by_site = np.zeros((len(self.sites), 2 * NUMBER_OF_ROLES, len(Measured._fields)))
            for key, statistics in jax.device_get(measured).items():
                by_site[key] = statistics
            results.append((*value_and_leaves(self._traced.result(outputs), self._has_aux), by_site))
        return results

    def _deviation(self, strengths: Any, scale: Any, inputs: Any, directions: Any) -> Any:
        evaluator = RoundingEvaluator(self.dtype, strengths, is_smooth=True)
        outputs, _ = evaluator.evaluate(self._traced.jaxpr, [scale, *inputs])
        value, leaves = value_and_leaves(self._traced.result(outputs), self._has_aux)
        # The derivative of the value has the loss scale as a factor, as the gradients have.
        parts = [value / scale, *(leaf / scale for leaf in leaves.values())]
        return sum(jnp.sum(part * direction) for part, direction in zip(parts, directions, strict=True)).real


def _direction(leaf: Any, exact: Any) -> Any:
    """Give the unit deviation of a leaf, relative to its norm; where it is not finite, that of its numbers."""
    exact = np.asarray(exact)
    error = np.asarray(leaf, exact.dtype) - exact
    if not np.all(np.isfinite(error)):
        error = exact
    norm, size = np.linalg.norm(error), np.linalg.norm(exact)
    return np.conj(error) / (norm * size) if norm > 0 and size > 0 else np.zeros_like(exact)
