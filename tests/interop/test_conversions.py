"""Results, warnings and errors of the conversions. Only the tests for flax and jmp need the other library."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from originals import ours

import jax_lossscale as jls
from jax_lossscale.interop.keras import from_keras, to_keras
from jax_lossscale.interop.tensorflow import from_tensorflow, to_tensorflow
from jax_lossscale.interop.torch import from_torch, to_torch

pytestmark = pytest.mark.ci

TINY = float(np.finfo(np.float32).tiny)
TORCH = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 3}
KERAS = {"initial_scale": 8.0, "dynamic_growth_steps": 9, "name": "scaled", "inner_optimizer": {}}
TENSORFLOW = {"initial_loss_scale": 8.0, "increment_period": 9, "multiplier": 2.0}


def at(loss_scale, scale, num_good_steps):
    return dataclasses.replace(loss_scale, current_loss_scale=scale, num_good_steps=num_good_steps)


def warned(function, *arguments, **keywords):
    """Return the result and the warnings, whose location must be the line that calls the conversion."""
    with pytest.warns(UserWarning, match="^`(from|to)_") as caught:
        result = function(*arguments, **keywords)
    assert {warning.filename for warning in caught} == {__file__}
    messages = [str(warning.message) for warning in caught]
    # Messages contain the name of the library instead of "peer".
    assert not [message for message in messages if "peer" in message]
    return result, messages


def sole_warning(function, *arguments, **keywords):
    result, (message,) = warned(function, *arguments, **keywords)
    return result, message


# --- Converted configuration and state ---


def test_from_and_to_torch():
    expected = at(jls.DynamicLossScale(4.0, 9, 2.0, backoff_factor=0.5, min_loss_scale=1.0), 4.0, 3)
    assert from_torch(TORCH, min_loss_scale=1.0) == expected
    result, message = sole_warning(from_torch, TORCH)
    assert result.min_loss_scale == TINY
    assert "torch has no floor" in message
    past_the_period, message = sole_warning(from_torch, {**TORCH, "_growth_tracker": 9}, min_loss_scale=1.0)
    assert "already past the period 9" in message
    assert past_the_period.adjust(True)() == 8.0
    assert from_torch({}) == jls.NoOpLossScale()
    assert to_torch(jls.NoOpLossScale()) == {}


def test_from_keras():
    state = {"dynamic_scale": np.float32(4.0), "step_counter": np.int32(3)}
    assert from_keras(KERAS, state, min_loss_scale=1.0) == at(jls.DynamicLossScale(8.0, 9), 4.0, 3)
    assert from_keras(KERAS, min_loss_scale=1.0) == jls.DynamicLossScale(8.0, 9)
    result, message = sole_warning(from_keras, KERAS, state)
    assert result.min_loss_scale == TINY
    assert "Keras has no floor" in message


def test_keras_2_is_rejected():
    with pytest.raises(ValueError, match="tf-keras 2"):
        from_keras({**KERAS, "dynamic": True})


def test_from_and_to_tensorflow():
    state = {"current_loss_scale": np.float32(4.0), "good_steps": np.int64(3)}
    assert from_tensorflow(TENSORFLOW, state) == at(jls.DynamicLossScale(8.0, 9), 4.0, 3)
    past_the_period = from_tensorflow(TENSORFLOW, {"current_loss_scale": 8.0, "good_steps": 12})
    assert past_the_period.adjust(True)() == 16.0  # TensorFlow would grow the scale here.
    assert from_tensorflow({"loss_scale_value": 8.0}) == jls.FixedLossScale(8.0)
    assert to_tensorflow(jls.FixedLossScale(8.0)) == ({"loss_scale_value": 8.0}, {})


def test_from_tensorflow_with_a_scale_below_one():
    result, message = sole_warning(from_tensorflow, {**TENSORFLOW, "initial_loss_scale": 0.5})
    assert float(result.adjust(False)()) == 0.5  # TensorFlow would raise it to 1.
    assert "never raises" in message


def test_from_and_to_flax():
    flax = ours("flax._dynamic_scale")
    from flax.training.dynamic_scale import DynamicScale

    theirs = DynamicScale(2.0, 0.25, 9, fin_steps=3, scale=4.0, minimum_scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = flax.from_flax(theirs)
    late = flax._steps_late()
    largest = float(np.finfo(np.float32).max)
    config = {"backoff_factor": 0.25, "min_loss_scale": 0.5, "max_loss_scale": largest}
    assert result == at(jls.DynamicLossScale(4.0, 9 + late, **config), 4.0, 3)
    back = flax.to_flax(result)
    assert back == theirs
    assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.parametrize("steps_late", [0, 1])
def test_flax_growth_interval_is_corrected_only_if_flax_grows_late(monkeypatch, steps_late):
    flax = ours("flax._dynamic_scale")
    from flax.training.dynamic_scale import DynamicScale

    monkeypatch.setattr(flax, "_steps_late", lambda: steps_late)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert flax.from_flax(DynamicScale(growth_interval=9)).increment_period == 9 + steps_late
    assert len(caught) == steps_late
    assert flax.to_flax(jls.DynamicLossScale(increment_period=9)).growth_interval == 9 - steps_late


def test_flax_grows_as_late_as_the_conversion_assumes():
    flax = ours("flax._dynamic_scale")
    from flax.training.dynamic_scale import DynamicScale

    scale, scales = DynamicScale(growth_interval=3, scale=1.0), []
    for _ in range(8):
        scale, *_ = scale.value_and_grad(lambda x: x)(1.0)
        scales.append(float(scale.scale))
    assert scales.index(2.0) + 1 == 3 + flax._steps_late()


def test_from_and_to_jmp():
    jmp, theirs = ours("jmp"), pytest.importorskip("jmp")
    assert jmp.from_jmp(theirs.DynamicLossScale(jnp.float32(4), jnp.int32(3), 9)) == at(
        jls.DynamicLossScale(4.0, 9), 4.0, 3
    )
    assert jmp.from_jmp(theirs.StaticLossScale(jnp.float32(8))) == jls.FixedLossScale(8.0)
    assert jmp.from_jmp(theirs.NoOpLossScale()) == jls.NoOpLossScale()
    assert jmp.to_jmp(jls.FixedLossScale(8.0)) == theirs.StaticLossScale(jnp.float32(8))
    assert jmp.to_jmp(jls.NoOpLossScale()) == theirs.NoOpLossScale()
    result, message = sole_warning(
        jmp.from_jmp, theirs.DynamicLossScale(jnp.float32(4), min_loss_scale=jnp.float32(0.25))
    )
    assert result.min_loss_scale == 0.25
    assert "loses this floor" in message
    with pytest.warns(UserWarning, match="loses this floor"), pytest.warns(UserWarning, match="smallest normal"):
        result = jmp.from_jmp(theirs.DynamicLossScale(jnp.float32(4), min_loss_scale=jnp.float32(0)))
    assert result.min_loss_scale == TINY


# --- Settings that the other library does not support ---

FULL = {
    "backoff_factor": 0.25,
    "min_loss_scale": 0.5,
    "max_loss_scale": 2.0**20,
    "hysteresis": 2,
    "hysteresis_refill": "finite",
}
LOST = {
    "torch": {"min_loss_scale", "max_loss_scale", "hysteresis"},
    "keras": {"multiplier", "backoff_factor", "min_loss_scale", "max_loss_scale", "hysteresis"},
    "tensorflow": {"backoff_factor", "min_loss_scale", "max_loss_scale", "hysteresis"},
    "flax": {"max_loss_scale", "hysteresis"},
    "jmp": {"backoff_factor", "min_loss_scale", "max_loss_scale", "hysteresis"},
}


@pytest.mark.parametrize("peer", LOST)
def test_warning_names_each_unsupported_setting(peer):
    convert = getattr(ours(peer), f"to_{peer}")
    _, messages = warned(convert, jls.DynamicLossScale(8.0, 9, 3.0, **FULL))
    named = {
        argument for argument in (*FULL, "multiplier", "increment_period") for m in messages if f"`{argument}`" in m
    }
    assert named == LOST[peer]
    assert len(messages) == len(named)


PAIRS = {
    "torch": (from_torch, to_torch, {"min_loss_scale": TINY}),
    "keras": (from_keras, to_keras, {"min_loss_scale": TINY, "multiplier": 2.0, "backoff_factor": None}),
    "tensorflow": (from_tensorflow, to_tensorflow, {"min_loss_scale": 1.0, "backoff_factor": None}),
}


@pytest.mark.parametrize("peer", PAIRS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_conversion_to_another_library_and_back(peer, data):
    """Every setting that the other library supports is preserved, and the state is bitwise equal."""
    to_here, to_peer, fixed = PAIRS[peer]
    config = {
        "initial_loss_scale": 2.0 ** data.draw(st.integers(0, 30)),
        "increment_period": data.draw(st.integers(2, 5000)),
        "multiplier": data.draw(st.sampled_from([2.0, 4.0])),
        "backoff_factor": data.draw(st.sampled_from([0.5, 0.25])),
        "min_loss_scale": data.draw(st.sampled_from([1.0, 0.25])),
        **fixed,
    }
    scale = 2.0 ** data.draw(st.integers(0, 30))
    loss_scale = at(jls.DynamicLossScale(**config), scale, data.draw(st.integers(0, config["increment_period"] - 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        saved = to_peer(loss_scale)
        back = to_here(*saved) if isinstance(saved, tuple) else to_here(saved)
    if peer == "torch":  # The state of torch contains only the current scale.
        config["initial_loss_scale"] = scale
    assert jax.tree.leaves(back) == jax.tree.leaves(loss_scale)
    expected = jls.DynamicLossScale(**config)
    for argument, value in back.get_config().items():
        if argument == "backoff_factor":
            value = value or 1 / back.multiplier
            assert value == (expected.backoff_factor or 1 / expected.multiplier)
        else:
            assert value == getattr(expected, argument), argument


# --- Rejected inputs ---


@pytest.mark.parametrize(
    ("convert", "named"),
    [
        (lambda: from_torch({"scale": 1.0}), ["from_torch(state_dict=...)", "growth_interval", "_growth_tracker"]),
        (lambda: from_torch([1.0]), ["from_torch(state_dict=...)", "must be a dictionary"]),
        (lambda: from_torch({**TORCH, "scale": 0.0}), ["['scale']", "positive, finite", "0.0"]),
        (lambda: from_torch({**TORCH, "_growth_tracker": -1}), ["_growth_tracker", "-1"]),
        (lambda: from_torch({**TORCH, "growth_interval": 2.5}), ["growth_interval", "integer", "2.5"]),
        (lambda: from_keras(KERAS, {}, min_loss_scale=1.0), ["from_keras(state=...)", "dynamic_scale"]),
        (lambda: from_tensorflow({"loss_scale": 1.0}), ["from_tensorflow(config=...)", "multiplier", "loss_scale"]),
        (lambda: from_tensorflow({**TENSORFLOW, "multiplier": 0.5}), ["multiplier", "greater than 1"]),
        (
            lambda: to_torch(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), jls.DynamicLossScale())),
            ["must be one `DynamicLossScale`", "one by one"],
        ),
    ],
)
def test_error_names_the_invalid_entry(convert, named):
    with pytest.raises(ValueError) as caught:
        convert()
    assert [part for part in named if part not in str(caught.value)] == []


def test_from_flax_and_from_jmp_reject_other_types():
    with pytest.raises(ValueError, match="DynamicScale"):
        ours("flax").from_flax({"scale": 1.0})
    with pytest.raises(ValueError, match="a jmp loss scale"):
        ours("jmp").from_jmp(jls.DynamicLossScale())
