"""Whether a step is applied, and whether the loss scale reacts to it: the table in `loss_scaled`, as code."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import check_bool_scalar
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale._arguments import is_number
from jax_lossscale._loss_scale.base import adjust
from jax_lossscale._measure import (
    AxisName,
    agree,
    agree_on_largest,
    all_finite,
    all_finite_unscaled,
    finite_and_largest,
)


class Told(NamedTuple):
    """What the caller says of a step beside its gradients; ``None`` where nothing is said."""

    value: ArrayLike | None = None
    skip_if: ArrayLike | None = None
    parts_finite: ArrayLike | None = None
    grads_finite: ArrayLike | None = None


class Verdict(NamedTuple):
    """What is known of a step before it is taken, agreed over devices."""

    loss_scale: LossScale  # the next one
    leaves_finite: jax.Array  # bool[]: the gradients
    grads_finite: jax.Array  # bool[]: the gradients, and all parts that they were made of
    parts_finite: jax.Array  # bool[]: those parts
    value_finite: jax.Array  # bool[]
    largest: jax.Array | None  # float32[], of the unscaled gradients; None: not measured
    allowed: jax.Array  # bool[]: not forbidden by the user's condition
    should_apply: jax.Array | None  # bool[]; None: yes, known without looking


def decide(scaled_grads: chex.ArrayTree, loss_scale: LossScale, told: Told, axis_name: AxisName) -> Verdict:
    """The table in `loss_scaled`. All flags are agreed over devices at once: one all-reduce."""
    flags, largest = _look(scaled_grads, loss_scale, told)
    if largest is not None:
        agreed, largest = agree_on_largest(jnp.stack(list(flags.values())), largest, axis_name)
        flags = dict(zip(flags, agreed, strict=True))
        largest = jnp.where(flags["leaves_finite"], largest, 0)  # not that of the devices without an overflow
    elif flags:
        flags = dict(zip(flags, agree(jnp.stack(list(flags.values())), axis_name), strict=True))

    reasons_to_apply = [flags[name] for name in ("value_finite", "allowed") if name in flags]
    if loss_scale.skip_nonfinite and "leaves_finite" in flags:
        reasons_to_apply.append(flags["leaves_finite"])
    grads_finite = _all([flags[name] for name in ("leaves_finite", "parts_finite") if name in flags])
    if grads_finite is not None:
        adjusted = adjust(loss_scale, grads_finite, largest)
        reasons_to_react = [flags["value_finite"]] if "value_finite" in flags else []
        if "allowed" in flags:
            reasons_to_react.append(flags["allowed"] | ~grads_finite)
        reacts = _all(reasons_to_react)
        loss_scale = adjusted if reacts is None else _tree.select_tree(reacts, adjusted, loss_scale)
    true = jnp.array(True)
    return Verdict(
        loss_scale=loss_scale,
        leaves_finite=flags.get("leaves_finite", true),
        grads_finite=true if grads_finite is None else grads_finite,
        parts_finite=flags.get("parts_finite", true),
        value_finite=flags.get("value_finite", true),
        largest=None if largest is None else jnp.where(jnp.isfinite(largest), largest, 0),
        allowed=flags.get("allowed", true),
        should_apply=_all(reasons_to_apply),
    )


def check_told(told: Told) -> None:
    """Raise a `ValueError` that names what is not of its kind."""
    if told.value is not None and not is_number(told.value):
        got = jax.typeof(told.value) if isinstance(told.value, jax.Array) else repr(told.value)
        raise ValueError(
            f"`update(value=...)` must be a real scalar, the true loss, got {got}. Of `(loss, aux)`, pass the loss "
            "alone."
        )
    for name in ("skip_if", "parts_finite", "grads_finite"):
        flag = getattr(told, name)
        if flag is not None:
            check_bool_scalar(flag, f"update({name}=...)")


def _look(
    scaled_grads: chex.ArrayTree, loss_scale: LossScale, told: Told
) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """What this device knows: flags, ``bool[]`` each, and the largest gradient, if the loss scale needs it."""
    flags: dict[str, jax.Array] = {}
    largest = None
    if loss_scale.checks_gradients:
        if loss_scale.needs_largest:
            flags["leaves_finite"], largest = finite_and_largest(scaled_grads, loss_scale())
        elif told.grads_finite is None:
            flags["leaves_finite"] = all_finite_unscaled(scaled_grads, loss_scale())
        if told.grads_finite is not None:
            if largest is not None:  # 0 would say that all are zero, where they are not finite
                largest = jnp.where(flags["leaves_finite"], largest, jnp.inf)
            flags["leaves_finite"] = jnp.asarray(told.grads_finite)
        if told.value is not None:
            flags["value_finite"] = all_finite(told.value)
        if told.parts_finite is not None:
            flags["parts_finite"] = jnp.asarray(told.parts_finite)
    if told.skip_if is not None:
        flags["allowed"] = ~jnp.asarray(told.skip_if)
    return flags, largest


def _all(flags: list[jax.Array]) -> jax.Array | None:
    """Their conjunction; ``None``, for true, of none."""
    result = None
    for flag in flags:
        result = flag if result is None else result & flag
    return result
