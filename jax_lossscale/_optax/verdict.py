"""Whether a step is applied, and whether the loss scale reacts to it: the table in `loss_scaled`, as code."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import check_bool_scalar, is_number
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.base import adjust
from jax_lossscale._measure import AxisName, agree, finite_and_largest


class Told(NamedTuple):
    """What the caller tells `update` of a step beside its gradients; ``None`` where nothing is told."""

    value: ArrayLike | None = None
    skip_if: ArrayLike | None = None
    grads_finite: ArrayLike | None = None


class Verdict(NamedTuple):
    """What is known and decided of a step before it is taken, agreed over devices; ``None``: not asked."""

    should_apply: jax.Array | None  # bool[]; None: yes, known without looking
    grads_finite: jax.Array | None  # bool[]
    value_finite: jax.Array | None  # bool[]
    allowed: jax.Array | None  # bool[]: not forbidden by the user's condition
    largest: jax.Array | None  # float32[], of the unscaled gradients; NaN where they are not finite
    loss_scale: LossScale  # the next one


_Flags = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # grads_finite, value_finite, allowed


def decide(scaled_grads: chex.ArrayTree, loss_scale: LossScale, told: Told, axis_name: AxisName) -> Verdict:
    """Decide by the table in `loss_scaled`. Devices agree on everything at once, in one all-reduce."""
    grads_finite = value_finite = largest = None
    allowed = None if told.skip_if is None else ~jnp.asarray(told.skip_if)
    if loss_scale.checks_gradients:
        grads_finite, largest = _look(scaled_grads, loss_scale, told)
        if told.value is not None and _tree.is_inexact(told.value):
            value_finite = jnp.isfinite(told.value)
    flags, largest = _agreed((grads_finite, value_finite, allowed), largest, axis_name)
    grads_finite, value_finite, allowed = flags
    if grads_finite is not None and largest is not None:
        # Another device, or the caller, may know of what is not finite: then it is not the largest of all gradients.
        largest = jnp.where(grads_finite, largest, jnp.nan)
    must_be_finite = grads_finite if loss_scale.skip_nonfinite else None
    if grads_finite is not None:
        adjusted = adjust(loss_scale, grads_finite, largest)
        # To an overflow the scale reacts also where the user's condition is true.
        reacts = _all(value_finite, None if allowed is None else allowed | ~grads_finite)
        loss_scale = adjusted if reacts is None else _tree.select_tree(reacts, adjusted, loss_scale)
    return Verdict(_all(must_be_finite, value_finite, allowed), *flags, largest, loss_scale)


def check_told(told: Told, method: str) -> None:
    """Raise a `ValueError` that names what is not of its kind."""
    if told.value is not None and not is_number(told.value):
        got = jax.typeof(told.value) if isinstance(told.value, jax.Array) else repr(told.value)
        raise ValueError(
            f"`{method}(value=...)` must be a real scalar, the true loss, got {got}. Of `(loss, aux)`, pass the loss "
            "alone."
        )
    for name, flag in (("skip_if", told.skip_if), ("grads_finite", told.grads_finite)):
        if flag is not None:
            check_bool_scalar(flag, f"{method}({name}=...)")


def _look(scaled_grads: chex.ArrayTree, loss_scale: LossScale, told: Told) -> tuple[jax.Array, jax.Array | None]:
    """Find out whether the gradients on this device are finite, and the largest if the loss scale needs it."""
    if told.grads_finite is not None and not loss_scale.needs_largest:
        return jnp.asarray(told.grads_finite), None
    grads_finite, largest = finite_and_largest(scaled_grads, loss_scale())
    grads_finite = grads_finite if told.grads_finite is None else jnp.asarray(told.grads_finite)
    return grads_finite, largest if loss_scale.needs_largest else None


def _agreed(flags: _Flags, largest: jax.Array | None, axis_name: AxisName) -> tuple[_Flags, jax.Array | None]:
    """Return what all devices know together."""
    known, structure = jax.tree.flatten(flags)
    if not known or not axis_name:
        return flags, largest
    agreed, largest = agree(known, largest, axis_name)
    return jax.tree.unflatten(structure, agreed), largest


def _all(*flags: jax.Array | None) -> jax.Array | None:
    """Whether all known flags are true; ``None``, which stands for true, if none is known."""
    result = None
    for flag in flags:
        if flag is not None:
            result = flag if result is None else result & flag
    return result
