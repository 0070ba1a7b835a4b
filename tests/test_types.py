"""Transformed functions keep the signatures of the user's functions, and misspelled names are reported.

`mypy` checks the types in this file, and `pytest` runs the functions.
"""

import dataclasses
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

X = jnp.eye(2)


def function(x: jax.Array, *, power: int = 1) -> jax.Array:
    return x @ x**power


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale * x @ x

    @jls.autocast
    def method(self, x: jax.Array) -> jax.Array:
        return self(x)

    @jls.autocast(dtype=jnp.bfloat16)
    def method_in_bfloat16(self, x: jax.Array) -> jax.Array:
        return self(x)


def test_autocast_keeps_the_signature() -> None:
    autocast = jls.autocast(function)
    assert_type(autocast(X, power=2), jax.Array)
    assert_type(jls.autocast(function, jnp.bfloat16)(X), jax.Array)
    assert_type(jls.autocast(function, dtype="bfloat16", policy=jls.PrecisionPolicy())(X), jax.Array)
    with pytest.raises(TypeError):
        autocast(X, power="2")  # type: ignore[arg-type]


def test_decorators_keep_the_signature() -> None:
    def squared(x: jax.Array) -> jax.Array:
        return x @ x

    for each in (
        jls.autocast()(squared),
        jls.autocast(dtype=jnp.bfloat16)(squared),
        jls.autocast(policy=jls.PrecisionPolicy(recompute=False))(squared),
        jls.autocast("bfloat16", policy=jls.PrecisionPolicy())(squared),
        jls.autocast(np.dtype("float16"))(squared),
        jls.autocast(np.float16)(squared),
    ):
        assert_type(each(X), jax.Array)
        assert each(X).dtype == jnp.float32

    # JAX declares its dtypes as `Any`, so the type of this decorator is unknown.
    assert jls.autocast(jnp.bfloat16)(function)(X).dtype == jnp.float32


def test_methods_and_callable_objects_are_accepted() -> None:
    model = Model(2.0)
    assert_type(model.method(X), jax.Array)
    assert_type(model.method_in_bfloat16(X), jax.Array)
    assert_type(jls.autocast(model)(X), jax.Array)
    assert_type(jls.autocast(model.method, jnp.bfloat16)(X), jax.Array)
    assert_type(jls.autocast(lambda x: model(x))(X), jax.Array)
    assert_type(jls.scaled_backward(model, 8.0)(X), jax.Array)


def test_other_transformations_keep_the_signature() -> None:
    assert_type(jls.scaled_backward(function, 8.0)(X, power=2), jax.Array)
    assert_type(jls.in_half(function)(X, power=2), jax.Array)
    assert_type(jls.keep_float32(function)(X, power=2), jax.Array)
    assert_type(jls.diagnostics.in_precision(function)(X, power=2), jax.Array)


def scale_of(loss_scale: jls.LossScaleOrState) -> jax.Array:
    return jls.scaled_grad(lambda x: x, loss_scale)(1.0)


def test_a_loss_scale_can_be_in_a_state_of_any_type() -> None:
    class TrainState(NamedTuple):
        opt_state: optax.OptState

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Trainer:
        opt_state: optax.OptState

    number: jls.LossScaleLike = 256.0
    state = jls.loss_scaled(optax.sgd(1.0), number).init(X)
    accepted: list[jls.LossScaleLike] = [256, np.float32(256), jnp.float32(256), "auto", jls.AutoLossScale()]
    for each in (*accepted, state, (state, 3), {"a": state}, TrainState(state), Trainer(state)):
        assert scale_of(each) == 256
    assert scale_of(None) == 1


def test_misspelled_names_are_reported() -> None:
    """`mypy` reports a comment ``type: ignore`` that is not needed."""
    mp = jls.MixedPrecision(optax.adam(1e-3))
    state: jls.LossScaledState = mp.optimizer.init({"weights": X})
    with pytest.raises(AttributeError):
        _ = state.applied_step  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = mp.optimiser  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = jls.autocasts  # type: ignore[attr-defined]
