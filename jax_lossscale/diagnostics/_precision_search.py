"""Search for the matmuls that must not be in half precision, by measuring the errors of value and gradients."""

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
from jax_lossscale.diagnostics import _gradient_errors as errors
from jax_lossscale.diagnostics._loss_call import LossCall
from jax_lossscale.diagnostics._precision_probes import (
    COTANGENTS,
    FLOAT32,
    FLOAT32_RESULT,
    HALF,
    LEFT,
    RESULT,
    RIGHT,
    MatmulsBySite,
    Measured,
    RoundingEvaluator,
    with_probes,
)
from jax_lossscale.diagnostics._report import off, power_of_two, report_progress

MOST_GRADIENTS = 30
_OF_VERIFYING = 6
_EXACT = {"xla_allow_excess_precision": False}
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
    """The result of a trial with some matmuls in float32.

    Attributes:
      levels: ``int[sites]``: half precision, float32 result, or float32.
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

    @property
    def is_right(self) -> bool:
        """Whether all errors are within what they may be; if any matmul is in float32, within half of it."""
        return self.ratio <= (0.5 if self.levels.any() else 1.0)


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
    rounding: list[errors.Measurement]
    tolerances: list[float]
    total: float

    def judged(self, value: Any, leaves: dict[str, Any], scale: float) -> list[tuple[float, float, str]]:
        """Give the errors of a result at a loss scale: each over what it may be, as it is, and of what it is."""
        reports, total = errors.reports_of(self.leaves, [errors.measure(leaves, self.leaves, scale)], self.rounding)
        found = [("the value", errors.relative_error(value, self.value))]
        for leaf in reports:
            is_tiny = leaf.norm < _TINY_SHARE * self.total and not leaf.nonfinite[0]
            error = leaf.lost[0] if is_tiny else leaf.relative_error[0]
            found.append((f"the gradient of {leaf.path or 'the only leaf'}", error))
        found.append(("the whole gradient", total.relative_error[0]))
        return [
            (error / tolerance, error, name)
            for (name, error), tolerance in zip(found, self.tolerances, strict=True)
            if tolerance
        ]


class Search:
    """A search for the matmuls that must be in float32, by trials on some batches.

    Attributes:
      sites: the matmuls that `autocast` computes in half precision.
      numbers: how many products there are at each site.
      spent: how many gradients have been computed, for each batch.
      leaves: the gradients of the first batch in float32.
    """

    def __init__(
        self, batches: Sequence[LossCall], dtype: jnp.dtype, tolerance: float, progress: bool, names_parameters: bool
    ) -> None:
        self._call, self._batches, self._progress = batches[0], batches, progress
        self._dtype, self._tolerance, self._overflow = dtype, tolerance, limits_of(dtype).overflow
        self.spent = 0
        self._known: dict[bytes, Trial] = {}

        # Trace and compile one program for all trials.
        found: MatmulsBySite = {}
        probed = with_probes(self._call.fun, dtype, names_parameters, found)
        self._traced = self._call._replace(fun=probed).scaled()
        self.sites = tuple(found)
        self.numbers = np.array([len(equations) for equations in found.values()], int)
        self._row_names = RoundingEvaluator(dtype).names(self._traced.jaxpr)  # the site and the role of each row
        self._compiled = jax.jit(self._evaluated, compiler_options=_EXACT)

        # Measure in float32, without a loss scale: ``_largest`` is ``float[sites, 2 * roles]``. ``_damages`` is
        # ``float[sites, 2]``: the damage of rounding the result of each matmul, and of rounding its operands.
        in_float32 = np.full(len(self.sites), FLOAT32)
        exact, measured = self._run(in_float32, 1.0)
        self._largest = measured.largest
        damage = np.nan_to_num(measured.damage[:, COTANGENTS])
        self._damages = np.stack([damage[:, RESULT], damage[:, [LEFT, RIGHT]].sum(axis=1)], axis=1)

        # Derive the tolerances from the changes that two nudges of the parameters cause in float32.
        fine, coarse = (self._run(in_float32, 1.0, self._nudged(by))[0] for by in (errors.NUDGE, _COARSE))
        self._exact = [self._judged(*of_batch) for of_batch in zip(exact, fine, coarse, strict=True)]
        rounding = self._exact[0].rounding
        self.leaves, _ = errors.reports_of(self._exact[0].leaves, [rounding], rounding)

    def _evaluated(self, strengths: Any, scale: Any, inputs: Any) -> Any:
        """Evaluate the program with probes; return its outputs and the measurements of the probes."""
        evaluator = RoundingEvaluator(self._dtype, strengths)
        outputs, rows = evaluator.evaluate(self._traced.jaxpr, [scale, *inputs])
        return outputs, jnp.asarray(rows)

    def _nudged(self, by: float) -> list[list[Any]]:
        """Return the arguments of each batch with changed parameters."""
        return [errors.nudged(batch, keep_dtypes=False, by=by) for batch in self._batches]

    def _judged(self, exact: Any, fine: Any, coarse: Any) -> _Exact:
        """Say how large errors may be, by what two nudges of the parameters change in float32.

        An error is not judged if the fine nudge makes one as large. It may be larger if the coarse nudge, which is like
        rounding to half precision, makes one, as where it turns the sign of what goes into a ReLU.
        """
        value, leaves = exact
        rounding = errors.measure(fine[1], leaves, 1.0)
        reports, total = errors.reports_of(leaves, [errors.measure(coarse[1], leaves, 1.0)], rounding)
        of_value = errors.relative_error(fine[0], value)

        def allowed(coarse: float, fine: float) -> float:
            """Say how large an error may be, by what the two nudges change: in proportion to them, without kinks."""
            if coarse <= 2 * fine * _COARSE / errors.NUDGE:
                return self._tolerance
            return min(max(coarse, self._tolerance), _MOST_SENSITIVE * self._tolerance)

        tolerances = [allowed(errors.relative_error(coarse[0], value), of_value) * (of_value <= self._tolerance / 2)]
        for leaf in reports:
            is_judged = leaf.norm > 0 and not leaf.rounding > self._tolerance / 2
            times = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            tolerances.append(is_judged * times * allowed(leaf.relative_error[0], leaf.rounding))
        tolerances.append(allowed(total.relative_error[0], total.rounding))
        return _Exact(value, leaves, rounding, tolerances, total.norm)

    def _run(
        self, levels: np.ndarray, scale: float, batches: Sequence[Sequence[Any]] | None = None
    ) -> tuple[list[Any], Measured]:
        """Give the value and the gradients by path for each batch, and the worst that the probes measure."""
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < FLOAT32_RESULT, levels < FLOAT32]), jnp.float32)
        worst, results = np.zeros((len(self.sites), COTANGENTS.stop, len(Measured._fields))), []
        for args in batches or [batch.args for batch in self._batches]:
            inputs = self._traced.inputs_from((np.float32(1), *args), self._call.kwargs)[1:]
            outputs, rows = self._compiled(strengths, jnp.float32(scale), inputs)
            for site_and_role, row in zip(self._row_names, np.asarray(rows), strict=True):
                worst[site_and_role] = np.maximum(worst[site_and_role], row)
            results.append(errors.value_and_leaves(self._traced.result(outputs), self._call.has_aux))
        return results, Measured(*np.moveaxis(worst, -1, 0))

    def _measured_at(self, scale: float) -> Measured:
        """Give what the probes meet in float32, at a loss scale."""
        return self._run(np.full(len(self.sites), FLOAT32), scale)[1]

    def _errors(self, results: Callable[[], Sequence[Any]], scale: float) -> tuple[float, float, str]:
        """Give the worst error in the values and gradients of the batches."""
        found = [(0.0, 0.0, "nothing")]
        try:
            for (value, leaves), exact in zip(results(), self._exact, strict=True):
                found += exact.judged(value, leaves, scale)
        except (RuntimeError, ValueError) as error:  # of a solver, say, that refuses infinities
            if not errors.is_of_the_program(error):
                raise
            found.append((math.inf, math.inf, "the value"))
        return max(found)

    def is_exact_finite(self) -> bool:
        """Tell whether value and gradients are finite in float32."""
        numbers = (number for each in self._exact for number in (each.value, *(leaf.largest for leaf in each.rounding)))
        return all(map(math.isfinite, numbers))

    def verified(self, policy: PrecisionPolicy) -> tuple[float, float, str]:
        """Give the error of the function itself, under `autocast` with a policy, as a trial has it."""
        self.spent += 1
        traced = self._call._replace(fun=autocast(self._call.fun, self._dtype, policy=policy)).scaled()
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr), compiler_options=_EXACT)
        scale = policy.loss_scale or 1.0

        def results() -> list[Any]:
            inputs = (traced.inputs_from((np.float32(scale), *batch.args), batch.kwargs) for batch in self._batches)
            return [errors.value_and_leaves(traced.result(compiled(*each)), self._call.has_aux) for each in inputs]

        return self._errors(results, scale)

    def report(self, text: str) -> None:
        """Print a line about the progress of the search if ``progress`` is true."""
        if self._progress:
            report_progress("find_precision", f"{self.spent} of at most {MOST_GRADIENTS} gradients; {text}")

    def _best_scale(self, levels: np.ndarray) -> float:
        """Return the largest power of two, less a margin, at which no cotangent in half precision overflows."""
        if self._dtype != jnp.float16:
            return 1.0
        largest = self._largest[levels < FLOAT32, COTANGENTS].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        return 2.0 ** min(max(math.floor(math.log2(self._overflow / largest)) - _LOG2_HEADROOM, -100), 100)

    def _trial(self, levels: np.ndarray) -> Trial:
        """Return the result of a trial at the best loss scale. Results of previous trials are reused."""
        if levels.tobytes() not in self._known:
            scale = self._best_scale(levels)
            trial = Trial(levels, scale, *self._errors(lambda: self._run(levels, scale)[0], scale))
            float32, result = (int(self.numbers[levels == level].sum()) for level in (FLOAT32, FLOAT32_RESULT))
            self.report(
                f"{float32} of {self.numbers.sum()} matmuls in float32, {result} with a float32 result, loss scale "
                f"{power_of_two(scale)}: {trial.where} is {off(trial.error)}"
            )
            self._known[levels.tobytes()] = trial
        return self._known[levels.tobytes()]

    def found(self) -> tuple[Trial, Trial]:
        """Return the trial with all matmuls in half precision, and the accepted trial with the lowest levels."""
        first = trial = self._trial(np.full(len(self.sites), HALF))
        if not trial.is_right:  # what overflows in the forward pass, where a loss scale changes nothing
            trial = self._trial(_levels(self._largest >= self._overflow, slice(0, 0)))
        if not trial.is_right:
            lost = _levels(self._too_small(self._measured_at(trial.scale)), COTANGENTS)
            trial = self._trial(np.maximum(trial.levels, lost))
        most = 1
        while not trial.is_right and most < self._damages.size and self._may_go_on():
            trial = self.raise_levels(trial, most)
            most *= 2
        return first, self._lowered(trial if trial.is_right else self._trial(np.full_like(trial.levels, FLOAT32)))

    def raise_levels(self, trial: Trial, most: int = 1) -> Trial:
        """Widen so much more, what does most damage first."""
        steps = np.argsort(-self._damages, axis=None, kind="stable")
        sites, levels = steps // 2, np.where(steps % 2, FLOAT32, FLOAT32_RESULT)
        left = np.flatnonzero(trial.levels[sites] < levels)[:most]
        raised = trial.levels.copy()
        np.maximum.at(raised, sites[left], levels[left])
        is_last = self.spent >= MOST_GRADIENTS - _OF_VERIFYING // 2 or len(left) == 0
        return self._trial(np.full_like(raised, FLOAT32) if is_last else raised)

    def _lowered(self, best: Trial) -> Trial:
        """Lower the levels of matmuls that do not need float32, by bisection, until nothing changes."""
        order = np.argsort(self._damages.max(axis=1), kind="stable")  # what does least damage first
        before = None
        while before is not best:
            before = best
            for level in (HALF, FLOAT32_RESULT):
                higher = order[best.levels[order] > level]
                parts = [higher] if len(higher) else []
                while parts and self._may_go_on():
                    part = parts.pop(0)
                    levels = best.levels.copy()
                    levels[part] = level
                    trial = self._trial(levels)
                    if trial.is_right:
                        best = trial
                    elif len(part) > 1:
                        parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _may_go_on(self) -> bool:
        return self.spent < MOST_GRADIENTS - _OF_VERIFYING

    def _too_small(self, measured: Measured) -> np.ndarray:
        """Tell what is below the range: within it rounding makes an eighth of this error."""
        return np.asarray(measured.error > 2 * float(jnp.finfo(self._dtype).eps))

    def reasons(self, trial: Trial) -> list[str]:
        """Return the reason for each matmul above half precision, as long as gradients may be computed."""
        measured: dict[float, Measured] = {}
        reasons = [""] * len(trial.levels)
        for site in map(int, np.flatnonzero(trial.levels)):
            levels = trial.levels.copy()
            levels[site] = HALF
            scale = self._best_scale(levels)
            if scale not in measured and self.spent < MOST_GRADIENTS:
                measured[scale] = self._measured_at(scale)
            reason = self._out_of_range(measured[scale], site, levels, scale) if scale in measured else ""
            if not reason and self.spent < MOST_GRADIENTS:
                without = self._trial(levels)
                reason = f"in half precision, {without.where} is {off(without.error)}"
            reasons[site] = reason or "what is made of it is sensitive to rounding"
        return reasons

    def _out_of_range(self, measured: Measured, site: int, levels: np.ndarray, scale: float) -> str:
        """Describe what leaves the range of the dtype if a matmul is in half precision, at the best loss scale."""
        too_large, too_small = np.asarray(measured.largest >= self._overflow), self._too_small(measured)
        of_values = ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result"))
        for role, what in of_values:
            if too_large[site, role]:
                return f"{what} reaches {measured.largest[site, role]:.2g}"
        for role, what in of_values:
            if too_small[site, role]:
                largest = measured.largest[site, role]
                return f"{what} is at most {largest:.2g}, much of it too small for {self._dtype.name}"
        gradients, is_half = measured.largest[:, COTANGENTS], levels < FLOAT32
        is_lost, top = too_small[:, COTANGENTS].max(axis=1), gradients[site].max()
        log2 = math.floor(math.log2(self._overflow / max(top, 1e-30))) - 1
        if is_lost[site] and log2 >= 1:
            largest = gradients[site, measured.error[site, COTANGENTS].argmax()]
            return (
                f"its gradients are at most {largest:.2g}, too small for {self._dtype.name}, at a loss scale of "
                f"{power_of_two(scale)}, above which others overflow; to have it in half precision, give its part a "
                f"scale of its own: `jls.scale_gradient(result, 2.0**{log2})`, "
                f"`jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`"
            )
        # Else there are small ones, too, where the same names stand, or where others are in half precision.
        if is_lost[site] or ((is_lost & is_half).any() and top == gradients[is_half].max()):
            return (
                f"its gradients reach {top:.2g} at a loss scale of {power_of_two(scale)}, at which others are too "
                f"small for {self._dtype.name}; to have it in half precision, give the small ones a scale of their "
                "own, with `jls.scale_gradient` and `jls.unscale_gradient`"
            )
        return ""


def _levels(is_out: np.ndarray, cotangents: slice) -> np.ndarray:
    """Give the levels at which nothing is out of range: ``is_out``, ``bool[sites, 2 * roles]``, says what is."""
    others = is_out[:, [LEFT, RIGHT]].any(axis=1) | is_out[:, cotangents].any(axis=1)
    return np.where(others, FLOAT32, np.where(is_out[:, RESULT], FLOAT32_RESULT, HALF))
