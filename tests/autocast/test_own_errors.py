"""Errors in user code change the plan of `autocast`, but errors in the code of `autocast` itself are raised."""

import jax
import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from jax_lossscale._autocast import by_result, min_cut
from jax_lossscale._program import custom_rules

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


class OwnError(Exception):
    pass


def fail(*_, **__):
    raise OwnError


@jax.custom_jvp
def larger(x):
    return jnp.maximum(x, 0)


@larger.defjvp
def _(primals, tangents):
    raise NotImplementedError("by the user")


def loss(w, x):
    return jnp.sum(jax.nn.relu(x @ w) @ w)


def test_error_in_a_user_rule_is_raised_only_by_the_derivative():
    def with_rule(w, x):
        return jnp.sum(larger(x @ w) @ w)

    assert jls.autocast(with_rule)(W, X) == with_rule(W, X)
    with pytest.raises(NotImplementedError, match="by the user"):
        jax.grad(jls.autocast(with_rule))(W, X)


def test_an_error_in_the_derivative_of_a_custom_rule_is_raised(monkeypatch):
    monkeypatch.setattr(custom_rules, "_recorder_of_zero_tangents", lambda are_zeros: fail)
    with pytest.raises(OwnError):
        jls.autocast(loss)(W, X)


def test_an_error_in_the_search_for_the_operands_of_a_derivative_is_raised(monkeypatch):
    eqn = jax.make_jaxpr(jnp.exp)(X).eqns[0]
    monkeypatch.setattr(min_cut.jax, "vjp", fail)
    with pytest.raises(OwnError):
        min_cut.OperandsNeeded()(eqn)


def test_an_error_in_the_search_for_relus_is_raised(monkeypatch):
    (eqn,) = (eqn for eqn in jax.make_jaxpr(jax.nn.relu)(X).eqns if eqn.primitive.name == "custom_jvp_call")
    assert by_result._is_relu(eqn)
    monkeypatch.setattr(by_result.jax.nn, "relu", fail)
    with pytest.raises(OwnError):
        by_result._is_relu(eqn)
