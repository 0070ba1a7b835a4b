"""Which products must not be in half precision: found by measuring what each of them does to the gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale._autocast import PrecisionPolicy
from jax_lossscale._check import check_flag, check_function, checked_dtype, is_number
from jax_lossscale._limits import limits_of
from jax_lossscale._program import nnx_objects
from jax_lossscale._warn import warn_user
from jax_lossscale.diagnostics import _words
from jax_lossscale.diagnostics._report import percent, power_of_two, tell
from jax_lossscale.diagnostics.programs._precision_rules import reasons_of, rules_for
from jax_lossscale.diagnostics.programs._probes import LEFT, RESULT, RIGHT
from jax_lossscale.diagnostics.programs._question import faults_of, named_leaves, with_gradients
from jax_lossscale.diagnostics.programs._trials import NARROW, WIDE, WIDE_RESULT, Program, Trial

_TOLERANCE = 0.01  # of float16, which has 11 bits; of a dtype with fewer, as much more
_MOST_GRADIENTS = 30
_OF_VERIFYING = 6


def find_precision(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    tolerance: float | None = None,
    batches: Sequence[Any] | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> PrecisionPolicy:
    """Find which products of a function must stay float32, by measurement, so that `autocast` gets it right.

    The function is compared with itself: the program of its value and gradients, compiled once, rounds at each product
    what `autocast` would round, or leaves it. All products are narrow at first. If that is within the tolerance of
    float32, the policy is empty. If not, products whose operands or results exceed the range of ``dtype`` are widened;
    then those whose rounding errors, times the derivative of the result with respect to them, are largest (one backward
    pass through the program of the gradients gives this for all), until it is within half the tolerance, since other
    batches come. What was widened without need is made narrow again, by bisection. In the end the function is computed
    under `autocast` with the policy, to be sure.

    A product whose result is at fault keeps its operands narrow, and has a float32 result, which costs tensor cores
    nothing. The loss scale is, for each trial, the largest with which nothing overflows. All this takes at most the
    time of 30 gradients.

    Args:
      fun: a scalar-valued function written for float32, as it would be given to `autocast`.
      *args: its arguments: parameters, or a whole model, and one batch, as in `compare_gradients`.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: float16 or bfloat16.
      tolerance: how far the value, the gradients of all leaves together, and those of each leaf may be from float32's,
        relative to their norm. By default 0.01 for float16 and 0.08 for bfloat16. A leaf with less than a hundredth of
        the whole gradient may be ten times as far; one that is nothing but rounding in float32 is not looked at.
      batches: more batches, for which the policy must be right, too: values for the last of ``args``, of the same
        shapes.
      progress: whether to print a line for each trial, on standard error.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `PrecisionPolicy` for `autocast`, whose rules say why. They name layers, parameters, operations and functions,
      so they are right for other values, another batch size, and after edits elsewhere. Its ``loss_scale`` is that of
      the last trial, and its ``errors`` are those with all products narrow, and with the rules.

    Raises:
      ValueError: if an argument is not of its kind; if there are no gradients; inside `jax.jit` and other
        transformations.

    Warns:
      UserWarning: if value or gradients are not finite in float32 either; if the policy is not within the tolerance; if
        less than half of the products stay narrow.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     with jax.named_scope("energy"):
      ...         energy = x @ weights  # 1.6e5
      ...     return jnp.mean(jnp.log(energy))
      >>> args = jnp.full((4, 2), 200.0), jnp.full((8, 4), 200.0)
      >>> policy = jls.diagnostics.find_precision(loss_fn, *args)
      >>> policy.rules
      (PrecisionRule('wide_result', layer='energy', operation='dot_general', reason='its result reaches 1.6e+05'),)
      >>> float(jls.autocast(loss_fn, policy=policy)(*args)) == float(loss_fn(*args))
      True
    """
    check_function(fun, "find_precision(fun=...)")
    dtype = _checked_dtype(dtype)
    check_flag(progress, "find_precision(progress=...)")
    tolerance = _checked_tolerance(tolerance, dtype)
    of_leaves, chosen = with_gradients(fun, args, argnums, "find_precision(argnums=...)")
    others = (with_gradients(fun, each, argnums, "")[1] for each in _all_batches(args, batches)[1:])
    if progress:
        tell("find_precision", f"compiles two programs, and takes at most the time of {_MOST_GRADIENTS} gradients")
    # What nnx modules hold has other paths in `autocast` than here.
    names_parameters = not nnx_objects.flattened((args, kwargs))[1]
    all_chosen = [chosen, *others]
    program = Program(of_leaves, all_chosen, kwargs, argnums, has_aux, dtype, tolerance, names_parameters)
    if not program.is_exact_finite():
        faults = faults_of(named_leaves(fun, args, kwargs), dtype)
        why = (
            " ".join(map(_words.nonfinite_argument, faults.nan + faults.infinite))
            or "`jls.diagnostics.compare_gradients` tells where it begins."
        )
        warn_user(
            "`find_precision`: value or gradients are not finite in float32 either, so there is nothing to compare "
            f"with. {why} The policy has no rules."
        )
        return PrecisionPolicy()
    search = _Search(program, tolerance, progress)
    search.tell(f"{program.numbers.sum()} products at {len(program.sites)} places, {len(all_chosen)} batches")
    best = search.run()
    while True:
        error, where = program.verified(_policy(program, best, [""] * len(best.levels)))
        search.tell(f"under `autocast`, {where} is {_words.off(error)}")
        if error <= tolerance or not (best.levels < WIDE).any():
            break
        best = search.wider(best)
    if error > tolerance:
        warn_user(
            f"`find_precision`: with every product in float32, {where} is {_words.off(error)}, more than the "
            f"tolerance of {percent(tolerance)}. It is not {dtype.name} that is to blame."
        )
    narrow = int(program.numbers[best.levels < WIDE].sum())
    if 2 * narrow < program.numbers.sum():
        warn_user(
            f"`find_precision`: only {narrow} of {program.numbers.sum()} products stay narrow, so little is gained. "
            f"`jls.diagnostics.compare_gradients(jls.autocast(fun), ...)` says what is wrong with {dtype.name} there."
        )
    policy = _policy(program, best, reasons_of(program, best, _MOST_GRADIENTS))
    return dataclasses.replace(policy, errors=(min(search.first, 1.0), min(error, 1.0)))


class _Search:
    """The search for what must be wide."""

    def __init__(self, program: Program, tolerance: float, progress: bool) -> None:
        self.program = program
        self.tolerance = tolerance
        self._progress = progress
        self._order: list[tuple[int, int]] | None = None
        self.first = 0.0  # the error with all products narrow

    def run(self) -> Trial:
        """The narrowest found that is within the tolerance."""
        number = len(self.program.sites)
        trial = self.trial(np.zeros(number, int))
        self.first = trial.error
        if self.is_right(trial):
            return trial
        in_range = self._in_range()
        if in_range.any():
            trial = self.trial(in_range)
        if not self.is_right(trial):
            trial = self._widened(trial)
        return self._narrowed(trial)

    def trial(self, levels: np.ndarray) -> Trial:
        """One, which is told."""
        trial = self.program.trial(levels)
        numbers = self.program.numbers
        wide, half = (int(numbers[trial.levels == level].sum()) for level in (WIDE, WIDE_RESULT))
        self.tell(
            f"{wide} of {numbers.sum()} products wide, {half} with a wide result, loss scale "
            f"{power_of_two(trial.scale)}: {trial.where} is {_words.off(trial.error)}"
        )
        return trial

    def tell(self, what: str) -> None:
        """Print a line, if that is wished for."""
        if self._progress:
            tell("find_precision", f"{self.program.spent} of at most {_MOST_GRADIENTS} gradients; {what}")

    def is_right(self, trial: Trial) -> bool:
        """Whether it is within the tolerance; within half of it, once something is wide: other batches come."""
        return trial.error <= (self.tolerance / 2 if trial.levels.any() else self.tolerance)

    def wider(self, trial: Trial) -> Trial:
        """The next, if the real program does worse than a trial said: twice as much is wide."""
        steps = self._steps(trial)
        most = max(1, int((trial.levels > NARROW).sum()))
        if self.program.spent >= _MOST_GRADIENTS - _OF_VERIFYING // 2 or most >= len(steps):
            return self.trial(np.full_like(trial.levels, WIDE))
        return self.trial(_with(trial.levels, steps[:most]))

    def _in_range(self) -> np.ndarray:
        """What no loss scale reaches: operands and results that overflow in the forward pass."""
        top = limits_of(self.program.dtype).overflow
        largest = self.program.largest
        levels = np.where(largest[:, RESULT] >= top, WIDE_RESULT, NARROW)
        return np.where(largest[:, [LEFT, RIGHT]].max(axis=1) >= top, WIDE, levels)

    def _steps(self, trial: Trial) -> list[tuple[int, int]]:
        """Sites that may become wider, and what they become, those that do the most damage first."""
        if self._order is None:
            damages = self.program.damages(trial)
            self.tell("how much each product does to it")
            if damages is None:  # what comes last is amplified least, but nothing else is known
                damages = np.tile(np.arange(len(self.program.sites)), (2, 1))
            steps = sorted(np.ndindex(damages.shape), key=lambda step: -damages[step])
            self._order = [(site, (WIDE_RESULT, WIDE)[n]) for n, site in steps]
        return [(site, level) for site, level in self._order if trial.levels[site] < level]

    def _widened(self, trial: Trial) -> Trial:
        """More and more of what does the most damage is made wide."""
        steps = self._steps(trial)
        start, most = trial.levels, 1
        while not self.is_right(trial) and most < len(steps) and self._may_go_on():
            trial = self.trial(_with(start, steps[:most]))
            most *= 2
        return trial if self.is_right(trial) else self.trial(np.full_like(start, WIDE))

    def _narrowed(self, best: Trial) -> Trial:
        """What was widened without need is made narrow again."""
        order = [site for site, _ in reversed(self._order or [])]
        for level in (NARROW, WIDE_RESULT):
            wide = list(map(int, np.flatnonzero(best.levels > level)))
            wide.sort(key=lambda site: order.index(site) if order else 0)
            parts = [wide] if wide else []
            while parts and self._may_go_on():
                part = parts.pop(0)
                levels = best.levels.copy()
                levels[part] = level
                trial = self.trial(levels)
                if self.is_right(trial):
                    best = trial
                elif len(part) > 1:
                    parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _may_go_on(self) -> bool:
        return self.program.spent < _MOST_GRADIENTS - _OF_VERIFYING


def _with(levels: np.ndarray, steps: Sequence[tuple[int, int]]) -> np.ndarray:
    levels = levels.copy()
    for site, level in steps:
        levels[site] = max(levels[site], level)
    return levels


def _policy(program: Program, trial: Trial, reasons: Sequence[str]) -> PrecisionPolicy:
    return PrecisionPolicy(tuple(rules_for(program.sites, trial.levels, reasons)), loss_scale=trial.scale)


def _checked_dtype(dtype: Any) -> jnp.dtype:
    dtype = checked_dtype(dtype, "find_precision(dtype=...)")
    if dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"`find_precision(dtype=...)` must be float16 or bfloat16, got {dtype.name}.")
    return dtype


def _checked_tolerance(tolerance: Any, dtype: jnp.dtype) -> float:
    if tolerance is None:
        return _TOLERANCE * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float16).eps)
    if not is_number(tolerance) or not 0 < float(tolerance) < 1:
        raise ValueError(f"`find_precision(tolerance=...)` must be a number between 0 and 1, got {tolerance!r}.")
    return float(tolerance)


def _all_batches(args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """The arguments, once for each batch."""
    if batches is None:
        return [args]
    if not isinstance(batches, Sequence) or isinstance(batches, str) or len(batches) == 0:
        raise ValueError(
            f"`find_precision(batches=...)` must be a sequence of values for the last argument, got {batches!r}. Put a "
            "single one into a list."
        )
    found = [args, *((*args[:-1], batch) for batch in batches)]
    types = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), each[-1]) for each in found]
    if any(each != types[0] for each in types):
        raise ValueError(
            "`find_precision(batches=...)` must hold values like the last argument, of the same structure, shapes and "
            f"dtypes; that is {types[0]}, and one is {next(each for each in types if each != types[0])}."
        )
    return found
