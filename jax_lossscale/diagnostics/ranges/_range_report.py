"""Which operation leaves the range of a dtype, in which layer, on which line, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._check import check_flag, is_number
from jax_lossscale._loss_scale.finding import as_loss_scale
from jax_lossscale._program.jaxpr import is_narrow
from jax_lossscale._program.widen import checked_precision
from jax_lossscale.diagnostics.asked._facts import ProductFacts
from jax_lossscale.diagnostics.asked._question import Question, asked, called
from jax_lossscale.diagnostics.errors._gradients_by_scale import errors_by_scale, noted_error_of_loss
from jax_lossscale.diagnostics.ranges._operation_range import OperationRange, RangeReport
from jax_lossscale.diagnostics.shadow._blame import blame, cure, fault_of
from jax_lossscale.diagnostics.shadow._layers import told_apart
from jax_lossscale.diagnostics.shadow._shadow import ShadowEvaluator, Statistics
from jax_lossscale.diagnostics.shadow._sites import Ancestry, Graph, Parameter, Site

# What the seeding of the gradients computes is no operation of the user's.
_OURS = str(Path(__file__).parents[2])
# The share of a gradient that float32 rounding may be, before the gradient is taken for zero.
_MOSTLY_ROUNDING = 2.0**-6


def range_report(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scale: Any = None,
    progress: bool = False,
    **kwargs: Any,
) -> RangeReport:
    """Find the operations of a float16 function and its gradients that leave float16's range, and where they are.

    The program of value and gradient is evaluated as it is and in float32, as by `in_precision`, side by side. Of every
    result that would have been narrow it is measured, in float32, how large it is, and how much of it would be
    infinite, zero or subnormal. So one operation's overflow does not hide the next one's. Of every result it is
    measured how far off it is, and the errors are followed from value and gradients back to where they begin: what
    vanishes or rounds without harm is not told. For a loop, the worst iteration is reported.

    It runs operation by operation, so that equal operations are compiled once, and keeps a few numbers of each. For
    `jax.shard_map` and kernels, only the results are measured.

    Args:
      fun: a scalar-valued function that casts to float16 inside, as it will in the training step.
      *args: its arguments: one batch, and float32 parameters, or a whole model, as in `compare_gradients`.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: the narrow dtype with whose range all narrow results are compared.
      loss_scale: a `LossScale`, a number, or an optimizer state that holds a loss scale. By default the one that
        `compare_gradients` would start from, which takes a few gradients to find.
      progress: whether to print a line for each tenth of the program, on standard error.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `RangeReport`, the worst operation first.

    Raises:
      ValueError: if ``dtype`` is no real floating dtype, or ``loss_scale`` is no loss scale; inside `jax.jit` and other
        transformations.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     with jax.named_scope("energy"):
      ...         return jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> report = jls.diagnostics.range_report(
      ...     loss_fn, jnp.full((4, 2), 200.0), jnp.full((8, 4), 100.0)
      ... )
      >>> report[0].operation, report[0].layer, report[0].largest
      ('dot_general', 'energy', 80000.0)
    """
    dtype = checked_precision(dtype, "range_report(dtype=...)")
    scale = None if loss_scale is None else _scale_of(loss_scale)
    check_flag(progress, "range_report(progress=...)")
    question = asked(called("range_report", fun, args, kwargs, argnums, has_aux), dtype)
    if scale is None:
        errors = errors_by_scale(question)
        scale = errors.start() if errors else 1.0
    return ranges_at(question, scale, progress)


def ranges_at(question: Question, loss_scale: float, progress: bool) -> RangeReport:
    """Make the report at a scale."""
    traced, dtype, graph = question.program, question.dtype, Graph()
    entering = {name: Parameter(-1, name, is_bare=True) for name in question.parameters}
    ends = graph.outputs(traced.jaxpr, [Ancestry(parameter=entering.get(name)) for name in question.inputs])
    value, grads = traced.result([end.nodes for end in ends])
    evaluator = ShadowEvaluator(dtype, len(graph.sites) if progress else 0)
    inputs = map(evaluator.value_of, [jnp.float32(loss_scale), *traced.inputs[1:]], traced.jaxpr.in_avals)
    _, rows = evaluator.evaluate(traced.jaxpr, list(inputs))
    measured = {node: Statistics(*row.tolist()) for node, row in zip(graph.sites, jax.device_get(rows), strict=True)}
    of_value, of_grads = value[0] if question.call.has_aux else value, frozenset[int]().union(*jax.tree.leaves(grads))
    results = {node for node in of_value | of_grads if not _is_noise(measured.get(node), dtype)}
    harmful, origins = blame(graph, measured, results)
    if not harmful:  # a loss that is off by less is told where nothing is worse
        harmful, origins = blame(graph, measured, results & of_value, noted_error_of_loss(dtype))
    sites = told_apart(graph, dict(zip(question.parameters, jax.tree.leaves(grads), strict=True)))
    operations = []
    for site, (node, statistics) in zip(sites, measured.items(), strict=True):
        operation = _operation_range(site, statistics, question.products, node in harmful, node in origins)
        if (is_narrow(site.aval) or operation.cure) and not site.place.source.startswith(_OURS):
            operations.append(operation)
    operations.sort(key=_severity)
    has_nan = any(math.isnan(operation.largest) for operation in operations)
    faults = question.faults.nan + (question.faults.infinite if has_nan else [])
    return RangeReport(
        operations=tuple(operations),
        dtype=dtype.name,
        loss_scale=loss_scale,
        as_they_are=tuple(evaluator.evaluator.as_they_are),
        lost_constants=tuple(str(each) for each in question.lost if each.is_epsilon or has_nan),
        facts=question.products,
        arguments=tuple(faults),
    )


def _is_noise(measured: Statistics | None, dtype: jnp.dtype) -> bool:
    """Tell whether a gradient is zero but for rounding, in float32 too, as that of a bias before a norm or a softmax.

    Its last operation multiplies the rounding errors of float32 by as much as those of the dtype, which are larger by
    as many digits as it has less.
    """
    if measured is None or math.isinf(measured.error):
        return False
    multiplied = measured.error / max(measured.error_in, 1.0)
    return multiplied * float(jnp.finfo(jnp.float32).eps / jnp.finfo(dtype).eps) > _MOSTLY_ROUNDING


def _severity(operation: OperationRange) -> Any:
    changes = bool(operation.cure) and operation.changes_result
    begins = 0.0 if operation.overflow else -operation.amplification * changes
    return not changes, operation.is_backward, not operation.overflow, begins, -operation.zero


def _scale_of(loss_scale: Any) -> float:
    """Give the scale as a number, which unlike that of a `FixedLossScale` may be less than 1."""
    if not is_number(loss_scale):
        loss_scale = as_loss_scale(loss_scale, "range_report(loss_scale=...)")()
    if not 0 < float(loss_scale) < math.inf:
        raise ValueError(f"`range_report(loss_scale=...)` must be positive and finite, got {loss_scale!r}.")
    return float(loss_scale)


def _operation_range(
    site: Site, measured: Statistics, products: ProductFacts, is_harmful: bool, is_origin: bool
) -> OperationRange:
    info = jnp.finfo(products.dtype)
    fault = fault_of(site, measured, is_harmful=is_harmful, is_origin=is_origin, is_autocast=products.is_autocast)
    log2_above = log2_below = 0
    if measured.overflow:
        log2_above = math.ceil(math.log2(min(measured.largest / float(info.max), 2.0**128)))
    elif 0 < measured.largest < float(info.smallest_normal):
        log2_below = math.ceil(math.log2(float(info.smallest_normal) / measured.largest))
    return OperationRange(
        operation=site.operation,
        derivative_of=site.derivative_of,
        layer=site.place.layer,
        source=site.place.source,
        is_backward=site.place.is_backward,
        shape=site.aval.shape,
        dtype=site.aval.dtype.name,
        largest=math.nan if measured.nan and not measured.overflow else measured.largest,
        overflow=measured.overflow + measured.nan,
        zero=measured.zero,
        subnormal=measured.subnormal,
        log2_above=log2_above,
        log2_below=log2_below,
        cure=cure(fault, site, measured),
        error=measured.error,
        error_in=measured.error_in,
        amplification=measured.amplification,
        changes_result=is_harmful or measured.nan > 0,
    )
