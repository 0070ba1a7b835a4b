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
from jax_lossscale.diagnostics.programs._gradient_error import (
    LeafGradientError,
    measure,
    report_of_all,
    reports_of_leaves,
)
from jax_lossscale.diagnostics.programs._gradients_by_scale import NUDGE, nudged, relative_error, value_and_leaves
from jax_lossscale.diagnostics.programs._probes import NUMBER_OF_ROLES, Probes, RoundingEvaluator, Statistics
from jax_lossscale.diagnostics.programs._question import gradient_program

# What becomes of the products of a site.
NARROW, WIDE_RESULT, WIDE = range(3)
# No two scales' gradients are equally large; from the largest that fits, a little down.
_LOG2_HEADROOM = 1
# Roundings to float16, layer after layer, turn the sign of what goes into a ReLU as often as this does in float32. What
# that changes is not the products', and may be so many times the tolerance.
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
      error: the worst of the errors of the value, of all gradients, and of each leaf that matters; infinite if anything
        is not finite.
      where: of what that error is, in words.
      results: by batch, the value and the gradients of the leaves, divided by the scale; empty if forgotten.
    """

    levels: np.ndarray
    scale: float
    error: float
    where: str
    results: Sequence[list[Any]] = ()


class Program:
    """A function on some batches, that can be computed with some products wide.

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
        self._compiled = jax.jit(self._outputs, compiler_options={"xla_allow_excess_precision": False})
        self._slope = jax.jit(jax.grad(self._deviation))
        exact = self._run(np.full(len(self.sites), WIDE), 1.0, batches)
        self.exact = [(value, leaves) for value, leaves, _ in exact]
        self.largest = np.max([measured[..., 0] for *_, measured in exact], axis=0)
        moved = self._run(
            np.full(len(self.sites), WIDE), 1.0, [nudged(args, argnums, keep_dtypes=False) for args in batches]
        )
        coarse = [nudged(args, argnums, keep_dtypes=False, by=_COARSE) for args in batches]
        rounded = self._run(np.full(len(self.sites), WIDE), 1.0, coarse)
        self._rounding, self._weights = [], []
        for (value, leaves, _), (rounded_value, at_rounded, _), (exact_value, exact) in zip(
            moved, rounded, self.exact, strict=True
        ):
            rounding = measure(leaves, exact, 1.0)
            self._rounding.append(rounding)
            reports = reports_of_leaves(exact, [measure(at_rounded, exact, 1.0)], rounding)
            self._weights.append(self._weights_of((value, rounded_value, exact_value), reports))

    def trial(self, levels: np.ndarray) -> Trial:
        """With the products of each site narrow or wide, at the best loss scale; what was tried before is known."""
        if levels.tobytes() in self._known:
            return self._known[levels.tobytes()]
        scale = self.best_scale(levels)
        found = self._run(levels, scale, self.batches)
        error, where = self.error([(value, leaves) for value, leaves, _ in found], scale)
        self._known[levels.tobytes()] = trial = Trial(levels, scale, error, where)
        return trial._replace(
            results=[[value, *(leaf / scale for leaf in leaves.values())] for value, leaves, _ in found]
        )

    def verified(self, policy: PrecisionPolicy) -> tuple[float, str]:
        """The error of the function itself, under `autocast` with a policy."""
        self.spent += 1
        traced = self._traced_with(autocast(self._fun, self.dtype, policy=policy))
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr), compiler_options={"xla_allow_excess_precision": False})
        scale = policy.loss_scale or 1.0
        inputs = (traced.inputs_from((np.float32(scale), *batch), self._kwargs) for batch in self.batches)
        return self.error([value_and_leaves(traced.result(compiled(*each)), self._has_aux) for each in inputs], scale)

    def is_exact_finite(self) -> bool:
        """Whether value and gradients are finite in float32."""
        largest = [value for value, _ in self.exact] + [m.largest for of in self._rounding for m in of]
        return all(math.isfinite(each) for each in largest)

    def measured_at(self, scale: float) -> np.ndarray:
        """What is met at the probes in float32, at a loss scale: ``float32[sites, 2 * roles, 2]``."""
        found = self._run(np.full(len(self.sites), WIDE), scale, self.batches)
        return np.max([measured for *_, measured in found], axis=0)

    def best_scale(self, levels: np.ndarray) -> float:
        """The largest power of two with which no cotangent of a narrow product overflows, with a little room above."""
        if self.dtype != jnp.float16:
            return 1.0
        largest = self.largest[levels < WIDE, NUMBER_OF_ROLES:].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        log2 = math.floor(math.log2(limits_of(self.dtype).overflow / largest)) - _LOG2_HEADROOM
        return 2.0 ** min(max(log2, -100), 100)

    def damages(self, trial: Trial) -> np.ndarray | None:
        """``float[2, sites]``: what rounding the result of each product, and all else of it, adds to the error.

        To first order, from one backward pass through the program of the gradients: rounding errors times the
        derivative of the deviation from float32, in the direction that it had in a trial. ``None`` if JAX cannot
        differentiate the gradients, of a loop of unknown length for one.
        """
        if not trial.results:
            self._known.pop(trial.levels.tobytes())
            trial = self.trial(trial.levels)
        self.spent += 4
        total = np.zeros((2, len(self.sites)))
        for batch, (value, leaves), weights, results in zip(
            self.batches, self.exact, self._weights, trial.results, strict=True
        ):
            exact = [value, *leaves.values()]
            directions = [_direction(a, b) * weight for a, b, weight in zip(results, exact, weights, strict=False)]
            try:
                slope = self._slope(
                    jnp.zeros((2, len(self.sites))), jnp.float32(trial.scale), self._inputs(batch), directions
                )
            except (TypeError, ValueError, NotImplementedError):
                return None
            total = np.maximum(total, np.abs(np.nan_to_num(slope, nan=np.inf, posinf=np.inf, neginf=np.inf)))
        return total

    def error(self, found: Sequence[tuple[Any, dict[str, Any]]], scale: float) -> tuple[float, str]:
        """The worst error, and of what."""
        worst = (0.0, "nothing")
        for (value, leaves), (exact_value, exact), rounding, weights in zip(
            found, self.exact, self._rounding, self._weights, strict=True
        ):
            reports = reports_of_leaves(exact, [measure(leaves, exact, scale)], rounding)
            errors = [relative_error(value, exact_value), *(leaf.relative_error[0] for leaf in reports)]
            names = ["the value", *(f"the gradient of {leaf.path or 'the only leaf'}" for leaf in reports)]
            of_all = report_of_all(reports).relative_error[0]
            judged = zip([*errors, of_all], [*names, "the whole gradient"], weights, strict=True)
            worst = max([worst, *((error * weight, name) for error, name, weight in judged if weight)])
        return (math.inf if math.isnan(worst[0]) else worst[0]), worst[1]

    def _weights_of(self, values: Sequence[Any], leaves: list[LeafGradientError]) -> list[float]:
        """How much the errors of the value, of each leaf and of all count: not at all, if a nudge moves it as far.

        And less by what parameters rounded to half precision make in float32, too, as where they turn the sign of
        what goes into a ReLU.
        """
        value, rounded, exact = values
        total, of_value = report_of_all(leaves), relative_error(value, exact)
        weights = [self._counts(relative_error(rounded, exact), of_value) * (of_value <= self._tolerance / 2)]
        for leaf in leaves:
            is_judged = leaf.norm > 0 and not leaf.rounding > self._tolerance / 2
            share = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            weights.append(is_judged * self._counts(leaf.relative_error[0], leaf.rounding) / share)
        return [*weights, self._counts(total.relative_error[0], total.rounding)]

    def _counts(self, coarse: float, fine: float) -> float:
        """``coarse`` and ``fine``: what the two nudges change. Without kinks that is in proportion to the nudges."""
        if coarse <= 2 * fine * _COARSE / NUDGE:
            return 1.0
        return max(self._tolerance / max(coarse, self._tolerance), 1 / _MOST_SENSITIVE)

    def _traced_with(self, fun: Callable[..., Any]) -> Traced:
        args = (self.batches[0], self._kwargs, self._argnums, self._has_aux)
        return gradient_program("find_precision", fun, *args)[0]

    def _inputs(self, batch: Sequence[Any]) -> list[Any]:
        return self._traced.inputs_from((np.float32(1), *batch), self._kwargs)[1:]

    def _run(self, levels: np.ndarray, scale: float, batches: Sequence[Sequence[Any]]) -> list[Any]:
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < WIDE_RESULT, levels < WIDE]), jnp.float32)
        found = []
        for batch in batches:
            outputs, measured = self._compiled(strengths, jnp.float32(scale), self._inputs(batch))
            by_site = np.zeros((len(self.sites), 2 * NUMBER_OF_ROLES, len(Statistics._fields)))
            for key, statistics in jax.device_get(measured).items():
                by_site[key] = statistics
            found.append((*value_and_leaves(self._traced.result(outputs), self._has_aux), by_site))
        return found

    def _outputs(self, strengths: Any, scale: Any, inputs: Any) -> Any:
        return RoundingEvaluator(self.dtype, strengths).measured(self._traced.jaxpr, [scale, *inputs])

    def _deviation(self, strengths: Any, scale: Any, inputs: Any, directions: Any) -> Any:
        evaluator = RoundingEvaluator(self.dtype, strengths, is_smooth=True)
        outputs, _ = evaluator.evaluate(self._traced.jaxpr, [scale, *inputs])
        value, leaves = value_and_leaves(self._traced.result(outputs), self._has_aux)
        # The derivative of the value has the loss scale as a factor, as the gradients have.
        parts = [value / scale, *(leaf / scale for leaf in leaves.values())]
        return sum(jnp.sum(part * direction) for part, direction in zip(parts, directions, strict=True)).real


def _direction(of: Any, exact: Any) -> Any:
    """A unit deviation of a leaf, relative to its norm; where it is not finite, that of its numbers themselves."""
    exact = np.asarray(exact)
    error = np.asarray(of, exact.dtype) - exact
    if not np.all(np.isfinite(error)):
        error = exact
    norm, size = np.linalg.norm(error), np.linalg.norm(exact)
    return np.conj(error) / (norm * size) if norm > 0 and size > 0 else np.zeros_like(exact)
