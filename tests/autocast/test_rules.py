"""Rules by the text of a line, and the loss scale that a policy names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_programs import W, X

import jax_lossscale as jls


def inner(w, x):
    return jnp.tanh(x @ w)


def loss(w, x):
    y = inner(w, x)
    z = jax.jit(inner)(w, y)  # the second call
    return jnp.sum(z @ w.T)


def wide_products(code):
    policy = jls.PrecisionPolicy([jls.PrecisionRule("wide", operation="dot_general", code=code)])
    jaxpr = str(jax.make_jaxpr(jls.autocast(loss, policy=policy))(W, X))
    return sum("dot_general" in line and ":f32" in line.split("=")[0] for line in jaxpr.splitlines())


@pytest.mark.parametrize(
    ("code", "number"),
    [("x @ w", 2), ("y = inner(w, x)", 1), ("# the second call", 1), ("return jnp.sum(z @ w.T)", 1), ("@", 3)],
)
def test_code_is_a_part_of_the_line_or_of_one_that_called_it(code, number):
    assert wide_products(code) == number


def test_code_is_no_pattern_and_may_be_left_out():
    with pytest.warns(UserWarning, match="no operation matches"):
        assert wide_products("return * w") == 0
    assert "code" not in jls.PrecisionRule("wide").get_config()
    assert jls.PrecisionRule("wide", code="x @ w").get_config() == {"precision": "wide", "code": "x @ w"}


def test_the_loss_scale_is_shown_and_kept_and_changes_nothing():
    policy = jls.PrecisionPolicy(loss_scale=2**15)
    assert policy == jls.PrecisionPolicy()
    assert policy.get_config() == {"rules": [], "recompute": True, "loss_scale": 32768.0}
    assert jls.PrecisionPolicy.from_config(policy.get_config()).loss_scale == 32768.0
    assert "loss_scale" not in jls.PrecisionPolicy().get_config()
    assert str(policy).endswith("Found to be right at a loss scale of 2^15.")
    for scale, is_below in (0.5, True), (1.0, False):
        assert ("below 1" in str(jls.PrecisionPolicy(loss_scale=scale))) == is_below


def test_numbers_of_numpy_become_those_of_python():
    config = jls.PrecisionPolicy(recompute=np.False_, loss_scale=np.float32(8)).get_config()
    assert json.loads(json.dumps(config)) == {"rules": [], "recompute": False, "loss_scale": 8.0}


@pytest.mark.parametrize(
    ("scale", "must_be"),
    [
        (0, "a positive normal float32"),
        (-1.0, "a positive normal float32"),
        (float("inf"), "finite"),
        (float("nan"), "finite"),
        ("2", "a number"),
    ],
)
def test_a_loss_scale_that_is_none(scale, must_be):
    with pytest.raises(ValueError, match=rf"`PrecisionPolicy\(loss_scale=...\)` must be {must_be}.*got {scale!r}"):
        jls.PrecisionPolicy(loss_scale=scale)
