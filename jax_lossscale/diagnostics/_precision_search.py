"""Search for the matmuls that must be in float32, based on measured errors in the value and the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_lossscale._autocast import PrecisionPolicy
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics import _gradient_errors as errors
from jax_lossscale.diagnostics import _precision_probes as probes
from jax_lossscale.diagnostics._precision_trials import MOST_GRADIENTS, Evaluation, Gradients, targets_of
from jax_lossscale.diagnostics._report import off, power_of_two

# Number of gradient evaluations reserved for verifying the policy and for determining the reasons for its rules.
_RESERVED_GRADIENTS = 6
# Number of powers of two between the loss scale of a trial and the largest scale at which no gradient overflows. This
# headroom is necessary because the gradients of other batches may be larger.
_LOG2_HEADROOM = 1


class Trial(NamedTuple):
    """The result of a trial, which computes the gradients with some matmuls in float32."""

    levels: np.ndarray  # the precision of each site, ``int[sites]``: `HALF`, `FLOAT32_RESULT` or `FLOAT32`
    scale: float  # the loss scale
    ratio: float  # the largest ratio of an error to its tolerance, among the value, the leaves and the whole gradient
    error: float  # the error with this ratio; infinite if any number is not finite
    where: str  # the quantity that has this error, such as "the value"

    @property
    def is_accurate(self) -> bool:
        """Whether all errors are within the tolerance.

        If any matmul is not entirely in half precision, the errors must be within half of the tolerance.
        """
        return self.ratio <= (0.5 if self.levels.any() else 1.0)


class Search:
    """A search for the matmuls that must be in float32.

    `find_precision` calls the methods in this order:

    1. The constructor measures the gradients in float32, and the magnitudes and rounding errors of all operands,
       results and cotangents of the matmuls.
    2. `run` first evaluates the gradients with all matmuls in half precision. If these gradients are not accurate,
       `run` raises the precision of matmuls until the gradients are accurate, and then lowers the precision of matmuls
       as long as the gradients stay accurate. The precision is raised first where values overflow, then where values
       underflow, and then where rounding does the most damage.
    3. `verify` evaluates the function under `autocast` with a policy for the precisions that `run` returned. As long as
       the policy is not accurate, `find_precision` calls `raise_levels` and then `verify` again.
    4. `reasons` describes why each matmul is not in half precision.

    The methods stop early enough that at most `MOST_GRADIENTS` evaluations of the gradients are needed.

    Args:
      gradients: the gradients of the function at different precisions of its matmuls.
      tolerance: the largest accepted error.

    Attributes:
      gradients: the gradients of the function at different precisions of its matmuls.
      targets: the float32 results for each batch, with the tolerance for each error.
    """

    def __init__(self, gradients: Gradients, tolerance: float) -> None:
        self.gradients, self._overflow = gradients, limits_of(gradients.dtype).overflow
        self.targets, measured = targets_of(gradients, tolerance)
        self._largest = measured.largest
        # For each matmul, two estimated changes in the value of the function: one from rounding the result of the
        # matmul, and one from rounding its operands. The shape is ``[sites, 2]``.
        damage = np.nan_to_num(measured.damage[:, probes.COTANGENTS])
        self._damages = np.stack([damage[:, probes.RESULT], damage[:, [probes.LEFT, probes.RIGHT]].sum(axis=1)], axis=1)
        self._known: dict[bytes, Trial] = {}

    def run(self) -> tuple[Trial, Trial]:
        """Return the trial with all matmuls in half precision, and the result of the search.

        The result is an accurate trial whose precision the search could not lower further, or the trial with all
        matmuls in float32 if no trial is accurate.
        """
        first = trial = self._trial(np.full(len(self._largest), probes.HALF))
        if not trial.is_accurate:
            # Overflows in the forward pass are fixed first, because they do not depend on the loss scale.
            trial = self._trial(_levels_without(self._largest[:, probes.VALUES] >= self._overflow))
        if not trial.is_accurate:
            levels = _levels_without(self._too_small(self.gradients.measured(trial.scale)))
            trial = self._trial(np.maximum(trial.levels, levels))
        # Each round raises up to twice as many levels as the previous one, so that few rounds are needed. `_lowered`
        # corrects levels that were raised unnecessarily.
        most = 1
        while not trial.is_accurate and most < self._damages.size and self._can_continue():
            trial = self.raise_levels(trial, most)
            most *= 2
        if not trial.is_accurate:
            trial = self._trial(np.full_like(trial.levels, probes.FLOAT32))
        return first, self._lowered(trial)

    def raise_levels(self, trial: Trial, most: int) -> Trial:
        """Raise up to ``most`` precision levels, first where rounding does the most damage, and return the new trial.

        If only a few evaluations are left, or if no precision level can be raised further, all matmuls of the new trial
        are in float32.
        """
        # Each step of the search raises the precision of one matmul. A step is an index of the flattened array
        # `_damages`. Column 0 of the array contains the damage from rounding only the result, and column 1 the damage
        # from rounding only the operands. A float32 result avoids only the first kind of damage, whereas float32
        # operands avoid both kinds.
        steps = np.argsort(-self._damages, axis=None, kind="stable")
        sites, levels = steps // 2, np.where(steps % 2, probes.FLOAT32, probes.FLOAT32_RESULT)
        left = np.flatnonzero(trial.levels[sites] < levels)[:most]
        raised = trial.levels.copy()
        np.maximum.at(raised, sites[left], levels[left])
        # The last evaluations are needed to verify the policy and to determine the reasons for its rules.
        is_last = self.gradients.spent >= MOST_GRADIENTS - _RESERVED_GRADIENTS // 2 or len(left) == 0
        return self._trial(np.full_like(raised, probes.FLOAT32) if is_last else raised)

    def _lowered(self, best: Trial) -> Trial:
        """Lower the precision of matmuls by bisection until it cannot be lowered further without losing accuracy."""
        # The precision is lowered first for the matmuls whose rounding errors do the least damage.
        order = np.argsort(self._damages.max(axis=1), kind="stable")
        before = None
        while before is not best:
            before = best
            for level in (probes.HALF, probes.FLOAT32_RESULT):
                higher = order[best.levels[order] > level]
                # The precision is lowered for all matmuls of a part at once. If the result is not accurate, each half
                # of the part is tried on its own.
                parts = [higher] if len(higher) else []
                while parts and self._can_continue():
                    part = parts.pop(0)
                    levels = best.levels.copy()
                    levels[part] = level
                    trial = self._trial(levels)
                    if trial.is_accurate:
                        best = trial
                    elif len(part) > 1:
                        parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _can_continue(self) -> bool:
        return self.gradients.spent < MOST_GRADIENTS - _RESERVED_GRADIENTS

    def _trial(self, levels: np.ndarray) -> Trial:
        """Return the result of a trial with the given levels at the best loss scale. The results are cached."""
        if levels.tobytes() not in self._known:
            scale = self._best_scale(levels)
            self._known[levels.tobytes()] = self._compared(self.gradients.with_levels(levels, scale), levels, scale)
        return self._known[levels.tobytes()]

    def _best_scale(self, levels: np.ndarray) -> float:
        """Return the loss scale for a trial: a power of two at which no cotangent in half precision overflows."""
        if self.gradients.dtype != jnp.float16:
            return 1.0
        largest = self._largest[levels < probes.FLOAT32, probes.COTANGENTS].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        return 2.0 ** min(max(math.floor(math.log2(self._overflow / largest)) - _LOG2_HEADROOM, -100), 100)

    def _compared(self, evaluations: Iterable[Evaluation], levels: np.ndarray, scale: float) -> Trial:
        """Compare the evaluation of each batch with the float32 results of the same batch."""
        found = [(0.0, 0.0, "nothing")]
        try:
            # In contrast to a `for` loop, `map` frees the gradients of a batch before the next batch is evaluated.
            for of_batch in map(lambda target, result: target.errors_of(result, scale), self.targets, evaluations):
                found += of_batch
        # The program may raise an error in a callback, for example if the input of a linear solver is not finite.
        except (RuntimeError, ValueError) as error:
            errors.raise_unless_in_callback(error)
            found.append((math.inf, math.inf, "the value"))
        return Trial(levels, scale, *max(found))

    def _too_small(self, measured: probes.ProbeMeasurements) -> np.ndarray:
        """Return a mask of the values that underflow.

        A value underflows if its relative error exceeds about eleven times the mean relative rounding error of normal
        numbers.
        """
        return np.asarray(measured.error > 2 * float(jnp.finfo(self.gradients.dtype).eps))

    def verify(self, trial: Trial, policy: PrecisionPolicy) -> Trial:
        """Evaluate the function under `autocast` with the policy for ``trial``, and return a trial with its errors."""
        return self._compared(self.gradients.with_policy(policy, trial.scale), trial.levels, trial.scale)

    def reasons(self, trial: Trial) -> list[str]:
        """Return, for each site, why its matmuls are not in half precision, or "" if they are in half precision.

        If the limit on gradient evaluations is reached, each reason that is still unknown becomes "not tested
        separately".
        """
        measured: dict[float, probes.ProbeMeasurements] = {}
        reasons = [""] * len(trial.levels)
        for site in map(int, np.flatnonzero(trial.levels)):
            levels = trial.levels.copy()
            levels[site] = probes.HALF
            scale = self._best_scale(levels)
            if scale not in measured and self.gradients.spent < MOST_GRADIENTS:
                measured[scale] = self.gradients.measured(scale)
            reason = self._out_of_range(measured[scale], site, levels, scale) if scale in measured else ""
            if not reason and self.gradients.spent < MOST_GRADIENTS:
                without = self._trial(levels)
                reason = f"in half precision, {without.where} is {off(without.error)}"
            reasons[site] = reason or "not tested separately"
        return reasons

    def _out_of_range(self, measured: probes.ProbeMeasurements, site: int, levels: np.ndarray, scale: float) -> str:
        """Describe the values that are out of range if a matmul is in half precision, or return "" if there are none.

        Args:
          measured: the measurements in float32 at the loss scale.
          site: the index of the matmul.
          levels: the levels of precision of all matmuls. The level of the matmul at index ``site`` is `HALF`.
          scale: the best loss scale for these levels.
        """
        dtype, too_small = self.gradients.dtype.name, self._too_small(measured)
        largest = measured.largest[site]
        of_values = ((probes.LEFT, "an operand"), (probes.RIGHT, "an operand"), (probes.RESULT, "its result"))
        for role, value in of_values:
            if largest[role] >= self._overflow:
                return f"{value} reaches {largest[role]:.2g}"
        for role, value in of_values:
            if too_small[site, role]:
                return f"{value} is at most {largest[role]:.2g}, and many of its elements are too small for {dtype}"
        gradients, is_half = measured.largest[:, probes.COTANGENTS], levels < probes.FLOAT32
        is_lost, top = too_small[:, probes.COTANGENTS].max(axis=1), gradients[site].max()
        log2 = math.floor(math.log2(self._overflow / max(top, 1e-30))) - 1
        if is_lost[site] and log2 >= 1:
            small = gradients[site, measured.error[site, probes.COTANGENTS].argmax()]
            return (
                f"its gradients are at most {small:.2g} at a loss scale of {power_of_two(scale)}, which is too small "
                f"for {dtype}, and other gradients overflow at larger scales; to compute it in half precision, give "
                f"this part of the model a separate loss scale: `jls.scale_gradient(result, 2.0**{log2})`, "
                f"`jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`"
            )
        # Gradients can also underflow for two other reasons: the matmuls at this site have both large and small
        # gradients, or the largest gradient at this site limits the loss scale for other half-precision matmuls.
        if is_lost[site] or ((is_lost & is_half).any() and top == gradients[is_half].max()):
            return (
                f"its gradients reach {top:.2g} at a loss scale of {power_of_two(scale)}, at which other gradients are "
                f"too small for {dtype}; to compute it in half precision, give the part of the model with "
                "the small gradients a separate loss scale, with `jls.scale_gradient` and `jls.unscale_gradient`"
            )
        return ""


def _levels_without(is_out: np.ndarray) -> np.ndarray:
    """Return, for each matmul, the lowest precision level at which no value is out of the range of the dtype.

    Args:
      is_out: whether a value is out of range in half precision, ``bool[sites, roles]``.
    """
    needs_float32 = np.delete(is_out, probes.RESULT, axis=1).any(axis=1)
    return np.select([needs_float32, is_out[:, probes.RESULT]], [probes.FLOAT32, probes.FLOAT32_RESULT], probes.HALF)
