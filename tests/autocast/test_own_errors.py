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


RELU = next(eqn for eqn in jax.make_jaxpr(jax.nn.relu)(X).eqns if eqn.primitive.name == "custom_jvp_call")
# Functions that `autocast` calls, and calls in which an error of these functions must be raised.
CALLED = {
    "derivative of a custom rule": (
        (custom_rules, "_recorder_of_zero_tangents", lambda are_zeros: fail),
        lambda: jls.autocast(loss)(W, X),
    ),
    "operands of a derivative": (
        (min_cut.jax, "vjp", fail),
        lambda: min_cut.operands_needed(jax.make_jaxpr(jnp.exp)(X).eqns[0], {}),
    ),
    "search for relus": ((by_result.jax.nn, "relu", fail), lambda: by_result._is_relu(RELU)),
}


@pytest.mark.parametrize(("patch", "call"), CALLED.values(), ids=CALLED)
def test_own_error_is_raised(patch, call, monkeypatch):
    call()
    monkeypatch.setattr(*patch)
    with pytest.raises(OwnError):
        call()
