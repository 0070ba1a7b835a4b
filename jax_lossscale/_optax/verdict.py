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
from jax_lossscale._measure import AxisName, agree, agree_on_largest, all_finite, finite_and_largest


class Reported(NamedTuple):
    """What the caller says of a step beside its gradients; ``None`` where nothing is said."""

    value: ArrayLike | None = None
    skip_if: ArrayLike | None = None
    parts_finite: ArrayLike | None = None
    leaves_finite: ArrayLike | None = None  # which `update` takes as ``grads_finite``


class Flags(NamedTuple):
    """What is known of a step, ``bool[]`` each; ``None`` where nobody asks."""

    leaves_finite: jax.Array | None = None  # the gradients that were given
    parts_finite: jax.Array | None = None  # all parts that they were made of
    value_finite: jax.Array | None = None
    allowed: jax.Array | None = None  # not forbidden by the user's condition

    @property
    def grads_finite(self) -> jax.Array | None:
        """The gradients, and all parts that they were made of."""
        return _all(self.leaves_finite, self.parts_finite)


class Verdict(NamedTuple):
    """What is decided of a step before it is taken, agreed over devices."""

    should_apply: jax.Array | None  # bool[]; None: yes, known without looking
    loss_scale: LossScale  # the next one
    flags: Flags
    largest: jax.Array | None  # float32[], of the unscaled gradients; None: not measured


def decide(scaled_grads: chex.ArrayTree, loss_scale: LossScale, reported: Reported, axis_name: AxisName) -> Verdict:
    """The table in `loss_scaled`. All flags are agreed over devices at once: one all-reduce."""
    flags, largest = _agreed(*_look(scaled_grads, loss_scale, reported), axis_name)
    must_be_finite = flags.leaves_finite if loss_scale.skip_nonfinite else None
    return Verdict(
        should_apply=_all(must_be_finite, flags.value_finite, flags.allowed),
        loss_scale=_next_loss_scale(loss_scale, flags, largest),
        flags=flags,
        largest=largest,
    )


def _next_loss_scale(loss_scale: LossScale, flags: Flags, largest: jax.Array | None) -> LossScale:
    grads_finite = flags.grads_finite
    if grads_finite is None:
        return loss_scale
    adjusted = adjust(loss_scale, grads_finite, largest)
    # To an overflow the scale reacts also where the user's condition is true.
    reacts = _all(flags.value_finite, None if flags.allowed is None else flags.allowed | ~grads_finite)
    return adjusted if reacts is None else _tree.select_tree(reacts, adjusted, loss_scale)


def check_reported(reported: Reported) -> None:
    """Raise a `ValueError` that names what is not of its kind."""
    if reported.value is not None and not is_number(reported.value):
        got = jax.typeof(reported.value) if isinstance(reported.value, jax.Array) else repr(reported.value)
        raise ValueError(
            f"`update(value=...)` must be a real scalar, the true loss, got {got}. Of `(loss, aux)`, pass the loss "
            "alone."
        )
    for name, flag in (
        ("skip_if", reported.skip_if),
        ("parts_finite", reported.parts_finite),
        ("grads_finite", reported.leaves_finite),
    ):
        if flag is not None:
            check_bool_scalar(flag, f"update({name}=...)")


def _look(scaled_grads: chex.ArrayTree, loss_scale: LossScale, reported: Reported) -> tuple[Flags, jax.Array | None]:
    """What this device knows, and the largest gradient, if the loss scale needs it."""
    allowed = None if reported.skip_if is None else ~jnp.asarray(reported.skip_if)
    if not loss_scale.checks_gradients:
        return Flags(allowed=allowed), None
    largest = None
    if loss_scale.needs_largest or reported.leaves_finite is None:
        leaves_finite, largest = finite_and_largest(scaled_grads, loss_scale())
    if reported.leaves_finite is not None:
        if largest is not None:  # 0 would say that all are zero, where they are not finite
            largest = jnp.where(leaves_finite, largest, jnp.inf)
        leaves_finite = jnp.asarray(reported.leaves_finite)
    return Flags(
        leaves_finite=leaves_finite,
        parts_finite=None if reported.parts_finite is None else jnp.asarray(reported.parts_finite),
        value_finite=None if reported.value is None else all_finite(reported.value),
        allowed=allowed,
    ), largest if loss_scale.needs_largest else None


def _agreed(flags: Flags, largest: jax.Array | None, axis_name: AxisName) -> tuple[Flags, jax.Array | None]:
    """The same, of all devices."""
    given, structure = jax.tree.flatten(flags)
    if not given:
        return flags, largest
    if largest is None:
        return jax.tree.unflatten(structure, agree(jnp.stack(given), axis_name)), None
    together, largest = agree_on_largest(jnp.stack(given), largest, axis_name)
    flags = jax.tree.unflatten(structure, together)
    # Where one device overflowed, the largest of the others is not that of the gradients.
    return flags, largest if flags.leaves_finite is None else jnp.where(flags.leaves_finite, largest, 0)


def _all(*flags: jax.Array | None) -> jax.Array | None:
    """The conjunction of those that are known; ``None``, for true, of none."""
    result = None
    for flag in flags:
        if flag is not None:
            result = flag if result is None else result & flag
    return result
