"""Results, warnings and errors of the conversions of loss scales of flax and jmp."""

import dataclasses
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_lossscale as jls

pytestmark = pytest.mark.ci

pytest.importorskip("flax")
pytest.importorskip("jmp")

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def ours(peer):
    """Return the module of jax_lossscale that converts from and to another library."""
    return importlib.import_module(f"jax_lossscale.interop.{peer}")


flax = ours("flax._dynamic_scale")
DynamicScale = flax.DynamicScale


def at(loss_scale, scale, num_good_steps):
    return dataclasses.replace(loss_scale, current_loss_scale=scale, num_good_steps=num_good_steps)


# --- Converted configuration and state ---


def test_from_and_to_flax():
    theirs = DynamicScale(2.0, 0.25, 9, fin_steps=3, scale=4.0, minimum_scale=0.5)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        result = flax.from_flax(theirs)
    late = flax._steps_late()
    config = {"backoff_factor": 0.25, "min_loss_scale": 0.5, "max_loss_scale": LARGEST}
    assert result == at(jls.DynamicLossScale(4.0, 9 + late, **config), 4.0, 3)
    back = flax.to_flax(result)
    assert back == theirs
    assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.parametrize("steps_late", [0, 1])
def test_flax_growth_interval_is_corrected_only_if_flax_grows_late(monkeypatch, steps_late):
    monkeypatch.setattr(flax, "_steps_late", lambda: steps_late)
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert flax.from_flax(DynamicScale(growth_interval=9)).increment_period == 9 + steps_late
    assert len(caught) == steps_late
    assert flax.to_flax(jls.DynamicLossScale(increment_period=9)).growth_interval == 9 - steps_late


def test_flax_grows_as_late_as_the_conversion_assumes():
    scale, scales = DynamicScale(growth_interval=3, scale=1.0), []
    for _ in range(8):
        scale, *_ = scale.value_and_grad(lambda x: x)(1.0)
        scales.append(float(scale.scale))
    assert scales.index(2.0) + 1 == 3 + flax._steps_late()


def test_from_and_to_jmp():
    jmp, theirs = ours("jmp"), pytest.importorskip("jmp")
    dynamic = theirs.DynamicLossScale(jnp.float32(4), jnp.int32(3), 9)
    assert jmp.from_jmp(dynamic) == at(jls.DynamicLossScale(4.0, 9), 4.0, 3)
    assert jmp.from_jmp(theirs.StaticLossScale(jnp.float32(8))) == jls.FixedLossScale(8.0)
    assert jmp.from_jmp(theirs.NoOpLossScale()) == jls.NoOpLossScale()
    assert jmp.to_jmp(jls.FixedLossScale(8.0)) == theirs.StaticLossScale(jnp.float32(8))
    assert jmp.to_jmp(jls.NoOpLossScale()) == theirs.NoOpLossScale()
    for floor, expected in (0.25, 0.25), (0, TINY):
        theirs_with_floor = theirs.DynamicLossScale(jnp.float32(4), min_loss_scale=jnp.float32(floor))
        assert jmp.from_jmp(theirs_with_floor).min_loss_scale == expected


# --- Settings that the other library does not support ---

FULL = {
    "backoff_factor": 0.25,
    "min_loss_scale": 0.5,
    "max_loss_scale": 2.0**20,
    "hysteresis": 2,
    "hysteresis_refill": "finite",
}
LOST = {
    "flax": {"max_loss_scale", "hysteresis"},
    "jmp": {"backoff_factor", "min_loss_scale", "max_loss_scale", "hysteresis"},
}


@pytest.mark.parametrize("peer", LOST)
def test_warning_names_each_unsupported_setting(peer):
    convert = getattr(ours(peer), f"to_{peer}")
    with pytest.warns(UserWarning, match="^`(from|to)_") as caught:
        convert(jls.DynamicLossScale(8.0, 9, 3.0, **FULL))
    assert {warning.filename for warning in caught} == {__file__}
    messages = [str(warning.message) for warning in caught]
    # Messages contain the name of the library instead of "peer".
    assert not [message for message in messages if "peer" in message]
    named = {
        argument for argument in (*FULL, "multiplier", "increment_period") for m in messages if f"`{argument}`" in m
    }
    assert named == LOST[peer]
    assert len(messages) == len(named)


@pytest.mark.parametrize("peer", LOST)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_conversion_to_another_library_and_back(peer, data):
    """Every setting that the other library supports is preserved, and the state is bitwise equal."""
    module = ours(peer)
    config = {
        "increment_period": data.draw(st.integers(2, 5000)),
        "multiplier": data.draw(st.sampled_from([2.0, 4.0])),
        "backoff_factor": data.draw(st.sampled_from([0.5, 0.25])),
        "min_loss_scale": data.draw(st.sampled_from([1.0, 0.25])),
    }
    config |= {"jmp": {"backoff_factor": 1 / config["multiplier"], "min_loss_scale": 1.0}}.get(peer, {})
    # The other libraries save only the current scale.
    scale = 2.0 ** data.draw(st.integers(0, 30))
    num_good_steps = data.draw(st.integers(0, config["increment_period"] - 1))
    loss_scale = at(jls.DynamicLossScale(scale, **config), scale, num_good_steps)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        back = getattr(module, f"from_{peer}")(getattr(module, f"to_{peer}")(loss_scale))
    assert jax.tree.leaves(back) == jax.tree.leaves(loss_scale)
    expected = loss_scale.get_config() | ({"max_loss_scale": LARGEST} if peer == "flax" else {})
    got = back.get_config()
    assert got | {"backoff_factor": got["backoff_factor"] or 1 / got["multiplier"]} == expected


# --- Unusual and rejected inputs ---


def flax_scale(**fields):
    return flax.from_flax(DynamicScale(**{"minimum_scale": 1.0, "growth_interval": 9} | fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scale": 0.0}, ["current_loss_scale", "positive", "0.0"]),
        ({"fin_steps": -1}, ["num_good_steps", "-1"]),
        ({"growth_interval": 2.5}, ["increment_period", "integer", "3.5"]),
        ({"growth_factor": 0.5}, ["multiplier", "greater than 1"]),
        ({"minimum_scale": -1.0}, ["min_loss_scale", "-1.0"]),
    ],
)
@pytest.mark.filterwarnings("ignore:`from_flax`. this version of flax raises:UserWarning")
def test_error_names_the_invalid_field(fields, named):
    with pytest.raises(ValueError) as caught:
        flax_scale(**fields)
    assert [part for part in named if part not in str(caught.value)] == []


@pytest.mark.filterwarnings("ignore:`from_flax`. this version of flax raises:UserWarning")
def test_scale_below_the_floor_and_counter_past_the_period():
    loss_scale = flax_scale(scale=0.5)
    assert float(loss_scale.adjust(False)()) == 0.5  # flax would raise it to 1.
    loss_scale = flax_scale(scale=4.0, fin_steps=12)
    assert float(loss_scale.adjust(True)()) == 8.0


def test_batch_of_loss_scales_is_rejected():
    with pytest.raises(ValueError, match="one by one"):
        flax.to_flax(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), jls.DynamicLossScale()))
