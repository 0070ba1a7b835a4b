"""The policy of `autocast` under which value and gradients are right, found by measurement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._autocast import PrecisionPolicy
from jax_lossscale._check import check_flag, checked_dtype, is_number
from jax_lossscale._program import nnx_objects
from jax_lossscale._warn import warn_user
from jax_lossscale.diagnostics import _gradient_errors as errors
from jax_lossscale.diagnostics._loss_call import argument_faults, check_call
from jax_lossscale.diagnostics._precision_probes import FLOAT32
from jax_lossscale.diagnostics._precision_rules import rules_for
from jax_lossscale.diagnostics._precision_search import MOST_GRADIENTS, Search, Trial
from jax_lossscale.diagnostics._report import off, percent, report_progress

_TOLERANCE = 0.01  # of float16, which has 11 bits; of a dtype with fewer, as much more


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

    The function is compared with itself. The program of its value and gradients is compiled once. It rounds the
    operands and results of each matmul, as `autocast` would, or leaves them in float32. The search has five steps:

    1. Try all matmuls in half precision. If the errors are within the tolerance, the policy is empty.
    2. Change the matmuls whose operands or results overflow in ``dtype`` to float32.
    3. Change the matmuls whose values or cotangents underflow to float32.
    4. Change the matmuls with the largest products of rounding error and cotangent to float32, until the errors are
       within half the tolerance. The other half is for other batches.
    5. Change matmuls that do not need float32 back to half precision, by bisection, until nothing changes.

    In the end, the function is computed under `autocast` with the policy, to verify the result.

    A matmul whose result is at fault keeps its operands in half precision, and has a float32 result. This costs nothing
    on tensor cores. The loss scale of each trial is the largest with which nothing overflows. All trials together take
    at most the time of 30 gradients.

    Args:
      fun: a scalar-valued function written for float32, as it would be given to `autocast`.
      *args: its arguments: parameters, or a whole model, and one batch, as in `compare_gradients`.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: float16 or bfloat16.
      tolerance: how far the value, the gradients of all leaves together, and those of each leaf may be from float32's,
        relative to their norm. By default 0.01 for float16 and 0.08 for bfloat16. A leaf with less than a hundredth of
        the whole gradient may be ten times as far. Of one with less than a thousandth, only what becomes zero or not
        finite counts; one that is zero, or nothing but rounding, in float32 is not looked at.
      batches: more batches, for which the policy must be right, too: values for the last of ``args``, of the same
        shapes.
      progress: whether to print a line for each trial, on standard error.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `PrecisionPolicy` for `autocast`, whose rules say why. They name layers, parameters, operations and functions,
      so they are right for other values, another batch size, and after edits elsewhere. Its ``loss_scale`` is that of
      the last trial, and its ``errors`` are those with all matmuls in half precision, and with the rules.

    Raises:
      ValueError: if an argument is not of its kind; if there are no gradients; inside `jax.jit` and other
        transformations.

    Warns:
      UserWarning: if value or gradients are not finite in float32 either; if most gradients are zero in float32; if the
        policy is not within the tolerance; if less than half of the matmuls stay in half precision.

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
      (PrecisionRule('float32_result', layer='energy', operation='dot_general', reason='its result reaches 1.6e+05'),)
      >>> float(jls.autocast(loss_fn, policy=policy)(*args)) == float(loss_fn(*args))
      True
    """
    call = check_call("find_precision", fun, args, kwargs, argnums, has_aux)
    dtype = checked_dtype(dtype, "find_precision(dtype=...)")
    if dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"`find_precision(dtype=...)` must be float16 or bfloat16, got {dtype.name}.")
    check_flag(progress, "find_precision(progress=...)")
    if tolerance is None:
        tolerance = _TOLERANCE * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float16).eps)
    if not is_number(tolerance) or not 0 < float(tolerance) < 1:
        raise ValueError(f"`find_precision(tolerance=...)` must be a number between 0 and 1, got {tolerance!r}.")
    tolerance = float(tolerance)
    of_batches = [call.with_args(each) for each in _all_batches(args, batches)]
    if not jax.tree.leaves([call.args[position] for position in call.positions]):
        raise ValueError(f"`find_precision(argnums={argnums})` selects no floating or complex argument.")
    if progress:
        plan = f"compiles two programs, and takes at most the time of {MOST_GRADIENTS} gradients"
        report_progress("find_precision", plan)
    # Under `autocast` the parameters of nnx modules have other paths than here.
    search = Search(of_batches, dtype, tolerance, bool(progress), not nnx_objects.flattened((args, kwargs)).objects)
    if not search.is_exact_finite():
        faults = argument_faults(call)
        why = " ".join(faults.nan + faults.infinite) or "`jls.diagnostics.compare_gradients` tells where it begins."
        warn_user(
            "`find_precision`: value or gradients are not finite in float32 either, so there is nothing to compare "
            f"with. {why} The policy has no rules."
        )
        return PrecisionPolicy()
    if sum(math.prod(leaf.shape) * (2 * leaf.is_zero - 1) for leaf in search.leaves) > 0:
        warn_user(f"`find_precision`: {errors.of_zeros(search.leaves)}")

    def policy(trial: Trial, reasons: Sequence[str] | None = None) -> PrecisionPolicy:
        return PrecisionPolicy(tuple(rules_for(search.sites, trial.levels, reasons)), loss_scale=trial.scale)

    search.report(f"{search.numbers.sum()} products at {len(search.sites)} places, {len(of_batches)} batches")
    first, best = search.found()
    while True:
        ratio, error, where = search.verified(policy(best))
        search.report(f"under `autocast`, {where} is {off(error)}")
        if ratio <= 1 or not (best.levels < FLOAT32).any():
            break
        best = search.raise_levels(best, max(1, int((best.levels > 0).sum())))
    if ratio > 1:
        warn_user(
            f"`find_precision`: with every product in float32, {where} is {off(error)}, more than the "
            f"tolerance of {percent(tolerance)}. It is not {dtype.name} that is to blame."
        )
    in_half = int(search.numbers[best.levels < FLOAT32].sum())
    if 2 * in_half < search.numbers.sum():
        warn_user(
            f"`find_precision`: only {in_half} of {search.numbers.sum()} matmuls stay in half precision, so little is "
            "gained. `jls.diagnostics.compare_gradients(jls.autocast(fun), ...)` says what is wrong with "
            f"{dtype.name} there."
        )
    before_and_after = min(first.error, 1.0), min(error, 1.0)
    return dataclasses.replace(policy(best, search.reasons(best)), errors=before_and_after)


def _all_batches(args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """Give the arguments, once for each batch."""
    if batches is None:
        return [args]
    if not isinstance(batches, Sequence) or isinstance(batches, str) or len(batches) == 0:
        raise ValueError(
            f"`find_precision(batches=...)` must be a sequence of values for the last argument, got {batches!r}. Put a "
            "single one into a list."
        )
    types = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), each) for each in (args[-1], *batches)]
    for other in types[1:]:
        if other != types[0]:
            raise ValueError(
                "`find_precision(batches=...)` must hold values like the last argument, of the same structure, shapes "
                f"and dtypes; that is {types[0]}, and one is {other}."
            )
    return [args, *((*args[:-1], batch) for batch in batches)]
