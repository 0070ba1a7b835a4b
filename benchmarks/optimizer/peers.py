"""The optimizer step (Adam, float32 parameters) without loss scaling, with this library, and with other libraries.

Each step is written as in the documentation of its library.
"""

# ruff: noqa: D102  (`Contender` documents the methods)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import optax

import jax_lossscale as jls

ADAM = optax.adam(1e-4)
# The scale is small, so that the gradients of `models` are in the range of float16 both with and without it. Subnormal
# numbers make a CPU slow, and skipped steps make it fast, and neither effect should be measured.
LOSS_SCALE = 2.0**8

# To add another kind of loss scale to all benchmarks, add it here (see `OTHER_KINDS`).
_LOSS_SCALES: dict[str, Callable[[], jls.LossScale]] = {
    "dynamic": lambda: jls.DynamicLossScale(LOSS_SCALE),
    "auto": lambda: jls.AutoLossScale(LOSS_SCALE),
}

Tree: TypeAlias = Any
State: TypeAlias = tuple[Tree, Any]  # the parameters and all other values
Loss: TypeAlias = Callable[[Tree, Any], jax.Array]  # maps parameters and a batch to a loss, float32[]


@dataclass(frozen=True)
class Contender:
    """An implementation of an optimizer step.

    The state is a pair of the parameters and all other values that must be passed to the next step.
    """

    name: str
    optimizer: optax.GradientTransformation = ADAM

    def init(self, params: Tree) -> State:
        """Return the initial state."""
        return params, self.optimizer.init(params)

    def apply(self, state: State, grads: Tree) -> State:
        """Perform one step with given gradients.

        The gradients are in float32 or float16, and are considered to be the gradients of the scaled loss.
        """
        raise NotImplementedError

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        """Perform one step with the gradients of ``loss``, and return the new state and the loss."""
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        return self.apply(state, grads), value


class Bare(Contender):
    """The step without loss scaling. The gradients are converted to float32."""

    def apply(self, state: State, grads: Tree) -> State:
        updates, opt_state = self.optimizer.update(_to_float32(grads), state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state


@dataclass(frozen=True)
class Ours(Contender):
    """The step with `jax_lossscale`, in one call, or in the two calls of the optax protocol."""

    name: str = dataclasses.field(init=False, default="")
    fused: bool = True
    skip: Literal["auto", "cond", "select"] = "auto"
    loss_scale: str = "dynamic"  # a key of `_LOSS_SCALES`

    def __post_init__(self) -> None:
        call = "update_and_apply" if self.fused else "update + apply_updates"
        options = "" if self.skip == "auto" else f", skip={self.skip!r}"
        kind = "" if self.loss_scale == "dynamic" else f", {self.loss_scale!r}"
        object.__setattr__(self, "name", f"ours, {call}{options}{kind}")

    @property
    def _transformation(self) -> jls.LossScaledTransformation:
        return jls.loss_scaled(self.optimizer, _LOSS_SCALES[self.loss_scale](), skip=self.skip)

    def init(self, params: Tree) -> State:
        return params, self._transformation.init(params)

    def apply(self, state: State, grads: Tree) -> State:
        return self._apply(state, grads)

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        value, grads = jls.value_and_scaled_grad(loss, state[1])(state[0], batch)
        return self._apply(state, grads, value=value), value

    def _apply(self, state: State, grads: Tree, **extra_args: Any) -> State:
        params, opt_state = state
        if self.fused:
            return self._transformation.update_and_apply(grads, opt_state, params, **extra_args)
        updates, opt_state = self._transformation.update(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state


@dataclass(frozen=True)
class Handwritten(Contender):
    """A short handwritten step with loss scaling: one check of all gradients, one branch and one factor.

    The check concatenates all gradients, which is fast to compile but not to run. If ``fused`` is false, the branch
    returns the updates, as required by the optax protocol.
    """

    fused: bool = True

    def init(self, params: Tree) -> State:
        return params, (ADAM.init(params), jnp.float32(LOSS_SCALE), jnp.int32(0))

    def apply(self, state: State, grads: Tree) -> State:
        params, (adam_state, scale, counter) = state
        is_finite = jnp.isfinite(jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])).all()

        def run() -> State:
            factor = 1 / scale
            updates, new_state = ADAM.update(jax.tree.map(lambda g: g * factor, _to_float32(grads)), adam_state, params)
            return optax.apply_updates(params, updates) if self.fused else updates, new_state

        def leave() -> State:
            return params if self.fused else optax.tree.zeros_like(params), adam_state

        result, adam_state = jax.lax.cond(is_finite, run, leave)
        params = result if self.fused else optax.apply_updates(params, result)
        grows = is_finite & (counter == 1999)
        scale = jnp.where(is_finite, jnp.where(grows, 2 * scale, scale), scale / 2)
        return params, (adam_state, scale, jnp.where(is_finite & ~grows, counter + 1, 0))

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        scale = state[1][1]
        scaled, grads = jax.value_and_grad(lambda p: scale * loss(p, batch))(state[0])
        return self.apply(state, grads), scaled / scale


class Jmp(Contender):
    """The step with ``jmp.DynamicLossScale``: unscale, check, adjust, update, select.

    ``unscale`` converts float16 gradients to float32. The state contains the two arrays of the loss scale, because the
    class itself cannot be passed through ``jax.jit(...).lower``.
    """

    def init(self, params: Tree) -> State:
        return params, (ADAM.init(params), (jnp.float32(LOSS_SCALE), jnp.int32(0)))

    def apply(self, state: State, grads: Tree) -> State:
        params, (adam_state, arrays) = state
        loss_scale = jmp.DynamicLossScale(*arrays)
        grads = loss_scale.unscale(grads)
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        updates, new_adam_state = ADAM.update(grads, adam_state, params)
        new_params = optax.apply_updates(params, updates)
        params, adam_state = jmp.select_tree(grads_finite, (new_params, new_adam_state), (params, adam_state))
        return params, (adam_state, (loss_scale.loss_scale, loss_scale.counter))

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        params, (_, arrays) = state
        loss_scale = jmp.DynamicLossScale(*arrays)
        scaled, grads = jax.value_and_grad(lambda p: loss_scale.scale(loss(p, batch)))(params)
        return self.apply(state, grads), loss_scale.unscale(scaled)


class Flax(Contender):
    """The step with ``flax.training.dynamic_scale.DynamicScale``.

    As in the examples of flax, ``jnp.where`` selects between the old and the new parameters and state. The method
    ``value_and_grad`` differentiates, unscales and checks in one call. For given gradients, it differentiates the sum
    of ``<p, g>``, whose gradient is ``g`` in float32. The sum itself is not used, so it is not computed and costs
    nothing.
    """

    def init(self, params: Tree) -> State:
        dynamic_scale = flax.training.dynamic_scale.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(LOSS_SCALE))
        return params, (ADAM.init(params), dynamic_scale)

    def apply(self, state: State, grads: Tree) -> State:
        def linear(params: Tree, grads: Tree) -> jax.Array:
            return sum(jax.tree.leaves(jax.tree.map(lambda p, g: (p * g).sum(), params, grads)), jnp.float32(0))

        return self.train(linear, state, grads)[0]

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        params, (adam_state, dynamic_scale) = state
        result = dynamic_scale.value_and_grad(loss)(params, batch)
        updates, new_adam_state = ADAM.update(result.grad, adam_state, params)
        new_params = optax.apply_updates(params, updates)
        params, adam_state = jax.tree.map(
            lambda new, old: jnp.where(result.finite, new, old), (new_params, new_adam_state), (params, adam_state)
        )
        return (params, (adam_state, result.dynamic_scale)), result.aux


class ApplyIfFinite(Contender):
    """The step with ``optax.apply_if_finite`` around Adam, and a constant loss scale that is applied manually."""

    @property
    def _transformation(self) -> optax.GradientTransformation:
        return optax.apply_if_finite(ADAM, max_consecutive_errors=10)

    def init(self, params: Tree) -> State:
        return params, self._transformation.init(params)

    def apply(self, state: State, grads: Tree) -> State:
        params, opt_state = state
        grads = jax.tree.map(lambda g: g / LOSS_SCALE, _to_float32(grads))
        updates, opt_state = self._transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(self, loss: Loss, state: State, batch: Any) -> tuple[State, jax.Array]:
        scaled, grads = jax.value_and_grad(lambda p: LOSS_SCALE * loss(p, batch))(state[0])
        return self.apply(state, grads), scaled / LOSS_SCALE


BARE = Bare("bare")
HANDWRITTEN = Handwritten("handwritten")
HANDWRITTEN_IN_TWO_CALLS = Handwritten("handwritten, update + apply_updates", fused=False)
OURS = Ours()
OURS_IN_TWO_CALLS = Ours(fused=False)
OTHER_KINDS: tuple[Contender, ...] = tuple(Ours(loss_scale=kind) for kind in _LOSS_SCALES if kind != "dynamic")
JMP, FLAX, APPLY_IF_FINITE = PEERS = (Jmp("jmp"), Flax("flax"), ApplyIfFinite("apply_if_finite"))


def _to_float32(grads: Tree) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)
