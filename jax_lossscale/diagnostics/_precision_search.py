"""Search for the matmuls that must be in float32, based on measured errors in the value and the gradients."""

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
from jax_lossscale.diagnostics._report import Progress, off, power_of_two

# The maximum number of times that a search evaluates the gradients of each batch.
MOST_GRADIENTS = 30
# Number of gradient evaluations reserved for verifying the policy and for determining the reasons for its rules.
_RESERVED_GRADIENTS = 6
# Number of powers of two between the loss scale of a trial and the largest scale at which no gradient overflows. This
# headroom is necessary because the gradients of other batches may be larger.
_LOG2_HEADROOM = 1
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


class Trial(NamedTuple):
    """The result of a trial, which computes the gradients with some matmuls in float32.

    Attributes:
      levels: the precision of each site, ``int[sites]``: `HALF`, `FLOAT32_RESULT` or `FLOAT32`.
      scale: the loss scale.
      ratio: the largest ratio of an error to its tolerance, among the value, the leaves and the whole gradient.
      error: the error with this ratio; infinite if any number is not finite.
      where: the quantity that has this error, such as "the value".
    """

    levels: np.ndarray
    scale: float
    ratio: float
    error: float
    where: str

    @property
    def is_right(self) -> bool:
        """Whether all errors are within the tolerance, or within half the tolerance if any matmul is in float32."""
        return self.ratio <= (0.5 if self.levels.any() else 1.0)


class _Exact(NamedTuple):
    """The float32 results for one batch.

    Attributes:
      value: the value of the function.
      leaves: the gradients by path.
      rounding: the measurements of the gradients of each leaf at slightly changed parameters, which show the rounding
        errors of the float32 gradients.
      tolerances: the tolerances of the value, of each leaf and of the whole gradient; 0 if the error is ignored.
      total: the norm of the whole gradient.
    """

    value: Any
    leaves: dict[str, Any]
    rounding: list[errors.Measurement]
    tolerances: list[float]
    total: float

    def errors_of(self, value: Any, leaves: dict[str, Any], scale: float) -> list[tuple[float, float, str]]:
        """Return ``(error / tolerance, error, name)`` for the value, the gradient of each leaf, and the whole gradient.

        Args:
          value: the value of the function in a trial.
          leaves: the scaled gradients by path.
          scale: the loss scale.
        """
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
    """A search for the matmuls that must be in float32, by trials with one or more batches.

    Attributes:
      dtype: the half-precision dtype.
      tolerance: the largest accepted error.
      batches: the number of batches.
      sites: the sites of the matmuls that `autocast` computes in half precision by default.
      numbers: the number of matmuls at each site, ``int[sites]``.
      spent: the number of evaluations of the gradients per batch so far.
      leaves: a `LeafGradientError` for each float32 gradient of the first batch.
    """

    def __init__(
        self,
        batches: Sequence[LossCall],
        dtype: jnp.dtype,
        tolerance: float,
        progress: Progress,
        names_parameters: bool,
    ) -> None:
        self._call, self._batches, self._progress = batches[0], batches, progress
        self.dtype, self.tolerance, self._overflow = dtype, tolerance, limits_of(dtype).overflow
        self.batches, self.spent = len(batches), 0
        self._known: dict[bytes, Trial] = {}

        # Trace and compile one program for all trials.
        found: MatmulsBySite = {}
        probed = with_probes(self._call.fun, dtype, names_parameters, found)
        self._traced = self._call._replace(fun=probed).scaled()
        self.sites = tuple(found)
        self.numbers = np.array([len(equations) for equations in found.values()], int)
        # The name of a row of measurements contains the index of a matmul site and the role of the measured value.
        self._row_names = RoundingEvaluator(dtype).names(self._traced.jaxpr)
        self._compiled = jax.jit(self._evaluated)

        # Measure the float32 program without a loss scale. The array of the largest magnitudes has the shape
        # ``[sites, 2 * roles]``. The damage array has the shape ``[sites, 2]``: for each matmul, it contains the
        # estimated change in the value of the function if the result of the matmul is rounded, and the estimated change
        # if the operands of the matmul are rounded.
        in_float32 = np.full(len(self.sites), FLOAT32)
        exact, measured = self._run(in_float32, 1.0)
        self._largest = measured.largest
        damage = np.nan_to_num(measured.damage[:, COTANGENTS])
        self._damages = np.stack([damage[:, RESULT], damage[:, [LEFT, RIGHT]].sum(axis=1)], axis=1)

        # Derive the tolerances from the effects of two nudges (small changes to the parameters) in float32.
        def measured_change(number: int, value: Any, leaves: dict[str, Any]) -> tuple[float, list[errors.Measurement]]:
            exact_value, exact_leaves = exact[number]
            return errors.relative_error(value, exact_value), errors.measure(leaves, exact_leaves, 1.0)

        fine, coarse = (self._run(in_float32, 1.0, measured_change, by)[0] for by in (errors.NUDGE, _COARSE))
        self._exact = [self._with_tolerances(*of_batch) for of_batch in zip(exact, fine, coarse, strict=True)]
        rounding = self._exact[0].rounding
        self.leaves, _ = errors.reports_of(self._exact[0].leaves, [rounding], rounding)

    def _evaluated(self, strengths: Any, scale: Any, inputs: Any) -> Any:
        """Evaluate the program with probes and return its outputs and the measurements of the probes."""
        evaluator = RoundingEvaluator(self.dtype, strengths)
        outputs, rows = evaluator.evaluate(self._traced.jaxpr, [scale, *inputs])
        return outputs, jnp.asarray(rows)

    def _with_tolerances(self, exact: Any, fine: Any, coarse: Any) -> _Exact:
        """Return the float32 results for a batch, and the tolerance for each error.

        A nudge is a small random change to all parameters. The fine nudge changes each parameter by about one float32
        rounding error. If the fine nudge changes the value by more than half the tolerance, the error of the value is
        ignored in trials. The same applies to the gradient of each leaf. The coarse nudge changes each parameter by
        about one half-precision rounding error. If the coarse nudge causes a disproportionately large error, for
        example because the inputs of ReLUs change sign, the tolerance is increased.

        Args:
          exact: the value and the gradients in float32.
          fine: the relative change in the value and the measurements of the gradients, after a nudge by `errors.NUDGE`.
          coarse: the relative change in the value and the measurements of the gradients, after a nudge by `_COARSE`.
        """
        value, leaves = exact
        (of_value, rounding), (coarse_of_value, measured) = fine, coarse
        reports, total = errors.reports_of(leaves, [measured], rounding)

        def allowed(coarse: float, fine: float) -> float:
            """Return the tolerance for the error of a quantity.

            If the function has no kinks, such as those of ReLUs, the relative changes are proportional to the sizes of
            the nudges.

            Args:
              coarse: the relative change in the quantity after the coarse nudge.
              fine: the relative change in the quantity after the fine nudge.
            """
            if coarse <= 2 * fine * _COARSE / errors.NUDGE:
                return self.tolerance
            return min(max(coarse, self.tolerance), _MOST_SENSITIVE * self.tolerance)

        tolerances = [allowed(coarse_of_value, of_value) * (of_value <= self.tolerance / 2)]
        for leaf in reports:
            is_judged = leaf.norm > 0 and not leaf.rounding > self.tolerance / 2
            times = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            tolerances.append(is_judged * times * allowed(leaf.relative_error[0], leaf.rounding))
        tolerances.append(allowed(total.relative_error[0], total.rounding))
        return _Exact(value, leaves, rounding, tolerances, total.norm)

    def _run(
        self,
        levels: np.ndarray,
        scale: float,
        result_of: Callable[[int, Any, dict[str, Any]], Any] = lambda number, value, leaves: (value, leaves),
        by: float = 0.0,
    ) -> tuple[list[Any], Measured]:
        """Evaluate the program for each batch.

        Return a list of results, and the maxima of the measurements over all batches. The batches are processed one by
        one, so only the gradients of one batch are in memory at a time, unless the gradients are part of the results.

        Args:
          levels: the precision of each site.
          scale: the loss scale.
          result_of: a function from the index of a batch, the value, and the gradients by path to the result.
          by: the fraction by which the parameters are changed.
        """
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < FLOAT32_RESULT, levels < FLOAT32]), jnp.float32)
        worst, results = np.zeros((len(self.sites), COTANGENTS.stop, len(Measured._fields))), []
        for number, batch in enumerate(self._batches):
            args = errors.nudged(batch, keep_dtypes=False, by=by) if by else batch.args
            inputs = self._traced.inputs_from((np.float32(1), *args), self._call.kwargs)[1:]
            outputs, rows = self._compiled(strengths, jnp.float32(scale), inputs)
            del args, inputs
            for site_and_role, row in zip(self._row_names, np.asarray(rows), strict=True):
                worst[site_and_role] = np.maximum(worst[site_and_role], row)
            value, leaves = errors.value_and_leaves(self._traced.result(outputs), self._call.has_aux)
            results.append(result_of(number, value, leaves))
            del outputs, leaves
        return results, Measured(*np.moveaxis(worst, -1, 0))

    def _measured_at(self, scale: float) -> Measured:
        """Return the measurements of the probes in float32 at a loss scale."""
        return self._run(np.full(len(self.sites), FLOAT32), scale, lambda *_: None)[1]

    def _errors(self, run: Callable[[Any], object], scale: float) -> tuple[float, float, str]:
        """Return the largest ratio of an error to its tolerance, this error, and the name of the inaccurate quantity.

        Args:
          run: a function that evaluates the gradients. The argument of ``run`` is a function that ``run`` calls for
            each batch with the index of the batch, the value, and the scaled gradients by path.
          scale: the loss scale.
        """
        found = [(0.0, 0.0, "nothing")]

        def compare(number: int, value: Any, leaves: dict[str, Any]) -> None:
            found.extend(self._exact[number].errors_of(value, leaves, scale))

        try:
            run(compare)
        # The program may raise an error in a callback, for example if the input of a linear solver is not finite.
        except (RuntimeError, ValueError) as error:
            if not errors.is_raised_in_callback(error):
                raise
            found.append((math.inf, math.inf, "the value"))
        return max(found)

    def is_exact_finite(self) -> bool:
        """Return whether the values and the gradients of all batches are finite in float32."""
        numbers = (number for each in self._exact for number in (each.value, *(leaf.largest for leaf in each.rounding)))
        return all(map(math.isfinite, numbers))

    def verified(self, policy: PrecisionPolicy) -> tuple[float, float, str]:
        """Evaluate the original function under `autocast` with a policy.

        Return the largest ratio of an error to its tolerance, this error, and the name of the inaccurate quantity, as
        in `Trial`.
        """
        self.spent += 1
        traced = self._call._replace(fun=autocast(self._call.fun, self.dtype, policy=policy)).scaled()
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr))
        scale = policy.loss_scale or 1.0

        def run(compare: Callable[[int, Any, dict[str, Any]], None]) -> None:
            for number, batch in enumerate(self._batches):
                outputs = compiled(*traced.inputs_from((np.float32(scale), *batch.args), batch.kwargs))
                compare(number, *errors.value_and_leaves(traced.result(outputs), self._call.has_aux))
                del outputs

        return self._errors(run, scale)

    def report(self, text: str) -> None:
        """Report the progress of the search."""
        self._progress("find_precision", f"{self.spent} of at most {MOST_GRADIENTS} gradients computed; {text}")

    def _best_scale(self, levels: np.ndarray) -> float:
        """Return the loss scale for a trial: a power of two at which no cotangent in half precision overflows."""
        if self.dtype != jnp.float16:
            return 1.0
        largest = self._largest[levels < FLOAT32, COTANGENTS].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        return 2.0 ** min(max(math.floor(math.log2(self._overflow / largest)) - _LOG2_HEADROOM, -100), 100)

    def _trial(self, levels: np.ndarray) -> Trial:
        """Return the result of a trial with the given levels at the best loss scale. The results are cached."""
        if levels.tobytes() not in self._known:
            scale = self._best_scale(levels)
            trial = Trial(levels, scale, *self._errors(lambda compare: self._run(levels, scale, compare), scale))
            float32, result = (int(self.numbers[levels == level].sum()) for level in (FLOAT32, FLOAT32_RESULT))
            self.report(
                f"{float32} of {self.numbers.sum()} matmuls in float32, {result} with a float32 result, loss scale "
                f"{power_of_two(scale)}: {trial.where} is {off(trial.error)}"
            )
            self._known[levels.tobytes()] = trial
        return self._known[levels.tobytes()]

    def found(self) -> tuple[Trial, Trial]:
        """Return the trial with all matmuls in half precision, and the lowest-precision trial that is accurate."""
        first = trial = self._trial(np.full(len(self.sites), HALF))
        if not trial.is_right:
            # Overflows in the forward pass are fixed first, because they do not depend on the loss scale.
            trial = self._trial(_levels(self._largest >= self._overflow, slice(0, 0)))
        if not trial.is_right:
            lost = _levels(self._too_small(self._measured_at(trial.scale)), COTANGENTS)
            trial = self._trial(np.maximum(trial.levels, lost))
        most = 1
        while not trial.is_right and most < self._damages.size and self._can_continue():
            trial = self.raise_levels(trial, most)
            most *= 2
        return first, self._lowered(trial if trial.is_right else self._trial(np.full_like(trial.levels, FLOAT32)))

    def raise_levels(self, trial: Trial, most: int = 1) -> Trial:
        """Return a trial with up to ``most`` precision levels raised, starting where rounding does the most damage.

        If only a few evaluations are left, or no level can be raised, all matmuls of the trial are in float32.
        """
        steps = np.argsort(-self._damages, axis=None, kind="stable")
        sites, levels = steps // 2, np.where(steps % 2, FLOAT32, FLOAT32_RESULT)
        left = np.flatnonzero(trial.levels[sites] < levels)[:most]
        raised = trial.levels.copy()
        np.maximum.at(raised, sites[left], levels[left])
        is_last = self.spent >= MOST_GRADIENTS - _RESERVED_GRADIENTS // 2 or len(left) == 0
        return self._trial(np.full_like(raised, FLOAT32) if is_last else raised)

    def _lowered(self, best: Trial) -> Trial:
        """Lower the precision of matmuls by bisection until it cannot be lowered further without losing accuracy."""
        # The precision is lowered first for the matmuls whose rounding errors do the least damage.
        order = np.argsort(self._damages.max(axis=1), kind="stable")
        before = None
        while before is not best:
            before = best
            for level in (HALF, FLOAT32_RESULT):
                higher = order[best.levels[order] > level]
                parts = [higher] if len(higher) else []
                while parts and self._can_continue():
                    part = parts.pop(0)
                    levels = best.levels.copy()
                    levels[part] = level
                    trial = self._trial(levels)
                    if trial.is_right:
                        best = trial
                    elif len(part) > 1:
                        parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _can_continue(self) -> bool:
        return self.spent < MOST_GRADIENTS - _RESERVED_GRADIENTS

    def _too_small(self, measured: Measured) -> np.ndarray:
        """Return a mask of the values that underflow.

        A value underflows if its relative error exceeds about eight times the mean relative rounding error of normal
        numbers.
        """
        return np.asarray(measured.error > 2 * float(jnp.finfo(self.dtype).eps))

    def reasons(self, trial: Trial) -> list[str]:
        """For each site, return why its matmuls are not in half precision, or "" if they are in half precision.

        If the limit on gradient evaluations is reached, a generic sentence replaces each reason that is still unknown.
        """
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
            reasons[site] = reason or "the rest of the computation is sensitive to its rounding errors"
        return reasons

    def _out_of_range(self, measured: Measured, site: int, levels: np.ndarray, scale: float) -> str:
        """Describe the values that are out of range if a matmul is in half precision, or return "" if there are none.

        Args:
          measured: the measurements in float32 at the loss scale.
          site: the index of the matmul.
          levels: the levels of precision of all matmuls. The level of the matmul at index ``site`` is `HALF`.
          scale: the best loss scale for these levels.
        """
        too_large, too_small = np.asarray(measured.largest >= self._overflow), self._too_small(measured)
        of_values = ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result"))
        for role, value in of_values:
            if too_large[site, role]:
                return f"{value} reaches {measured.largest[site, role]:.2g}"
        for role, value in of_values:
            if too_small[site, role]:
                largest = measured.largest[site, role]
                return f"{value} is at most {largest:.2g}, and many of its elements are too small for {self.dtype.name}"
        gradients, is_half = measured.largest[:, COTANGENTS], levels < FLOAT32
        is_lost, top = too_small[:, COTANGENTS].max(axis=1), gradients[site].max()
        log2 = math.floor(math.log2(self._overflow / max(top, 1e-30))) - 1
        if is_lost[site] and log2 >= 1:
            largest = gradients[site, measured.error[site, COTANGENTS].argmax()]
            return (
                f"its gradients are at most {largest:.2g} at a loss scale of {power_of_two(scale)}, which is too small "
                f"for {self.dtype.name}, and other gradients overflow at larger scales; to compute it in half "
                "precision, give this part of the model a separate loss scale: "
                f"`jls.scale_gradient(result, 2.0**{log2})`, "
                f"`jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`"
            )
        # Gradients can also underflow for two other reasons: the matmuls at this site have both large and small
        # gradients, or the largest gradient at this site limits the loss scale for other half-precision matmuls.
        if is_lost[site] or ((is_lost & is_half).any() and top == gradients[is_half].max()):
            return (
                f"its gradients reach {top:.2g} at a loss scale of {power_of_two(scale)}, at which other gradients are "
                f"too small for {self.dtype.name}; to compute it in half precision, give the part of the model with "
                "the small gradients a separate loss scale, with `jls.scale_gradient` and `jls.unscale_gradient`"
            )
        return ""


def _levels(is_out: np.ndarray, cotangents: slice) -> np.ndarray:
    """For each matmul, return the lowest precision level at which no value is out of the range of the dtype.

    Args:
      is_out: whether a value is out of range in half precision, ``bool[sites, 2 * roles]``.
      cotangents: the roles of the cotangents to consider.
    """
    others = is_out[:, [LEFT, RIGHT]].any(axis=1) | is_out[:, cotangents].any(axis=1)
    return np.where(others, FLOAT32, np.where(is_out[:, RESULT], FLOAT32_RESULT, HALF))
