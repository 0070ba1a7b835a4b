"""Accepted and rejected arguments of the constructors of loss scales."""

import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import F32_MAX, Dynamic, Fixed, with_rule_state

import jax_lossscale as jls

OF_BFLOAT16 = np.full(1, 8, jnp.bfloat16)[0]  # This is a NumPy scalar of dtype bfloat16.
NUMBERS = [8, 8.0, np.float32(8), np.int64(8), np.array(8.0), jnp.float32(8), jnp.int32(8), jnp.array(8.0), OF_BFLOAT16]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__}-{number!r}")
@pytest.mark.parametrize("kind", [Fixed, Dynamic, jls.AutoLossScale, jls.get])
def test_constructors_accept_python_numpy_and_jax_numbers(kind, number):
    loss_scale = kind(number)
    chex.assert_trees_all_equal(loss_scale(), jnp.float32(8))
    assert not loss_scale().weak_type
    assert json.loads(json.dumps(loss_scale.get_config())) == loss_scale.get_config()


@pytest.mark.parametrize("kind", [Dynamic, jls.AutoLossScale])
@pytest.mark.parametrize("scale", [float(np.finfo(np.float32).tiny), 1.0, F32_MAX])
def test_initial_scale_may_equal_both_bounds(kind, scale):
    loss_scale = kind(scale, min_loss_scale=scale, max_loss_scale=scale)
    for finite in True, False:
        assert loss_scale.adjust(finite)() == scale


def test_increment_period_may_be_the_largest_int32():
    loss_scale = with_rule_state(Dynamic(8, 2**31 - 1), num_good_steps=np.int32(2**31 - 3))
    assert [(loss_scale := loss_scale.adjust(True))() for _ in range(2)] == [8, 16]


@pytest.mark.parametrize("kind", [Dynamic, jls.AutoLossScale])
def test_constructors_reject_traced_configuration(kind):
    with pytest.raises(ValueError, match=r"must be a concrete number, got the traced .*`dataclasses.replace`"):
        jax.jit(lambda number: kind(number)())(8.0)


NOT_A_FINITE_NUMBER = {
    "bool": True,
    "jax_bool": jnp.array(True),
    "string": "8",
    "list": [8.0],
    "complex": 8j,
    "nan": float("nan"),
    "jax_nan": jnp.float32(jnp.nan),
    "inf": float("inf"),
    "beyond_float32": 1e39,
}


def bad(kind, argument, *values, **others):
    """Return one test parameter for each invalid value of an argument. `others` are valid values of other arguments."""
    return [pytest.param(kind, argument, value, others, id=f"{argument}={value!r}") for value in values]


def bad_numbers(kind, argument, **others):
    """Return one test parameter for each value of an argument that is not a finite number in float32."""
    rows = NOT_A_FINITE_NUMBER.items()
    return [pytest.param(kind, argument, value, others, id=f"{argument}-{name}") for name, value in rows]


@pytest.mark.parametrize(
    ("kind", "argument", "value", "others"),
    [
        *bad_numbers(Fixed, "loss_scale_value"),
        *bad(Fixed, "loss_scale_value", None, 0.999, 0, -8),
        *bad(Fixed, "skip_nonfinite", None, 1, "yes", loss_scale_value=8),
        *bad_numbers(Dynamic, "initial_loss_scale"),
        *bad(Dynamic, "initial_loss_scale", None, 0.5, 0, -1, np.array([8.0])),  # The default `min_loss_scale` is 1.
        *bad(Dynamic, "initial_loss_scale", 8, min_loss_scale=16),
        *bad(Dynamic, "initial_loss_scale", 32, max_loss_scale=16),
        *bad(Dynamic, "increment_period", None, True, np.True_, "2", 2.9, float("nan"), 0, -1, 2**31),
        *bad_numbers(Dynamic, "multiplier"),
        *bad(Dynamic, "multiplier", None, 1, 1 + 1e-12, 0.5, 0, -2),
        *bad_numbers(Dynamic, "backoff_factor"),
        *bad(Dynamic, "backoff_factor", 0, 1, 1.5, -0.5, 1 - 1e-12),
        *bad_numbers(Dynamic, "min_loss_scale"),
        *bad(Dynamic, "min_loss_scale", None, 0, -1, 1e-39),
        *bad_numbers(Dynamic, "max_loss_scale"),
        *bad(Dynamic, "hysteresis", None, True, "2", 1.5, 0, -1, 2**31),
        *bad(Dynamic, "hysteresis_refill", None, True, "never"),
        *bad_numbers(Dynamic, "current_loss_scale"),
        *bad(Dynamic, "current_loss_scale", 0, -1.0, 1e-39, np.array([8.0, np.nan])),
        *bad(jls.AutoLossScale, "initial_loss_scale", True, float("nan"), 2.0**-25),
        *bad(jls.AutoLossScale, "min_loss_scale", 0),
        *bad(jls.AutoLossScale, "current_loss_scale", 0.0),
    ],
)
def test_error_names_the_bad_argument_and_its_value(kind, argument, value, others):
    with pytest.raises(ValueError) as error:
        kind(**{argument: value}, **others)
    assert f"{kind.__name__}({argument}=...)" in str(error.value)
    member = value[-1] if isinstance(value, np.ndarray) and value.size > 1 else value
    assert re.search(rf"got .*{re.escape(repr(member))}", str(error.value))


@pytest.mark.parametrize("period", [2, 2.0, np.int64(2), np.float32(2), jnp.float32(2)], ids=repr)
@pytest.mark.parametrize("argument", ["increment_period", "hysteresis"])
def test_counts_accept_floats_with_integral_values(argument, period):
    value = getattr(Dynamic(**{argument: period}), argument)
    assert (value, type(value)) == (2, int)
