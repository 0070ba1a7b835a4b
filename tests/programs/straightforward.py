"""Simple reference implementation of `loss_scaled`, which `test_transform.py` compares in a subprocess."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls

INNER = optax.adam(0.1)
LOSS_SCALE = jls.DynamicLossScale(8.0, increment_period=3)


@jax.jit
def straightforward(scaled_grads, loss_scale, inner_state, params):
    """Run one step: unscale, check, update, and select the new or the old values."""
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / loss_scale(), scaled_grads)
    finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]))
    updates, new_state = INNER.update(grads, inner_state, params)
    new = optax.apply_updates(params, updates), new_state
    params, inner_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, inner_state))
    return loss_scale.adjust(finite), inner_state, params


def compare(dtype, skip):
    """Compare five steps, the third of which is nonfinite, with one large and one small leaf."""
    tx = jls.loss_scaled(INNER, LOSS_SCALE, skip=skip)
    step = jax.jit(tx.update_and_apply)
    rng = np.random.default_rng(0)
    params = {"large": jnp.asarray(rng.normal(size=(300, 200)), jnp.float32), "small": jnp.asarray([0.5, -1.0])}
    state = tx.init(params)
    expected = state.loss_scale, state.inner_state, params
    for number in range(5):
        grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 100, dtype), params)
        if number == 2:
            grads["large"] = grads["large"].at[299, 199].set(-jnp.inf)
        expected = straightforward(grads, *expected)
        params, state = step(grads, state, params)
        chex.assert_trees_all_equal((state.loss_scale, state.inner_state, params), expected)


if __name__ == "__main__":
    for dtype in "float32", "float16":
        for skip in "auto", "cond", "select":
            compare(dtype, skip)
            print(f"{dtype} {skip}: equal")
