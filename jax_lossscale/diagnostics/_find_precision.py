"""Automatic search for a `PrecisionPolicy` under which the value and the gradients of a function are accurate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale import _tree
from jax_lossscale._autocast import PrecisionPolicy, PrecisionRule, autocast
from jax_lossscale._autocast.transform import without_autocast
from jax_lossscale._check import checked_dtype, is_number
from jax_lossscale._program import nnx_objects
from jax_lossscale._warn import warn_user
from jax_lossscale.diagnostics import _gradient_errors as errors
from jax_lossscale.diagnostics._argument_faults import argument_faults
from jax_lossscale.diagnostics._loss_call import Leaves, LossCall, check_call, with_unambiguous_options
from jax_lossscale.diagnostics._operations import MatmulSummary
from jax_lossscale.diagnostics._precision_probes import FLOAT32, MatmulSite
from jax_lossscale.diagnostics._precision_search import Search
from jax_lossscale.diagnostics._precision_trials import Gradients
from jax_lossscale.diagnostics._report import Report, off, percent, power_of_two, progress_bar
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

# The names of the precision levels `HALF`, `FLOAT32_RESULT` and `FLOAT32`, in that order.
_PRECISIONS = ("half", "float32_result", "float32")


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class PrecisionReport(Report[PrecisionRule]):
    """A sequence of the rules that `find_precision` found.

    The printed report contains a summary of the matrix multiplications and convolutions (matmuls), the policy and its
    accuracy.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      policy: the policy for `autocast`.
      loss_scale: the loss scale at which the policy was tested, or ``None`` if there is no float32 reference.
      errors: two relative errors compared with float32, the first with all matmuls in half precision and the second
        under the policy. Each is the largest error of the value and the gradients, but at most 1. ``errors`` is
        ``None`` if there is no float32 reference.
      summary: under the policy, the number of matmuls, the number of matmuls in ``dtype``, and the location of the
        first matmul in another dtype.
    """

    policy: PrecisionPolicy
    loss_scale: float | None = None
    errors: tuple[float, float] | None = None
    summary: MatmulSummary = MatmulSummary()

    _entries: ClassVar[str] = "rules"

    @property
    def rules(self) -> tuple[PrecisionRule, ...]:
        """The rules of the policy."""
        return self.policy.rules

    def _header(self) -> str:
        if self.errors is None or not self.rules:
            return f"{self.summary}\n{self.policy}"
        before, after = (percent(error) if error < 1 else "over 100%" for error in self.errors)
        return f"{self.summary}\nError compared with float32: {before} -> {after}.\n{self.policy}"

    def _notes(self) -> Sequence[str]:
        if self.loss_scale is None:
            return ()
        tested = f"Tested at a loss scale of {power_of_two(self.loss_scale)}."
        fix = 'This scale is below 1. Use the `"auto"` loss scale, or set `min_loss_scale` in `DynamicLossScale`.'
        return (tested, fix) if self.loss_scale < 1 else (tested,)


@with_unambiguous_options
def find_precision(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    tolerance: float | None = None,
    batches: Sequence[Any] | None = None,
    progress: bool | Callable[[Sequence[Any]], Iterable[Any]] | None = None,
    **kwargs: Any,
) -> PrecisionReport:
    """Find the matmuls that must be in float32 so that the gradients of a function are accurate under `autocast`.

    A matmul is a matrix multiplication or a convolution. `find_precision` computes the value and the gradients of
    ``fun`` with different sets of matmuls in half precision and compares them with the value and the gradients in
    float32. The gradients are computed at most 30 times per batch. The parameters and gradients need at most ``3 + n``
    times the memory of the parameters, where ``n`` is the number of batches, in addition to the memory of the
    activations.

    Args:
      fun: a scalar-valued function written for float32, as you would pass it to `autocast`. Any use of `autocast` in
        ``fun`` is ignored. Remove manual casts to half precision, because they also affect the float32 reference.
      *args: the positional arguments of ``fun``: the parameters (or a whole model) and one batch, as in
        `compare_gradients`. Float16 parameters are cast to float32 before ``fun`` is called.
      argnums: the positions of the differentiated arguments, as in `jax.value_and_grad`.
      has_aux: whether ``fun`` also returns auxiliary data, as in `jax.value_and_grad`.
      dtype: float16 or bfloat16.
      tolerance: the largest accepted error, relative to the float32 result, of the value, of the gradient of each leaf
        and of the gradient of all leaves together. The default tolerance is 0.01 for float16 and 0.08 for bfloat16. The
        notes below describe exceptions for small leaves.
      batches: additional batches for which the policy must meet the tolerance. Each batch replaces the last element of
        ``args`` and must have the same structure, shapes and dtypes. All leaves that are not arrays, such as Python
        numbers, must be equal in all batches.
      progress: whether to show a progress bar, or a function that wraps the sequence of evaluations, as in
        `compare_gradients`.
      **kwargs: the keyword arguments of ``fun``. If ``fun`` has a parameter with the name of an option, wrap ``fun`` in
        a ``lambda`` or a nested function that sets this parameter.

    Returns:
      A `PrecisionReport`. Its attribute ``policy`` is a `PrecisionPolicy` for `autocast`. Each rule of the policy
      includes a reason and identifies matmuls by layer, parameter, operation or function. The policy therefore remains
      valid for other parameter values, for other batch sizes, and after changes to other parts of the code.

    Raises:
      ImportError: if ``progress`` is True and tqdm is not installed.
      ValueError: if an argument is invalid, if there are no gradients, or if the function is called inside `jax.jit` or
        another transformation.

    Warns:
      UserWarning: if the value or the gradients are not finite even with all matmuls in float32, if most gradients are
        zero in float32, if the errors exceed the tolerance even with all matmuls in float32, or if fewer than half of
        the matmuls stay in half precision.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     with jax.named_scope("energy"):
      ...         energy = x @ weights  # 1.6e5
      ...     return jnp.mean(jnp.log(energy))
      >>> args = jnp.full((4, 2), 200.0), jnp.full((8, 4), 200.0)
      >>> policy = jls.diagnostics.find_precision(loss_fn, *args).policy
      >>> policy.rules
      (PrecisionRule('float32_result', layer='energy', operation='dot_general', reason='its result reaches 1.6e+05'),)
      >>> float(jls.autocast(loss_fn, policy=policy)(*args)) == float(loss_fn(*args))
      True

    Notes:
      All trials use the same compiled program for the value and the gradients of ``fun``. An argument of this program
      determines which matmuls round their operands and results to half precision, as `autocast` does. The search has
      five steps:

      1. Try half precision for all matmuls. If the errors are within the tolerance, the policy has no rules.
      2. Use float32 for the matmuls whose operands or results overflow in ``dtype``.
      3. Use float32 for the matmuls whose operands, results or cotangents underflow in ``dtype``.
      4. Use float32 for the matmuls that contribute most to the error, until the errors are within half of the
         tolerance. The other half is reserved for other batches. The contribution is estimated by multiplying rounding
         errors by cotangents.
      5. Change matmuls back to half precision by bisection, as long as the errors stay within half of the tolerance.

      Finally, the function is evaluated under `autocast` with the new policy to verify the errors.

      If only the result of a matmul causes errors, the operands stay in half precision and the result is float32, which
      costs no extra time on tensor cores. The loss scale of each trial is close to the largest scale at which no
      gradient overflows.

      The tolerance has the following exceptions:

      - If the norm of the gradient of a leaf is less than 1% of the norm of the whole gradient, the tolerance for this
        leaf is ten times as large.
      - If the norm of the gradient of a leaf is less than 0.1% of the norm of the whole gradient, only elements that
        become zero or non-finite count as errors.
      - If the gradient of a leaf is zero in float32, or consists of rounding errors, the leaf is ignored as long as it
        is finite in half precision.
      - If multiplying the parameters by ``1 ± 2**-9`` causes disproportionately large errors even in float32, the
        tolerance is up to ten times as large. For example, the inputs of ReLUs may change their signs.
    """

    def checked(args: Sequence[Any]) -> LossCall:
        call = check_call("find_precision", fun, args, kwargs, argnums, has_aux)
        # The gradient of a float16 parameter would be rounded even in the float32 reference.
        widened = [_tree.widen(arg, (jnp.bfloat16,)) if isinstance(arg, Leaves) else arg for arg in call.args]
        return call._replace(fun=without_autocast(call.fun), args=widened)

    calls = list(map(checked, _all_batches(args, batches)))
    dtype = checked_dtype(dtype, "find_precision(dtype=...)")
    if dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"`find_precision(dtype=...)` must be float16 or bfloat16, got {dtype.name}.")
    if tolerance is None:
        tolerance = errors.noted_error_of_loss(dtype)
    if not is_number(tolerance) or not 0 < float(tolerance) < 1:
        raise ValueError(f"`find_precision(tolerance=...)` must be a number between 0 and 1, got {tolerance!r}.")
    calls[0].check_has_gradients("find_precision")
    # The rules for nnx modules do not name parameters, because `autocast` changes the paths of their parameters.
    names_parameters = not nnx_objects.flattened((args, kwargs)).objects
    gradients = Gradients(calls, dtype, names_parameters, progress_bar("find_precision", progress))
    report = _found(calls[0], Search(gradients, float(tolerance)), tolerance)
    under_policy = calls[0]._replace(fun=autocast(calls[0].fun, dtype, policy=report.policy))
    return dataclasses.replace(report, summary=TracedGradients(under_policy, dtype).matmuls)


def _found(call: LossCall, search: Search, tolerance: float) -> PrecisionReport:
    """Return the policy that a search finds and warn if it is not useful."""
    dtype, sites, numbers = search.gradients.dtype, search.gradients.sites, search.gradients.numbers
    if not all(target.is_finite() for target in search.targets):
        faults = argument_faults(call)
        why = " ".join(faults.nan + faults.infinite) or "`jls.diagnostics.compare_gradients` shows the cause."
        warn_user(
            "`find_precision`: The value or the gradients are not finite even with all matmuls in float32, so there is "
            f"no reference for a comparison. {why} The returned policy has no rules."
        )
        return PrecisionReport(policy=PrecisionPolicy())
    leaves, _ = search.targets[0].float32.reports_of([])
    if sum(math.prod(leaf.shape) * (2 * leaf.is_zero - 1) for leaf in leaves) > 0:
        warn_user(f"`find_precision`: {errors.of_zeros(leaves)}")
    first, best = search.run()
    while (verified := search.verify(best, _policy(sites, best.levels))).ratio > 1 and (best.levels < FLOAT32).any():
        best = search.raise_levels(best, max(1, int((best.levels > 0).sum())))
    if verified.ratio > 1:
        warn_user(
            f"`find_precision`: Even with all matmuls in float32, {verified.where} is {off(verified.error)}, which "
            f"exceeds the tolerance of {percent(tolerance)}. Remove any manual casts to half precision from `fun`."
        )
    count, in_half = numbers.sum(), int(numbers[best.levels < FLOAT32].sum())
    if 2 * in_half < count:
        warn_user(
            f"`find_precision`: Only {in_half} of {count} matmuls stay in half precision, so `autocast` saves little "
            "time and memory. Use `jls.diagnostics.compare_gradients(jls.autocast(fun), ...)` to find out why the "
            f"function is not accurate in {dtype.name}."
        )
    before_and_after = min(first.error, 1.0), min(verified.error, 1.0)
    with_reasons = _policy(sites, best.levels, search.reasons(best))
    return PrecisionReport(policy=with_reasons, loss_scale=best.scale, errors=before_and_after)


def _all_batches(args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """Return the positional arguments of the function for each batch."""
    if batches is None or not args:  # `check_has_gradients` rejects a call without arguments.
        return [args]

    def types(batch: Any) -> Any:
        # The function is traced only once, so leaves that are not arrays have the same value in all batches.
        return jax.tree.map(lambda x: (x.shape, jnp.result_type(x)) if _tree.is_array(x) else repr(x), batch)

    is_sequence = isinstance(batches, Sequence) and not isinstance(batches, str) and len(batches) > 0
    # The containers are not compared directly, because an nnx module, for example, is equal only to itself.
    expected = jax.tree.flatten(types(args[-1]))
    if not is_sequence or any(jax.tree.flatten(types(batch)) != expected for batch in batches):
        raise ValueError(
            "`find_precision(batches=...)` must be a sequence of values with the structure, shapes and dtypes of the "
            f"last positional argument of `fun`: expected {types(args[-1])}, got "
            f"{list(map(types, batches)) if is_sequence else batches!r}. All leaves that are not arrays, such as "
            "Python numbers, must be equal in all batches. To pass a single batch, put it into a list."
        )
    return [args, *((*args[:-1], batch) for batch in batches)]


def _policy(sites: Sequence[MatmulSite], levels: np.ndarray, reasons: Sequence[str] = ()) -> PrecisionPolicy:
    """Return a policy with a rule for each matmul, or group of similar matmuls, that is not in half precision.

    Each rule contains only as many patterns as necessary to distinguish its matmuls from all other matmuls, so that the
    rules are easy to review.

    The first matching rule of a policy applies, so the rules that select ``"float32"`` precede the rules that select
    ``"float32_result"``. If no pattern distinguishes two matmuls, both matmuls get the higher precision.

    Args:
      sites: the sites of the matmuls.
      levels: the precision of each site, ``int[sites]``.
      reasons: for each site, the reason for its precision. If ``reasons`` is empty, the rules do not contain reasons.
    """
    rules, covered = list[PrecisionRule](), set[int]()
    for number in sorted(map(int, np.flatnonzero(levels)), key=lambda number: -int(levels[number])):
        level = int(levels[number])
        if number in covered:
            continue
        # The sets of names that are most likely to remain valid if the model changes come first. Use the first set that
        # does not match any matmul with another precision. If every set matches such a matmul, use the last and most
        # specific set.
        for names in _names(sites[number]):
            rule = PrecisionRule(_PRECISIONS[level], **names, reason=reasons[number] if reasons else "")
            matched = [other for other, site in enumerate(sites) if rule.matches(site.operation, site.location)]
            if all(levels[other] == level for other in matched):
                break
        rules.append(rule)
        covered.update(matched)
    # A rule with few patterns may also match all matmuls of rules that were added before it.
    return PrecisionPolicy(tuple(rule for rule in rules if not any(_contains(other, rule) for other in rules)))


def _contains(one: PrecisionRule, other: PrecisionRule) -> bool:
    """Return whether ``one`` has the same precision as ``other`` and matches every operation that ``other`` matches."""
    patterns, others = ({**vars(rule), "reason": ""} for rule in (one, other))
    return patterns != others and all(pattern in ("*", others[name]) for name, pattern in patterns.items())


def _names(site: MatmulSite) -> list[dict[str, str]]:
    """Return sets of patterns that match a matmul, starting with those that are the most robust to code changes."""
    location, operation = site.location, {"operation": site.operation}
    layer = {"layer": location.layer} if location.layer else {}
    parameter = {"parameter": location.parameter}  # An empty string matches only matmuls without a parameter.
    function = {"function": location.functions[0]} if location.functions else {}
    ways = [layer, parameter if location.parameter else {}, function]
    ways += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in ways if names]
