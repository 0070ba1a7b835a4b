"""Comparison with float32 of the libraries in the tables of `docs/guide/trainers.md`.

The test of a library that is not installed is skipped. To run all tests, install the libraries: ``pip install brax
diffrax e3nn-jax evosax "haliax>=1.4.dev453" lineax mctx optimistix penzai qwix``.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float32_programs import distance_of_all

import jax_lossscale as jls

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]  # Other libraries cause warnings.

X = jax.random.normal(jax.random.key(0), (32, 8))
Y = jnp.sin(jnp.sum(X, axis=1, keepdims=True))
WEIGHTS = {
    name: jax.random.normal(jax.random.key(number), shape) / 3
    for number, (name, shape) in enumerate({"first": (8, 16), "square": (16, 16), "last": (16, 1)}.items())
}


@pytest.fixture(autouse=True)
def as_others_write():
    """Allow rank promotion, which other libraries use."""
    with jax.numpy_rank_promotion("allow"):
        yield


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def mlp(params, x):
    return jnp.tanh(jnp.tanh(x @ params["first"]) @ params["square"]) @ params["last"]


def loss_fn(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def trained(loss_fn, params, *batch, is_half=True, steps=20):
    """Train with `autocast`. The first gradients must be close to those of float32, and the loss must fall."""
    tx = jls.loss_scaled(optax.adam(1e-2))

    @jax.jit
    def step(params, state):
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn), state)(params, *batch)
        params, state = tx.update_and_apply(grads, state, params, value=loss)
        return params, state, loss, grads

    state, losses = tx.init(params), []
    found = state.loss_scale.unscale(step(params, state)[3])
    assert distance_of_all(found, jax.jit(jax.grad(loss_fn))(params, *batch)) < 2e-2
    for _ in range(steps):
        params, state, loss, _ = step(params, state)
        losses.append(loss)
    assert losses[-1] < 0.9 * losses[0]
    assert state.skipped_steps == 0
    assert jls.metrics(state)["applied_steps"] == steps
    assert "applied" in str(jls.diagnostics.explain(state, params))
    counts = str(jls.diagnostics.autocast_report(loss_fn, params, *batch).summary)
    assert not is_half or " 0 of " not in counts.splitlines()[0]


def test_brax_update_with_scaled_backward():
    gradients = library("brax.training.gradients")

    def with_aux(params, x, y):
        loss = 1e-7 * loss_fn(params, x, y)  # The loss is so small that its gradients underflow in float16.
        return loss, {"loss": loss}

    def updated(fun, optimizer):
        update = gradients.gradient_update_fn(fun, optimizer, pmap_axis_name=None, has_aux=True)
        (loss, aux), params, _ = jax.jit(update)(WEIGHTS, X, Y, optimizer_state=optimizer.init(WEIGHTS))
        assert loss == aux["loss"]
        return jax.tree.map(jnp.subtract, params, WEIGHTS)

    sgd, half = optax.sgd(1e7), jls.autocast(with_aux)
    skipping = jls.loss_scaled(sgd, jls.FixedLossScale(1.0, skip_nonfinite=True))
    expected = updated(with_aux, sgd)
    assert distance_of_all(updated(half, sgd), expected) > 0.1
    assert distance_of_all(updated(jls.scaled_backward(half, 2.0**16), skipping), expected) < 1e-2
    nothing = updated(jls.scaled_backward(half, 2.0**120), skipping)
    assert not any(leaf.any() for leaf in jax.tree.leaves(nothing))


def test_haliax_training():
    hax, eqx = library("haliax"), library("equinox")
    batch, features, out = hax.Axis("batch", 32), hax.Axis("features", 8), hax.Axis("out", 1)
    model = hax.nn.MLP.init(features, out, 16, 2, activation=hax.tanh, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, x, y):
        x, y = hax.named(x, (batch, features)), hax.named(y, (batch, out))
        return hax.mean(hax.square(eqx.combine(params, rest)(x) - y)).scalar()

    trained(loss_fn, params, X, Y)


def test_penzai_training():
    library("penzai")
    from penzai import pz
    from penzai.models import simple_mlp

    mlp = simple_mlp.MLP.from_config(jax.random.key(0), [8, 16, 16, 1], activation_fn=jnp.tanh)
    model, params = pz.unbind_params(mlp, freeze=True)

    def loss_fn(params, x, y):
        named = pz.nx.wrap(x).tag("batch", "features")
        found = pz.bind_variables(model, params)(named).unwrap("batch", "features")
        return jnp.mean((found - y) ** 2)

    trained(loss_fn, params, X, Y)


def test_mctx_training():
    mctx = library("mctx")
    params = {**WEIGHTS, "policy": WEIGHTS["square"][:, :4]}

    def evaluated(params, state):
        hidden = jnp.tanh(state @ params["first"])
        return mctx.RootFnOutput(
            prior_logits=hidden @ params["policy"], value=mlp(params, state)[:, 0], embedding=state
        )

    def recurrent(params, key, action, state):
        state = jnp.tanh(state + 0.1 * action[:, None])
        root = evaluated(params, state)
        policy_and_value = {"prior_logits": root.prior_logits, "value": root.value}
        reward, discount = jnp.mean(state, axis=1), jnp.full(len(state), 0.9)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, **policy_and_value), state

    def loss_fn(params, x, y):
        root = evaluated(params, x)
        searched = mctx.gumbel_muzero_policy(params, jax.random.key(0), root, recurrent, num_simulations=8)
        target = jax.lax.stop_gradient(searched.action_weights)
        policy = optax.softmax_cross_entropy(root.prior_logits, target)
        return jnp.mean(policy + (root.value - y[:, 0]) ** 2)

    trained(loss_fn, params, X, Y)


def test_e3nn_training():
    e3nn, nn = library("e3nn_jax"), library("flax.linen")
    from e3nn_jax.flax import Linear

    class Network(nn.Module):
        @nn.compact
        def __call__(self, vectors):
            x = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=False)
            x = Linear("16x0e + 16x1o + 16x2e")(x)
            return Linear("0e")(e3nn.tensor_product(x, x)).array

    network, vectors = Network(), e3nn.IrrepsArray("1o", X[:, :3])
    params = network.init(jax.random.key(0), vectors)

    def loss_fn(params, vectors, y):
        return jnp.mean((network.apply(params, vectors) - y) ** 2)

    trained(loss_fn, params, vectors, jnp.sum(X[:, :3] ** 2, axis=1, keepdims=True))


def test_qwix_training():
    qwix, nn = library("qwix"), library("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jnp.tanh(nn.Dense(16)(jnp.tanh(nn.Dense(16)(x)))))

    rule = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    network = qwix.quantize_model(Network(), qwix.QtProvider([rule]))
    params = network.init(jax.random.key(0), X)

    def loss_fn(params, x, y):
        return jnp.mean((network.apply(params, x) - y) ** 2)

    trained(loss_fn, params, X, Y, is_half=False)  # The matmuls are in int8.


def test_evosax_evolution_in_float16():
    """Evolution needs no gradients and no loss scale. Only the networks of a population use half precision."""
    library("evosax")
    from evosax.algorithms import Open_ES

    strategy = Open_ES(32, WEIGHTS, optimizer=optax.adam(0.03), std_schedule=optax.constant_schedule(0.05))
    fitness = {"float32": loss_fn, "float16": jls.autocast(loss_fn)}

    def evolved(fun):
        params = strategy.default_params
        state = strategy.init(jax.random.key(0), WEIGHTS, params)

        def generation(state, key):
            population, state = strategy.ask(key, state, params)
            losses = jax.vmap(fun, (0, None, None))(population, X, Y)
            return strategy.tell(key, population, losses, state, params)[0], jnp.mean(losses)

        return jax.jit(partial(jax.lax.scan, generation))(state, jax.random.split(jax.random.key(1), 40))[1]

    half, full = evolved(fitness["float16"]), evolved(fitness["float32"])
    assert half[-1] < 0.9 * half[0]
    np.testing.assert_allclose(half[0], full[0], rtol=1e-2)
    np.testing.assert_allclose(half[-1], full[-1], rtol=0.1)


SOLVER = """
import diffrax, jax, jax.numpy as jnp, lineax, optax, optimistix
import jax_lossscale as jls

def by_lineax(w, x):
    operator = lineax.MatrixLinearOperator(w.T @ w + jnp.eye(8))
    return jnp.mean(lineax.linear_solve(operator, jnp.tanh(x @ w).sum(0)).value ** 2)

def by_optimistix(w, x):
    solver, target = optimistix.Newton(1e-5, 1e-5), jnp.tanh(x @ w).mean(0)
    found = optimistix.root_find(lambda y, _: y + 0.5 * jnp.tanh(y @ w) - target, solver, jnp.zeros(8))
    return jnp.mean(found.value ** 2)

def by_diffrax(w, x):
    term, steps = diffrax.ODETerm(lambda t, y, _: jnp.tanh(y @ w)), diffrax.PIDController(rtol=1e-3, atol=1e-3)
    solution = diffrax.diffeqsolve(term, diffrax.Kvaerno3(), 0.0, 1.0, 0.1, x[0], stepsize_controller=steps)
    return jnp.mean(solution.ys[-1] ** 2)

keys = jax.random.split(jax.random.key(0))
w, x = jax.random.normal(keys[0], (8, 8)) * 0.3, jax.random.normal(keys[1], (4, 8))
for loss_fn in by_lineax, by_optimistix, by_diffrax:
    for scale, applied in (2.0**8, 1), (2.0**60, 0):
        tx = jls.loss_scaled(optax.adam(1e-2), jls.DynamicLossScale(scale))
        state = tx.init(w)
        loss, grads = jax.jit(jls.value_and_scaled_grad(jls.autocast(loss_fn), state))(w, x)
        state = tx.update_and_apply(grads, state, w, value=loss)[1]
        assert (state.applied_steps, state.skipped_steps) == (applied, 1 - applied), loss_fn
        if applied:
            exact = jax.grad(loss_fn)(w, x)
            assert jnp.linalg.norm(grads / scale - exact) < 1e-2 * jnp.linalg.norm(exact), loss_fn
"""


@pytest.mark.parametrize(("on_error", "stops"), [("nan", False), ("raise", True)])
def test_loss_with_a_solver_raises_on_overflow_only_if_configured(on_error, stops):
    """The test runs in a subprocess because Equinox reads its setting when it is imported."""
    for name in "lineax", "optimistix", "diffrax":
        library(name)
    environment = {**os.environ, "EQX_ON_ERROR": on_error, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", SOLVER], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == stops, done.stderr
    assert ("EquinoxRuntimeError" in done.stderr) == stops
