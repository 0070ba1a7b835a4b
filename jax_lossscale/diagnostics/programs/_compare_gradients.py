"""How far float16's gradients are from float32's, leaf by leaf, as a function of the loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale._check import check_function, is_number
from jax_lossscale._program.jaxpr import Traced, narrow_dtypes
from jax_lossscale._program.widen import checked_precision
from jax_lossscale.diagnostics import _words
from jax_lossscale.diagnostics._report import power_of_two, tell
from jax_lossscale.diagnostics.programs._constants import lost_constants
from jax_lossscale.diagnostics.programs._finding import Evidence, find_cause
from jax_lossscale.diagnostics.programs._gradient_error import GradientComparison
from jax_lossscale.diagnostics.programs._gradients_by_scale import errors_by_scale
from jax_lossscale.diagnostics.programs._question import asked, with_gradients
from jax_lossscale.diagnostics.programs._range_report import ranges_at


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
    question = asked("compare_gradients", fun, args, kwargs, argnums, has_aux, dtype)
    wide = None
    if reference is not None:
        of_reference, _ = with_gradients(reference, args, argnums, "compare_gradients(argnums=...)")
        wide = Traced(jax.value_and_grad(of_reference, argnums, has_aux), question.args, kwargs)
    shown = progress if callable(progress) else _told if progress else iter
    errors = errors_by_scale(question, wide, given, shown)
    if errors is None:
        raise ValueError(f"`compare_gradients(argnums={argnums})` selects no floating or complex argument.")
    evidence = Evidence(
        question=question,
        errors=errors,
        dtypes_met=narrow_dtypes(question.program.jaxpr.jaxpr),
        lost=lost_constants(question.program) if reference is None else (),
        ranges=functools.cache(lambda scale: ranges_at(question, scale, progress is True)),
    )
    finding = find_cause(evidence)
    at = finding.at
    leaves = sorted(errors.leaves, key=lambda leaf: (leaf.is_rounding, -min(leaf.relative_error[at], 1e30), -leaf.norm))
    return GradientComparison(
        verdict=_words.verdict(evidence, finding),
        cause=finding.cause,
        will_train=finding.will_train,
        loss_scale=finding.loss_scale,
        suffering=() if finding.will_train else tuple(leaf.path for leaf in finding.leaves),
        dtype=dtype.name,
        loss_scales=tuple(errors.scales),
        working_scales=tuple(errors.scales[n] for n in errors.working()),
        leaves=tuple(leaves),
        total=errors.total,
        value=errors.value,
        reference_value=errors.reference_value,
        as_they_are=errors.as_they_are,
        facts=question.facts,
    )


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
