"""Reports find no faults in 35 sound networks, each of which consists of a body and a loss."""

import jax
import jax.numpy as jnp
import optax
import pytest
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, range_report

pytestmark = pytest.mark.ci

X = draw(16, 8, seed=1)
LABELS = jnp.arange(16) % 4
TARGETS = draw(16, 4, seed=2)
PARAMS = {
    "in": draw(8, 16, seed=3, scale=0.35),
    "mix": draw(16, 16, seed=4, scale=0.25),
    "gate": draw(16, 16, seed=5, scale=0.25),
    "out": draw(16, 4, seed=6, scale=0.25),
    "filter": draw(3, 1, 4, seed=7, scale=0.5),
    "bias": jnp.zeros((1, 16)),
}


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def perceptron(p, x):
    return jax.nn.relu(jax.nn.relu(x @ p["in"] + p["bias"]) @ p["mix"]) @ p["out"]


def residual(p, x):
    y = x @ p["in"]
    for name in ("mix", "gate"):
        y = y + jax.nn.gelu(norm(y) @ p[name])
    return y @ p["out"]


def attention(p, x):
    y = norm(x @ p["in"]).reshape(4, 4, 16)
    query, key = y @ p["mix"], y @ p["gate"]
    return (jax.nn.softmax(query @ key.swapaxes(1, 2) / 4) @ y).reshape(16, 16) @ p["out"]


def convolution(p, x):
    y = jax.lax.conv_general_dilated(x[..., None], p["filter"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    return jax.nn.silu(y).reshape(16, 16) @ p["out"]


def recurrent(p, x):
    def step(state, row):
        gate = jax.nn.sigmoid(state @ p["gate"])
        return gate * state + (1 - gate) * jnp.tanh(row @ p["in"] + state @ p["mix"]), None

    return jax.lax.scan(step, jnp.zeros((2, 16)), x.reshape(8, 2, 8))[0].repeat(8, axis=0) @ p["out"]


def mixture(p, x):
    y = x @ p["in"]
    share = jax.nn.softmax(y[:, :2])
    return (share[:, :1] * jnp.tanh(y @ p["mix"]) + share[:, 1:] * jnp.sin(y @ p["gate"])) @ p["out"]


def checkpointed(p, x):
    return jax.checkpoint(lambda y: jnp.tanh(y @ p["mix"]) * jax.nn.softplus(y @ p["gate"]))(x @ p["in"]) @ p["out"]


def cross_entropy(y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), LABELS[:, None], axis=1))


def contrastive(y):
    y = norm(y)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(y @ jnp.roll(y, 1, axis=0).T)))


BODIES = (perceptron, residual, attention, convolution, recurrent, mixture, checkpointed)
LOSSES = {
    "square": lambda y: jnp.mean((y - TARGETS) ** 2),
    "huber": lambda y: jnp.mean(optax.huber_loss(y, TARGETS)),
    "cross_entropy": cross_entropy,
    "contrastive": contrastive,
    "small_unit": lambda y: 1e-9 * jnp.sum((y - TARGETS) ** 2),
}


QUICK = ((checkpointed, "huber"),)


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        pytest.param(body, loss, id=f"{body.__name__}-{loss}", marks=() if (body, loss) in QUICK else pytest.mark.slow)
        for body in BODIES
        for loss in LOSSES
    ],
)
def test_no_faults_are_reported_in_sound_networks(body, loss):
    def fun(params, x):
        return LOSSES[loss](body(params, x))

    report = compare_gradients(jls.autocast(fun), PARAMS, X)
    assert report.will_train
    assert report.inaccurate_leaves == ()
    assert "However" not in report.verdict
    assert range_report(jls.autocast(fun), PARAMS, X, loss_scale=report.loss_scale).bad == ()
