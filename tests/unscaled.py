"""Runs of `AutoLossScale` on recorded gradient magnitudes, with correctly scaled or with unscaled gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import jax_lossscale as jls


@partial(jax.jit, static_argnums=2)
def states(log2_largest, log2_first, is_scaled=True, loss_scale=None):
    """Return the optimizer states after each step, batched with shape ``[steps, traces]``.

    Args:
      log2_largest: ``[steps, traces]``, log2 of the largest unscaled gradient, or -inf if all gradients are zero.
      log2_first: ``[steps, traces]``, log2 of the value that overflows first, or +inf if it is always infinite.
      is_scaled: whether the gradients are scaled. Unscaled gradients overflow only if ``log2_first`` is +inf.
      loss_scale: the initial loss scale.
    """
    tx = jls.loss_scaled(optax.identity(), jls.AutoLossScale() if loss_scale is None else loss_scale)
    # A separate gradient overflows first. Its value is zero otherwise, so it never determines the largest magnitude.
    params = {"largest": jnp.float32(0), "first": jnp.float32(0)}

    def step(state, true):
        largest, first = true
        log2_scale = jnp.log2(state.loss_scale()) if is_scaled else 0.0
        overflows = jnp.where(is_scaled, first + log2_scale >= 16, first == jnp.inf)
        scaled = jnp.exp2(largest + log2_scale)
        if is_scaled:
            scaled = scaled.astype(jnp.float16).astype(jnp.float32)
        grads = {"largest": scaled, "first": jnp.where(overflows, jnp.inf, 0.0)}
        state = tx.update_and_apply(grads, state, params)[1]
        return state, state

    def run(log2_largest, log2_first):
        return jax.lax.scan(step, tx.init(params), (log2_largest, log2_first))[1]

    return jax.vmap(run, in_axes=1, out_axes=1)(jnp.float32(log2_largest), jnp.float32(log2_first))
