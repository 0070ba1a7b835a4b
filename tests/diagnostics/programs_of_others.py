"""Small versions of typical user programs. Each function returns a loss, a model and a batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from workloads import draw

KEY = jax.random.key(0)


def bert():
    """Return attention layers with padded rows. The mask is filled with a Python float."""

    def loss(params, batch):
        x, is_real = batch
        keep = jnp.where(is_real, jnp.full(is_real.shape, 0.0), jnp.finfo(x.dtype).min)
        for layer in params:
            query, key, value = (x @ layer[name] for name in ("q", "k", "v"))
            scores = query @ key.swapaxes(-1, -2) / 8**0.5 + keep[:, None]
            x = x + jax.nn.gelu(jax.nn.softmax(scores) @ value @ layer["out"])
        return jnp.mean(jnp.where(is_real[..., None], x, 0.0) ** 2)

    params = [
        {name: draw(8, 8, seed=4 * n + m, scale=0.3) for m, name in enumerate(("q", "k", "v", "out"))} for n in (0, 1)
    ]
    return loss, params, (draw(4, 6, 8, seed=9), jnp.arange(6)[None] < jnp.array([[6], [4], [2], [1]]))


class ViT(eqx.Module):
    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(4, 8, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.norm = eqx.nn.LayerNorm(8)
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, patches, key):
        x = jax.vmap(self.embed)(patches)
        x = x + self.dropout(self.attention(*[jax.vmap(self.norm)(x)] * 3), key=key)
        return self.head(jnp.mean(x, axis=0))


def vit():
    def loss(model, batch):
        x, labels, key = batch
        logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

    return loss, ViT(KEY), (draw(6, 5, 4, seed=1), jnp.arange(6) % 3, KEY)


def gaussian_process():
    """Return a Gaussian process: a Gram matrix of squared distances, its Cholesky factor, and a debug print."""

    def loss(params, batch):
        x, y = batch
        x = x * jnp.exp(params["log_scale"])
        squares = jnp.sum(x * x, -1)
        distances = squares[:, None] + squares[None] - 2 * x @ x.T
        gram = jnp.exp(-0.5 * distances) + 0.1 * jnp.eye(len(x))
        jax.debug.print("trace {}", jnp.trace(gram))
        factor = jnp.linalg.cholesky(gram)
        whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * jnp.sum(whitened**2) + jnp.sum(jnp.log(jnp.diag(factor)))

    x = draw(12, 3, seed=6)
    return loss, {"log_scale": jnp.float32(-0.5)}, (x, jnp.sin(x[:, 0]))


def s5():
    """Return a state-space model with complex states, computed by an associative scan."""

    def loss(params, x):
        poles = jnp.exp(-jnp.exp(params["decay"]) + 1j * params["frequency"])
        driven = x.astype(jnp.complex64) @ params["b"]

        def combined(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = jax.lax.associative_scan(combined, (jnp.broadcast_to(poles, driven.shape), driven))
        return jnp.mean(((states @ params["c"]).real - 1) ** 2)

    params = {
        "decay": draw(4, seed=1, scale=0.1),
        "frequency": draw(4, seed=2),
        "b": draw(3, 4, seed=3) + 1j * draw(3, 4, seed=4),
        "c": draw(4, 2, seed=5) + 1j * draw(4, 2, seed=6),
    }
    return loss, params, draw(8, 3, seed=7)


def gnn():
    """Return a graph network that sums the messages of each receiver by `segment_sum`."""

    def loss(params, batch):
        nodes, senders, receivers = batch
        for layer in params:
            messages = jax.nn.relu(nodes[senders] @ layer["message"])
            received = jax.ops.segment_sum(messages, receivers, len(nodes))
            nodes = jnp.tanh(nodes @ layer["self"] + received)
        return jnp.mean(nodes**2)

    params = [
        {name: draw(6, 6, seed=2 * n + m, scale=0.4) for m, name in enumerate(("message", "self"))} for n in (0, 1)
    ]
    return loss, params, (draw(5, 6, seed=9), jnp.array([0, 1, 2, 3, 4, 0]), jnp.array([1, 2, 3, 4, 0, 2]))


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def nnx_classifier():
    def loss(model, batch):
        x, y = batch
        return jnp.mean((model(x) - y) ** 2)

    return loss, Classifier(nnx.Rngs(0)), (draw(16, 8, seed=1), draw(16, 2, seed=2))


def mutable():
    """Return a loss that writes and reads a mutable array."""

    def loss(params, x):
        total = jax.new_ref(jnp.zeros((4, 8)))
        total[...] += x @ params["kernel"]
        return jnp.mean(total[...] ** 2)

    return loss, {"kernel": draw(8, 8, seed=1, scale=0.3)}, draw(4, 8, seed=2)


PROGRAMS = {
    each.__name__: each
    for each in (bert, vit, gaussian_process, s5, gnn, nnx_classifier, mutable)
    if each is not mutable or hasattr(jax, "new_ref")
}
