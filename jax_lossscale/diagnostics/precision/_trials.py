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
from jax_lossscale.diagnostics.asked._call import Call
from jax_lossscale.diagnostics.errors._gradient_error import (
    LeafGradientError,
    Measurement,
    measure,
    report_of_all,
    reports_of_leaves,
)
from jax_lossscale.diagnostics.errors._gradients_by_scale import (
    NUDGE,
    is_of_the_program,
    nudged,
    relative_error,
    value_and_leaves,
)
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
# A leaf with less than the first share of the gradient may have ten times its error: it is small because much cancels.
# Of one with less than the second, only what is lost counts.
_SMALL_SHARE = 0.01
_TINY_SHARE = 0.001
_SMALL_LEAF = 10.0


class Trial(NamedTuple):
    """What was found with some products wide.

    Attributes:
      levels: ``int[sites]``: `NARROW`, `WIDE_RESULT` or `WIDE`.
      scale: the loss scale.
      ratio: the worst error of the value, of all gradients or of a leaf, over what it may be.
      error: that error; infinite if anything is not finite.
      where: of what it is, in words.
    """

    levels: np.ndarray
    scale: float
    ratio: float
    error: float
    where: str


class _Exact(NamedTuple):
    """What float32 gives for a batch.

    Attributes:
      value: the value.
      leaves: the gradients by path.
      rounding: how much of each gradient is rounding in float32, too.
      tolerances: how large the errors of the value, of each leaf and of all may be; 0 where they are not judged.
      total: the norm of all gradients.
    """

    value: Any
    leaves: dict[str, Any]
    rounding: list[Measurement]
    tolerances: list[float]
    total: float

    def errors(self, value: Any, leaves: dict[str, Any], scale: float) -> list[tuple[float, float, str]]:
        """Give the errors of a result at a loss scale: each over what it may be, as it is, and of what it is."""
        reports = reports_of_leaves(self.leaves, [measure(leaves, self.leaves, scale)], self.rounding)
        found = [("the value", relative_error(value, self.value))]
        for leaf in reports:
            is_tiny = leaf.norm < _TINY_SHARE * self.total and not leaf.nonfinite[0]
            error = leaf.lost[0] if is_tiny else leaf.relative_error[0]
            found.append((f"the gradient of {leaf.path or 'the only leaf'}", error))
        found.append(("the whole gradient", report_of_all(reports).relative_error[0]))
        judged = [(*each, tolerance) for each, tolerance in zip(found, self.tolerances, strict=True) if tolerance]
        finite = [(name, math.inf if math.isnan(error) else error, tolerance) for name, error, tolerance in judged]
        return [(error / tolerance, error, name) for name, error, tolerance in finite]


class Trials:
    """A function on some batches, that is tried with some products wide.

    Attributes:
      dtype: the half precision.
      sites: the products that `autocast` makes narrow.
      numbers: how many products there are at each site.
      spent: how many gradients have been computed, for each batch.
      measured: what each probe meets in float32, unscaled: each field ``float[sites, 2 * roles]``.
      leaves: the gradients of the first batch in float32.
    """

    def __init__(
        self, batches: Sequence[Call], dtype: jnp.dtype, tolerance: float, *, names_parameters: bool = True
    ) -> None:
        self.dtype = dtype
        self._call, self._batches = batches[0], batches
        self._tolerance = tolerance
        self.spent = 0
        probes = Probes(self._call.fun, dtype, names_parameters)
        self._traced, _ = self._call.scaled(probes)
        self.sites = tuple(probes.sites)
        self.numbers = np.array([len(probes.equations[site]) for site in self.sites], int)
        self._known: dict[bytes, Trial] = {}

        def measured(strengths: Any, scale: Any, inputs: Any) -> Any:
            return RoundingEvaluator(dtype, strengths).measured(self._traced.jaxpr, [scale, *inputs])

        self._compiled = jax.jit(measured, compiler_options=_EXACT)
        wide = np.full(len(self.sites), WIDE)
        exact = self._run(wide, 1.0, [batch.args for batch in batches])
        self.measured = _worst([measured for *_, measured in exact])
        moved = ([nudged(batch, keep_dtypes=False, by=by) for batch in batches] for by in (NUDGE, _COARSE))
        results = zip(exact, *(self._run(wide, 1.0, each) for each in moved), strict=True)
        self._exact = [self._judged(*(result[:2] for result in of_batch)) for of_batch in results]
        first = self._exact[0]
        self.leaves: list[LeafGradientError] = reports_of_leaves(first.leaves, [first.rounding], first.rounding)

    def trial(self, levels: np.ndarray) -> Trial:
        """Try the products of each site narrow or wide, at the best loss scale; what was tried before is known."""
        if levels.tobytes() not in self._known:
            scale = self.best_scale(levels)
            self._known[levels.tobytes()] = Trial(levels, scale, *self._errors(lambda: self._run(levels, scale), scale))
        return self._known[levels.tobytes()]

    def verified(self, policy: PrecisionPolicy) -> tuple[float, float, str]:
        """Give the error of the function itself, under `autocast` with a policy, as a `Trial` has it."""
        self.spent += 1
        traced, _ = self._call.scaled(autocast(self._call.fun, self.dtype, policy=policy))
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr), compiler_options=_EXACT)
        scale = policy.loss_scale or 1.0

        def results() -> list[Any]:
            inputs = (traced.inputs_from((np.float32(scale), *batch.args), batch.kwargs) for batch in self._batches)
            return [value_and_leaves(traced.result(compiled(*each)), self._call.has_aux) for each in inputs]

        return self._errors(results, scale)

    def is_exact_finite(self) -> bool:
        """Tell whether value and gradients are finite in float32."""
        numbers = (number for each in self._exact for number in (each.value, *(leaf.largest for leaf in each.rounding)))
        return all(map(math.isfinite, numbers))

    def measured_at(self, scale: float) -> Measured:
        """Give what the probes meet in float32, at a loss scale."""
        return _worst([measured for *_, measured in self._run(np.full(len(self.sites), WIDE), scale)])

    def best_scale(self, levels: np.ndarray) -> float:
        """Give the largest power of two with which no cotangent of a narrow product overflows, with a little room."""
        if self.dtype != jnp.float16:
            return 1.0
        largest = self.measured.largest[levels < WIDE, NUMBER_OF_ROLES:].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        log2 = math.floor(math.log2(limits_of(self.dtype).overflow / largest)) - _LOG2_HEADROOM
        return 2.0 ** min(max(log2, -100), 100)

    def _errors(self, results: Callable[[], Sequence[Any]], scale: float) -> tuple[float, float, str]:
        """Give the worst error in the values and gradients of the batches."""
        errors = [(0.0, 0.0, "nothing")]
        try:
            for (value, leaves, *_), exact in zip(results(), self._exact, strict=True):
                errors += exact.errors(value, leaves, scale)
        except (RuntimeError, ValueError) as error:  # of a solver, say, that refuses infinities
            if not is_of_the_program(error):
                raise
            errors.append((math.inf, math.inf, "the value"))
        return max(errors)

    def _judged(self, exact: Sequence[Any], at_fine: Sequence[Any], at_coarse: Sequence[Any]) -> _Exact:
        """Say how large errors may be, by what two nudges of the parameters change in float32.

        An error is not judged if the fine nudge makes one as large. It may be larger if the coarse nudge, which is like
        rounding to half precision, makes one, as where it turns the sign of what goes into a ReLU.
        """
        (value, leaves), (fine, fine_leaves), (coarse, coarse_leaves) = exact, at_fine, at_coarse
        rounding = measure(fine_leaves, leaves, 1.0)
        reports = reports_of_leaves(leaves, [measure(coarse_leaves, leaves, 1.0)], rounding)
        total, of_value = report_of_all(reports), relative_error(fine, value)
        tolerances = [self._allowed(relative_error(coarse, value), of_value) * (of_value <= self._tolerance / 2)]
        for leaf in reports:
            is_judged = leaf.norm > 0 and not leaf.rounding > self._tolerance / 2
            times = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            tolerances.append(is_judged * times * self._allowed(leaf.relative_error[0], leaf.rounding))
        tolerances.append(self._allowed(total.relative_error[0], total.rounding))
        return _Exact(value, leaves, rounding, tolerances, total.norm)

    def _allowed(self, coarse: float, fine: float) -> float:
        """Say how large an error may be, by what the two nudges change: in proportion to them, without kinks."""
        if coarse <= 2 * fine * _COARSE / NUDGE:
            return self._tolerance
        return min(max(coarse, self._tolerance), _MOST_SENSITIVE * self._tolerance)

    def _run(self, levels: np.ndarray, scale: float, batches: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """Give the value, the gradients by path and what the probes measure, for each batch."""
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < WIDE_RESULT, levels < WIDE]), jnp.float32)
        results = []
        for args in batches or [batch.args for batch in self._batches]:
            inputs = self._traced.inputs_from((np.float32(1), *args), self._call.kwargs)[1:]
            outputs, measured = self._compiled(strengths, jnp.float32(scale), inputs)
            by_site = np.zeros((len(self.sites), 2 * NUMBER_OF_ROLES, len(Measured._fields)))
            for key, statistics in jax.device_get(measured).items():
                by_site[key] = statistics
            results.append((*value_and_leaves(self._traced.result(outputs), self._call.has_aux), by_site))
        return results


def _worst(measured: Sequence[np.ndarray]) -> Measured:
    return Measured(*np.moveaxis(np.max(measured, axis=0), -1, 0))
