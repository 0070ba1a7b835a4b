"""How far float16's gradients are from float32's, leaf by leaf, as a function of the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale.diagnostics import _cause
from jax_lossscale.diagnostics._gradient_error import GradientComparison, LeafGradientError
from jax_lossscale.diagnostics._jaxpr import Traced, narrow_dtypes
from jax_lossscale.diagnostics._operations import range_report
from jax_lossscale.diagnostics._precision import Evaluator, checked_precision

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
    progress: Callable[[Sequence[float]], Iterable[float]] | None = None,
    **kwargs: Any,
) -> GradientComparison:
    """Ask before a run whether a function trains in float16: compare its gradients with float32's at several scales.

    For each leaf and each loss scale ``s``, with ``g32`` the gradients of the reference,

        relative_error = norm(unscale(grad(s * fun)) - g32) / norm(g32)

    Its course tells the cause. Falling with the scale: underflow, which loss scaling cures. Flat and large: the forward
    pass rounds away what matters. Infinite from some scale on: the backward pass overflows. Small as a whole, but 1 for
    some leaves: a part of the model starves. For one batch and one set of parameters: ask again after some training.

    Compiled twice, the function with the scale as an argument, and the reference. Both hold only the gradients of one
    scale at a time. Operations round as they are written: the compiler is told not to fuse the casts away.

    Args:
      fun: a scalar-valued function that casts to float16 inside, as it will in the training step.
      *args: its arguments: one batch, and float32 parameters.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: the narrow dtype that ``fun`` computes in.
      loss_scales: the scales to compare, positive numbers. By default powers of two from 2**-8 to 2**24, and further
        where the gradients are very large or very small.
      reference: the same function in float32, of the same arguments. By default it is made from ``fun``, as by
        `in_precision`.
      progress: wraps the sequence of scales that is gone through, such as ``tqdm.tqdm`` or ``rich.progress.track``.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `GradientComparison`.

    Raises:
      ValueError: if ``dtype`` is no real floating dtype; if ``loss_scales`` is empty or holds anything but positive
        finite numbers; if there are no gradients; inside `jax.jit` and its like.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     return 1e-6 * jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> comparison = jls.diagnostics.compare_gradients(loss_fn, jnp.ones((4, 2)), jnp.ones((8, 4)))
      >>> print(comparison.verdict)
      It will train; start from 2^29.
    """
    dtype = checked_precision(dtype, "compare_gradients(dtype=...)")
    given = None if loss_scales is None else _checked_scales(loss_scales)

    def scaled(scale: jax.Array, *args: Any, **kwargs: Any) -> Any:
        return value_and_scaled_grad(fun, scale, argnums, has_aux)(*args, **kwargs)

    one = jnp.float32(1)
    narrow = Traced(scaled, (one, *args), kwargs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in narrow.inputs):
        raise ValueError("`compare_gradients(*args)` got values that are traced. Call it outside of `jax.jit`.")
    nudged = narrow.inputs_from((one, *_nudged(args, argnums)), kwargs)
    evaluator = Evaluator(jnp.dtype(jnp.float32))
    if reference is None:
        wide, run = narrow, jax.jit(lambda *inputs: evaluator.evaluate(narrow.jaxpr, inputs))
    else:
        wide = Traced(jax.value_and_grad(reference, argnums, has_aux), args, kwargs)
        run = jax.jit(jaxpr_as_fun(wide.jaxpr))
        nudged = wide.inputs_from(_nudged(args, argnums, keep_dtypes=True), kwargs)
    reference_value, exact = _value_and_leaves(wide.result(run(*wide.inputs)), has_aux)
    _, moved = _value_and_leaves(wide.result(run(*nudged)), has_aux)
    if not exact:
        raise ValueError(f"`compare_gradients(argnums={argnums})` selects no floating or complex argument.")

    scales = given or _useful_scales(exact, dtype)
    step = jax.jit(jaxpr_as_fun(narrow.jaxpr), compiler_options={"xla_allow_excess_precision": False})
    measured: list[list[_Measurement]] = []
    value: Any = math.nan
    for scale in progress(scales) if progress else scales:
        value, leaves = _value_and_leaves(narrow.result(step(jnp.float32(scale), *narrow.inputs[1:])), has_aux)
        measured.append(jax.device_get(_measure(list(leaves.values()), list(exact.values()), jnp.float32(scale))))
    rounding = jax.device_get(_measure(list(moved.values()), list(exact.values()), one))
    reports = [
        _report(path, jnp.shape(leaf), [at_scale[n] for at_scale in measured], rounding[n])
        for n, (path, leaf) in enumerate(exact.items())
    ]
    total = _total(reports)
    found = _cause.find_cause(
        _cause.Evidence(
            reports,
            total,
            scales,
            dtype,
            narrow_dtypes(narrow.jaxpr.jaxpr),
            jnp.result_type(value),
            float(value),
            float(reference_value),
            lambda scale: range_report(
                fun, *args, argnums=argnums, has_aux=has_aux, dtype=dtype, loss_scale=scale, **kwargs
            ),
        )
    )
    at = scales.index(found.judged_at) if found.judged_at is not None else 0
    reports.sort(key=lambda leaf: (leaf.is_rounding, -min(leaf.relative_error[at], 1e30), -leaf.norm))
    return GradientComparison(
        verdict=found.verdict,
        cause=found.cause,
        will_train=found.will_train,
        loss_scale=found.loss_scale,
        suffering=found.suffering,
        dtype=dtype.name,
        loss_scales=tuple(scales),
        leaves=tuple(reports),
        total=total,
        value=float(value),
        reference_value=float(reference_value),
        as_they_are=tuple(evaluator.as_they_are),
    )


def _checked_scales(loss_scales: Sequence[float]) -> list[float]:
    scales = sorted({float(scale) for scale in np.ravel(np.asarray(loss_scales, np.float64))})
    if not scales or not all(0 < scale < math.inf for scale in scales):
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


def _nudged(args: Sequence[Any], argnums: int | Sequence[int], keep_dtypes: bool = False) -> list[Any]:
    """The arguments, those that are differentiated changed a little."""
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    nudged = list(args)
    for position in positions:
        nudged[position] = jax.tree.map(partial(_nudge, keep_dtype=keep_dtypes), nudged[position])
    return nudged


def _nudge(leaf: Any, keep_dtype: bool) -> Any:
    if not _tree.is_inexact(leaf):
        return leaf
    (wide,) = jax.tree.leaves(_tree.widen(jnp.asarray(leaf)))
    signs = jax.random.rademacher(jax.random.key(0), wide.shape, wide.real.dtype)
    nudged = wide * (1 + _NUDGE * signs)
    return nudged.astype(jnp.result_type(leaf)) if keep_dtype else nudged


def _value_and_leaves(result: Any, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    """The value, and the gradients by path."""
    value, grads = result
    with_paths = [pair for pair in jax.tree_util.tree_leaves_with_path(grads) if _tree.is_inexact(pair[1])]
    return value[0] if has_aux else value, {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}


class _Measurement(NamedTuple):
    """Of one leaf at one scale; sums of squares are of numbers divided by ``largest``."""

    largest: Any
    smallest: Any
    squares: Any
    squared_errors: Any
    nonzero: Any
    lost: Any
    nonfinite: Any


@jax.jit
def _measure(leaves: list[ArrayLike], exact: list[ArrayLike], scale: jax.Array) -> list[_Measurement]:
    pairs = zip(_tree.unscale(leaves, scale), _tree.widen(exact), strict=True)
    return [_measure_leaf(leaf, reference) for leaf, reference in pairs]


def _measure_leaf(leaf: jax.Array, reference: jax.Array) -> _Measurement:
    magnitudes = jnp.abs(reference)
    largest = jnp.max(magnitudes, initial=0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    is_nonzero = magnitudes > 0
    return _Measurement(
        largest=largest,
        smallest=jnp.min(magnitudes, initial=jnp.inf, where=is_nonzero),
        squares=jnp.sum((magnitudes / unit) ** 2),
        squared_errors=jnp.sum((jnp.abs(leaf - reference) / unit) ** 2),
        nonzero=jnp.sum(is_nonzero, dtype=jnp.float32),
        lost=jnp.sum(is_nonzero & (leaf == 0), dtype=jnp.float32),
        nonfinite=jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32),
    )


def _report(
    path: str, shape: tuple[int, ...], at_scales: list[_Measurement], rounding: _Measurement
) -> LeafGradientError:
    first = at_scales[0]
    return LeafGradientError(
        path=path,
        shape=shape,
        norm=float(first.largest) * math.sqrt(first.squares),
        largest=float(first.largest),
        smallest=float(first.smallest) if first.nonzero else 0.0,
        nonzero=int(first.nonzero),
        relative_error=tuple(_relative(m.squared_errors, m.squares) for m in at_scales),
        lost=tuple(float(m.lost) / max(float(m.nonzero), 1.0) for m in at_scales),
        nonfinite=tuple(float(m.nonfinite) / max(math.prod(shape), 1) for m in at_scales),
        rounding=_relative(rounding.squared_errors, rounding.squares),
    )


def _relative(squared_errors: float, squares: float) -> float:
    if squared_errors == 0:
        return 0.0
    ratio = math.sqrt(squared_errors / squares) if squares else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _total(leaves: list[LeafGradientError]) -> LeafGradientError:
    """All leaves as one."""
    norms = [leaf.norm for leaf in leaves]
    norm = math.hypot(*norms)

    def error(errors: Iterable[float]) -> float:
        parts = [error * norm for error, norm in zip(errors, norms, strict=True) if error and norm]
        return math.hypot(*parts) / norm if norm else 0.0

    def share(shares: Iterable[float], of: list[int]) -> float:
        return sum(share * number for share, number in zip(shares, of, strict=True)) / max(sum(of), 1)

    nonzero = [leaf.nonzero for leaf in leaves]
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return LeafGradientError(
        path="all leaves",
        shape=(sum(sizes),),
        norm=norm,
        largest=max(leaf.largest for leaf in leaves),
        smallest=min((leaf.smallest for leaf in leaves if leaf.smallest), default=0.0),
        nonzero=sum(nonzero),
        relative_error=tuple(map(error, zip(*(leaf.relative_error for leaf in leaves), strict=True))),
        lost=tuple(share(column, nonzero) for column in zip(*(leaf.lost for leaf in leaves), strict=True)),
        nonfinite=tuple(share(column, sizes) for column in zip(*(leaf.nonfinite for leaf in leaves), strict=True)),
        rounding=error(leaf.rounding for leaf in leaves),
    )
