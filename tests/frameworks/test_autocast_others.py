"""Float32 programs of libraries that are not among the test extras, under `autocast`: the loss goes in, as it is."""

import jax
import jax.numpy as jnp
import pytest
from float32_programs import assert_like_float32
from reading import product_dtypes

import jax_lossscale as jls

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    """As these libraries rely on."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "BacksolveAdjoint"])
def test_a_neural_ode_in_diffrax(adjoint):
    """The vector field becomes narrow; the products of the solver are marked, and stay float32."""
    diffrax = pytest.importorskip("diffrax")

    def field(t, y, params):
        return jnp.tanh(y @ params["in"]) @ params["out"]

    def loss_fn(params, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.2, y, params, adjoint=getattr(diffrax, adjoint)()
        )
        return jnp.mean(jnp.square(solution.ys - 1))

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"in": jax.random.normal(keys[0], (2, 16)), "out": 0.1 * jax.random.normal(keys[1], (16, 2))}
    y = jax.random.normal(keys[2], (4, 2))
    assert_like_float32(loss_fn, params, y, is_narrow=False)
    found = product_dtypes(jls.autocast(loss_fn), params, y)
    assert set(found) == {"float16", "float32"}
    assert found.count("float16") % len(product_dtypes(field, 0.0, y, params)) == 0


def test_energy_and_forces_in_e3nn():
    e3nn = pytest.importorskip("e3nn_jax")
    keys = jax.random.split(jax.random.key(0), 4)
    positions = jax.random.normal(keys[0], (6, 3))
    senders, receivers = jnp.arange(12) % 6, (jnp.arange(12) // 6 + jnp.arange(12) + 1) % 6
    params = {"in": jax.random.normal(keys[1], (9, 16)) / 3, "out": jax.random.normal(keys[2], (16, 1)) / 4}

    def energy(params, positions):
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        messages = e3nn.spherical_harmonics("0e+1o+2e", vectors, True, normalization="component")
        features = e3nn.index_add(receivers, messages, out_dim=6).array
        return jnp.sum(jnp.tanh(features @ params["in"]) @ params["out"])

    def loss_fn(params, positions):
        value, forces = jax.value_and_grad(energy, 1)(params, positions)
        return jnp.square(value - 1) + jnp.mean(jnp.square(forces))

    assert_like_float32(loss_fn, params, positions, is_narrow=False, tolerance=1e-2)
    found = product_dtypes(jax.grad(jls.autocast(loss_fn)), params, positions)
    assert found.count("float16") > len(found) / 2
