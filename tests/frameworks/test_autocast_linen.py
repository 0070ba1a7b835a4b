"""Float32 programs of flax linen under `autocast`: as they are written."""

import jax
import jax.numpy as jnp
import optax
import pytest

pytest.importorskip("flax")

import flax.linen as nn
from float32_programs import assert_like_float32

import jax_lossscale as jls

IMAGES = jax.random.normal(jax.random.key(1), (8, 8, 8, 3))
LABELS = jnp.arange(8) % 4


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = lambda: nn.BatchNorm(use_running_average=False)  # noqa: E731
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        shortcut = norm()(nn.Conv(16, (1, 1), (2, 2), use_bias=False)(x))
        x = nn.relu(norm()(nn.Conv(16, (3, 3), (2, 2), use_bias=False)(x)))
        return nn.Dense(4)(jnp.mean(nn.relu(x + shortcut), axis=(1, 2)))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.RNN(nn.OptimizedLSTMCell(8))(x)[:, -1])


def cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@pytest.mark.slow
def test_batch_statistics_are_float32_and_those_of_float32():
    model = ResNet()
    variables = jax.jit(model.init)(jax.random.key(2), IMAGES)

    def loss_fn(params, batch_stats, images):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = model.apply(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, LABELS), changed["batch_stats"]

    args = variables["params"], variables["batch_stats"], IMAGES
    assert_like_float32(loss_fn, *args, has_aux=True, tolerance=2e-2)
    _, changed = jax.jit(jls.autocast(loss_fn))(*args)
    _, expected = jax.jit(loss_fn)(*args)
    for leaf, other in zip(jax.tree.leaves(changed), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == jnp.float32
        assert jnp.allclose(leaf, other, atol=1e-3)


def test_an_lstm_by_scan():
    model, x = Recurrent(), jax.random.normal(jax.random.key(1), (4, 10, 3))
    params = jax.jit(model.init)(jax.random.key(2), x)
    assert_like_float32(lambda params, x: jnp.mean(jnp.square(model.apply(params, x) - 1)), params, x)
