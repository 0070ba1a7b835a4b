"""Differentiating through steps, some of them skipped: nothing leaks from what was discarded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

PARAMS = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.float32(0.5)}
INNERS = {
    "sgd": lambda rate: optax.sgd(rate),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate),
    "clipped": lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)),
}
BAD = {"inf": jnp.inf, "nan": jnp.nan, "none": None}


def meta_loss(rate, bad, skip, inner, apply_together):
    """The loss after four steps, of which one has a bad gradient and one a bad loss, by the learning rate."""
    tx = jls.loss_scaled(INNERS[inner](rate), 8.0 if bad == "none" else "dynamic", skip=skip)
    params, state = PARAMS, tx.init(PARAMS)
    for step in range(4):
        loss, grads = jls.value_and_scaled_grad(lambda p: jnp.sum(p["kernel"] ** 2) + (p["bias"] - rate) ** 2, state)(
            params
        )
        if step == 1 and bad != "none":
            grads = {**grads, "bias": jnp.float32(BAD[bad])}
        told = {"value": jnp.inf if step == 2 else loss}
        if apply_together:
            params, state = tx.update_and_apply(grads, state, params, **told)
        else:
            updates, state = tx.update(grads, state, params, **told)
            params = optax.apply_updates(params, updates)
    return jnp.sum(params["kernel"] ** 2) + params["bias"]


@pytest.mark.parametrize(
    ("inner", "bad", "apply_together"),
    [
        ("sgd", "inf", True),
        ("adam", "inf", True),
        pytest.param("adam", "inf", False, marks=pytest.mark.ci),
        pytest.param("clipped", "nan", True, marks=pytest.mark.ci),
        pytest.param("momentum", "none", True, marks=pytest.mark.ci),
    ],
)
def test_cond_and_select_have_the_same_derivatives(inner, bad, apply_together):
    @functools.partial(jax.jit, static_argnums=1)
    def with_derivative(rate, skip):
        return jax.value_and_grad(lambda rate: meta_loss(rate, bad, skip, inner, apply_together))(rate)

    (value, derivative), selected = (with_derivative(0.1, skip) for skip in ("cond", "select"))
    np.testing.assert_allclose((value, derivative), selected, rtol=1e-6)
    step = 1e-3
    differences = [with_derivative(0.1 + sign * step, "cond")[0] for sign in (1, -1)]
    np.testing.assert_allclose(derivative, np.subtract(*differences) / (2 * step), rtol=2e-2)


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_members_of_a_batch_that_skip_have_derivatives_too(skip):
    # Under vmap a branch on a batched verdict becomes a selection.
    derivative = jax.vmap(jax.grad(lambda rate: meta_loss(rate, "inf", skip, "adam", True)))
    assert np.isfinite(jax.jit(derivative)(jnp.array([0.1, 0.2]))).all()


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_a_diverged_loss_leaks_nothing_into_a_chain_that_uses_it(skip):
    def scale_by_value():
        def update(updates, state, params=None, *, value, **extra_args):
            return jax.tree.map(lambda leaf: leaf * jnp.sqrt(value), updates), state

        return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    def after_a_step(weight):
        tx = jls.loss_scaled(scale_by_value(), 8.0, skip=skip)
        params = {"w": weight}
        params, _ = tx.update_and_apply({"w": 8 * weight}, tx.init(params), params, value=jnp.inf)
        return params["w"]

    assert jax.jit(jax.grad(after_a_step))(2.0) == 1.0
