"""LoRA fine-tuning with a frozen base model stored in 16 bits, and an optimizer for the float32 adapters only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

pytestmark = pytest.mark.ci

WIDTH, RANK, NUM_STEPS = 16, 2, 150


def make_problem():
    """Return a pretrained network, and data from a network whose first layer differs by a low-rank matrix."""
    keys = jax.random.split(jax.random.key(0), 6)
    base = {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5,
        "second": jax.random.normal(keys[1], (WIDTH, 1)) / WIDTH**0.5,
    }
    change = jax.random.normal(keys[2], (WIDTH, RANK)) @ jax.random.normal(keys[3], (RANK, WIDTH)) / WIDTH
    x = jax.random.normal(keys[4], (128, WIDTH))
    batch = {"x": x, "y": jnp.tanh(x @ (base["first"] + change)) @ base["second"]}
    return base, batch, keys[5]


BASE, BATCH, KEY = make_problem()


def adapters_for(base):
    def adapter(key, kernel):
        inputs, outputs = kernel.shape
        return {"down": jax.random.normal(key, (inputs, RANK)) / inputs**0.5, "up": jnp.zeros((RANK, outputs))}

    return {name: adapter(jax.random.fold_in(KEY, len(name)), kernel) for name, kernel in base.items()}


def adapted(kernel, adapter, x):
    return x @ kernel + (x @ adapter["down"]) @ adapter["up"]


def loss_fn(adapters, base, batch):
    base = jls.cast_floating(base, jnp.float32)
    hidden = jnp.tanh(adapted(base["first"], adapters["first"], batch["x"]))
    return jnp.mean((adapted(base["second"], adapters["second"], hidden) - batch["y"]) ** 2)


def train(base, half):
    tx = jls.loss_scaled(optax.adam(1e-2), jls.loss_scale_for(half))
    adapters = adapters_for(base)
    opt_state = tx.init(adapters)

    @jax.jit
    def train_step(carry, _):
        adapters, opt_state = carry
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn, half), opt_state)(adapters, base, BATCH)
        adapters, opt_state = tx.update_and_apply(grads, opt_state, adapters, value=loss)
        return (adapters, opt_state), loss

    (adapters, opt_state), losses = jax.lax.scan(train_step, (adapters, opt_state), None, NUM_STEPS)
    return adapters, opt_state, losses


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_training_adapters_in_half_precision_without_state_for_the_base(stored, half):
    base = jls.cast_floating(BASE, stored)
    report = jls.diagnostics.autocast_report(loss_fn, adapters_for(base), base, BATCH, dtype=half)
    assert report.summary.dtype == half
    assert report.summary.half_matmuls == report.summary.matmuls == 12
    adapters, opt_state, losses = train(base, half)
    assert losses[-1] < 0.02 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    assert opt_state.applied_steps > NUM_STEPS - 10
    arrays = [leaf for leaf in jax.tree.leaves(opt_state.inner_state) if leaf.ndim > 0]
    moments = 2 * jax.tree.leaves(jax.tree.map(jnp.shape, adapters), is_leaf=lambda node: isinstance(node, tuple))
    assert sorted(leaf.shape for leaf in arrays) == sorted(moments)


def test_gradients_are_bitwise_equal_for_a_base_stored_in_float16():
    """`autocast` rounds a float32 base model to the same 16-bit values."""
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters_for(BASE))
    grads = jax.jit(jls.value_and_scaled_grad(jls.autocast(loss_fn), 2.0**10))
    expected = grads(adapters, BASE, BATCH)
    jax.tree.map(np.testing.assert_array_equal, grads(adapters, jls.cast_floating(BASE, jnp.float16), BATCH), expected)
