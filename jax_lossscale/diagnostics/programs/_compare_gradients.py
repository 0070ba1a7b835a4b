"""How far float16's gradients are from float32's, leaf by leaf, as a function of the loss scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_function, is_number
from jax_lossscale._program.jaxpr import Traced, narrow_dtypes
from jax_lossscale._program.widen import Evaluator, checked_precision
from jax_lossscale.diagnostics._report import power_of_two, tell
from jax_lossscale.diagnostics.programs._cause import find_cause
from jax_lossscale.diagnostics.programs._constants import lost_constants
from jax_lossscale.diagnostics.programs._evidence import Evidence
from jax_lossscale.diagnostics.programs._facts import facts_of, names_of_inputs, names_of_leaves
from jax_lossscale.diagnostics.programs._gradient_error import GradientComparison
from jax_lossscale.diagnostics.programs._gradient_measure import Measurement, measure, report_of_all, reports_of_leaves
from jax_lossscale.diagnostics.programs._gradient_program import gradient_program, with_gradients
from jax_lossscale.diagnostics.programs._range_report import range_report

# A change of the parameters that float32 can just express. A gradient that it changes much is made of rounding.
_NUDGE = 2.0**-22


def compare_gradients(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scales: Sequence[float] | None = None,
    reference: Callable[..., Any] | None = None,
    progress: bool | Callable[[Sequence[float]], Iterable[float]] = False,
    **kwargs: Any,
) -> GradientComparison:
    """Compare a function's float16 gradients with float32's at several scales, to see whether it will train.

    For each leaf and each loss scale ``s``, with ``g32`` the gradients of the reference,

        relative_error = norm(unscale(grad(s * fun)) - g32) / norm(g32)

    How this error changes with the scale shows the cause. If it falls, the gradients underflow, which loss scaling
    cures. If it is flat and large, the forward pass rounds away what matters. If it is infinite from some scale on, the
    backward pass overflows. If it is small as a whole, but 1 for some leaves, a part of the model gets no gradients.
    The answer is for one batch and one set of parameters: compare again after some training.

    Two programs are compiled: the function, with the scale as an argument, and the reference. Each holds the gradients
    of only one scale at a time. Every operation rounds to its own dtype, since the compiler may not fuse the casts
    away.

    Args:
      fun: a scalar-valued function that casts to float16 inside, as it will in the training step.
      *args: its arguments: one batch, and float32 parameters, or a whole model. What has no gradients in one that is
        differentiated (functions, keys, counters) stays as it is.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: the narrow dtype that ``fun`` computes in.
      loss_scales: the scales to compare, positive numbers. By default powers of two from ``2**-8`` to ``2**24``, and
        further where the gradients are very large or very small.
      reference: the same function in float32, of the same arguments. By default it is made from ``fun``, as by
        `in_precision`.
      progress: whether to print a line for each scale, on standard error; or a function that wraps the sequence of
        scales, such as ``tqdm.tqdm`` or ``rich.progress.track``.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `GradientComparison`.

    Raises:
      ValueError: if ``dtype`` is no real floating dtype; if ``loss_scales`` is empty or holds anything but positive
        finite numbers; if there are no gradients; inside `jax.jit` and other transformations.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     return 1e-6 * jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> comparison = jls.diagnostics.compare_gradients(
      ...     loss_fn, jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> print(comparison.verdict)
      It will train; start from 2^29.
    """
    if reference is not None:
        check_function(reference, "compare_gradients(reference=...)")
    if progress and not isinstance(progress, bool):
        check_function(progress, "compare_gradients(progress=...)")
    dtype = checked_precision(dtype, "compare_gradients(dtype=...)")
    given = None if loss_scales is None else _checked_scales(loss_scales)
    check_function(fun, "compare_gradients(fun=...)")
    of_leaves, chosen = with_gradients(fun, args, argnums, "compare_gradients(argnums=...)")
    narrow = gradient_program("compare_gradients", of_leaves, 1.0, chosen, kwargs, argnums, has_aux)
    moved = nudged(chosen, argnums, keep_dtypes=reference is not None)
    evaluator = Evaluator(jnp.dtype(jnp.float32))
    if reference is None:
        wide, moved = narrow, [np.float32(1), *moved]
        computed = jax.jit(lambda *inputs: evaluator.evaluate(narrow.jaxpr, inputs))
    else:
        of_reference, _ = with_gradients(reference, args, argnums, "compare_gradients(argnums=...)")
        wide = Traced(jax.value_and_grad(of_reference, argnums, has_aux), chosen, kwargs)
        computed = jax.jit(jaxpr_as_fun(wide.jaxpr))
    exact_value, exact = value_and_leaves(wide.result(computed(*wide.inputs)), has_aux)
    if not exact:
        raise ValueError(f"`compare_gradients(argnums={argnums})` selects no floating or complex argument.")
    of_moved = computed(*wide.inputs_from(moved, kwargs))
    rounding = measure(value_and_leaves(wide.result(of_moved), has_aux)[1], exact, 1.0)
    del of_moved  # no two gradients but the reference and those of one scale are held at a time

    scales = given or _useful_scales(exact, dtype)
    one_by_one = progress(scales) if callable(progress) else _told(scales) if progress else scales
    value, measured = _at_scales(narrow, exact, one_by_one, has_aux)
    leaves = reports_of_leaves(exact, measured, rounding)
    total = report_of_all(leaves)
    facts = facts_of(narrow, dtype, names_of_inputs(narrow, names_of_leaves(fun, chosen, kwargs)))
    report = functools.partial(
        range_report, fun, *args, argnums=argnums, has_aux=has_aux, dtype=dtype, progress=progress is True, **kwargs
    )
    evidence = Evidence(
        facts=facts,
        leaves=leaves,
        total=total,
        scales=scales,
        dtype=dtype,
        dtypes_met=narrow_dtypes(narrow.jaxpr.jaxpr),
        loss_dtype=jnp.result_type(value),
        value=float(value),
        reference_value=float(exact_value),
        lost=lost_constants(narrow) if reference is None else (),
        ranges=functools.cache(lambda scale: report(loss_scale=scale)),
    )
    finding = find_cause(evidence)
    at = scales.index(finding.judged_at) if finding.judged_at is not None else 0
    leaves.sort(key=lambda leaf: (leaf.is_rounding, -min(leaf.relative_error[at], 1e30), -leaf.norm))
    return GradientComparison(
        verdict=finding.verdict,
        cause=finding.cause,
        will_train=finding.will_train,
        loss_scale=finding.loss_scale,
        suffering=finding.suffering,
        dtype=dtype.name,
        loss_scales=tuple(scales),
        leaves=tuple(leaves),
        total=total,
        value=evidence.value,
        reference_value=evidence.reference_value,
        as_they_are=tuple(evaluator.as_they_are),
        facts=facts,
    )


def _at_scales(
    narrow: Traced, exact: dict[str, Any], scales: Iterable[float], has_aux: bool
) -> tuple[Any, list[list[Measurement]]]:
    """The value, which is that of every scale, and a measurement of each leaf for each scale."""
    compiled = jax.jit(jaxpr_as_fun(narrow.jaxpr), compiler_options={"xla_allow_excess_precision": False})
    value: Any = math.nan
    measured = []
    for scale in scales:
        value, leaves = value_and_leaves(narrow.result(compiled(jnp.float32(scale), *narrow.inputs[1:])), has_aux)
        measured.append(measure(leaves, exact, scale))  # waits, so that no two scales' gradients are held at a time
    return value, measured


def _told(scales: Sequence[float]) -> Iterator[float]:
    for done, scale in enumerate(scales, 1):
        yield scale
        tell("compare_gradients", f"{done} of {len(scales)} loss scales; {power_of_two(scale)}")


def _checked_scales(loss_scales: Sequence[float]) -> list[float]:
    given = np.asarray(loss_scales, object).ravel().tolist() if np.ndim(loss_scales) == 1 else []
    scales = sorted({float(scale) for scale in given if is_number(scale)})
    are_positive = all(0 < scale <= float(np.finfo(np.float32).max) for scale in scales)
    if not scales or not are_positive or not all(map(is_number, given)):
        raise ValueError(
            f"`compare_gradients(loss_scales=...)` must be positive finite numbers, got {loss_scales!r}. By default "
            "useful ones are chosen."
        )
    return scales


def _useful_scales(exact: dict[str, Any], dtype: jnp.dtype) -> list[float]:
    """Powers of two around 1, around the default, and around those that bring the largest gradient near the top."""
    largest = max(float(jnp.max(jnp.abs(leaf), initial=0)) for leaf in exact.values())
    exponents = {-8, -4, 0, 4, 8, 12, 15, 18, 21, 24}
    if 0 < largest < math.inf:
        fitting = math.floor(math.log2(float(jnp.finfo(dtype).max)) - math.log2(largest))
        exponents |= {fitting + step for step in (-12, -8, -4, 0, 4)} if not -4 <= fitting <= 20 else set()
    return [2.0**exponent for exponent in sorted(exponents) if -100 <= exponent <= 127]


def nudged(args: Sequence[Any], argnums: int | Sequence[int], *, keep_dtypes: bool) -> list[Any]:
    """The arguments, those that are differentiated changed a little."""
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    chosen = [args[position] for position in positions]
    leaves, structure = jax.tree.flatten(chosen)
    most = max(map(np.size, _tree.inexact_leaves(chosen)), default=0)
    signs = jnp.asarray(np.random.default_rng(0).choice(np.array([-1, 1], np.int8), most + len(leaves)))
    leaves = [_nudge(leaf, signs, n, keep_dtypes) if _tree.is_inexact(leaf) else leaf for n, leaf in enumerate(leaves)]
    moved = list(args)
    for position, argument in zip(positions, jax.tree.unflatten(structure, leaves), strict=True):
        moved[position] = argument
    return moved


@functools.partial(jax.jit, static_argnums=3)
def _nudge(leaf: Any, signs: jax.Array, start: int, keep_dtype: bool) -> jax.Array:
    (wide,) = _tree.widen([leaf])
    sign = jax.lax.dynamic_slice_in_dim(signs, start, wide.size).reshape(wide.shape).astype(wide.real.dtype)
    nudged = wide * (1 + _NUDGE * sign)
    return nudged.astype(leaf.dtype) if keep_dtype else nudged


def value_and_leaves(result: Any, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    """The value, and the gradients by path."""
    value, grads = result
    with_paths = [pair for pair in jax.tree_util.tree_leaves_with_path(grads) if _tree.is_inexact(pair[1])]
    return value[0] if has_aux else value, {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
