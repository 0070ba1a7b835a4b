"""State transitions of `DynamicLossScale` that TensorFlow's tests do not cover, and manual changes of its state."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import F32_MAX, Dynamic, grads_of, named, scales_over

# --- State transitions that TensorFlow's tests do not cover ---


@pytest.mark.parametrize(
    ("loss_scale", "flags", "expected"),
    named(
        [
            ("growth_exactly_at_1", Dynamic(8, 1), "TT", [16, 32]),
            ("growth_exactly_at_3", Dynamic(8, 3), "TTTTTT", [8, 8, 16, 16, 16, 32]),
            ("growth_exactly_at_5", Dynamic(8, 5), "TTTTT", [8, 8, 8, 8, 16]),
            ("floor_below_one", Dynamic(1, min_loss_scale=0.25), "FFFF", [0.5, 0.25, 0.25, 0.25]),
            ("floor_is_no_power_of_two", Dynamic(8, min_loss_scale=3), "FFF", [4, 3, 3]),
            ("set_to_the_ceiling", Dynamic(4, 1, max_loss_scale=10), "TTTF", [8, 10, 10, 5]),
            ("kept_where_float32_ends", Dynamic(2.0**126, 1), "TTTF", [2.0**127] * 3 + [2.0**126]),
            ("kept_at_the_largest_float32", Dynamic(F32_MAX, 1), "TT", [F32_MAX] * 2),
            (
                "set_to_a_ceiling_where_float32_ends",
                Dynamic(2.0**127, 1, max_loss_scale=F32_MAX),
                "TT",
                [F32_MAX, F32_MAX],
            ),
            ("backoff_factor", Dynamic(64, 1, backoff_factor=0.25), "FTF", [16, 32, 8]),
            ("hysteresis_refilled_on_growth", Dynamic(64, 2, hysteresis=2), "FFTTFF", [64, 32, 32, 64, 64, 32]),
            ("hysteresis_counts_bad_steps_far_apart", Dynamic(64, 9, hysteresis=2), "FTFTF", [64, 64, 32, 32, 16]),
            ("hysteresis_once_spent_stays_spent", Dynamic(64, 9, hysteresis=2), "FFFF", [64, 32, 16, 8]),
            (
                "hysteresis_refilled_on_any_finite_step",
                Dynamic(64, 9, hysteresis=2, hysteresis_refill="finite"),
                "FTFTFFFTF",
                [64, 64, 64, 64, 64, 32, 16, 16, 16],
            ),
            ("hysteresis_3", Dynamic(64, 9, hysteresis=3), "FFFF", [64, 64, 32, 16]),
            ("hysteresis_stops_at_the_floor", Dynamic(2, hysteresis=2), "FFFF", [2, 1, 1, 1]),
            ("refused_growth_refills", Dynamic(8, 1, max_loss_scale=8, hysteresis=2), "FTFF", [8, 8, 8, 4]),
            (
                "restored_count_beyond_the_period_grows",
                replace(Dynamic(8, 3), num_good_steps=7),
                "TTTT",
                [16, 16, 16, 32],
            ),
            ("below_the_floor_does_not_rise", replace(Dynamic(8), current_loss_scale=0.25), "FF", [0.25, 0.25]),
            ("below_the_floor_can_grow", replace(Dynamic(8, 1), current_loss_scale=0.25), "TTT", [0.5, 1, 2]),
        ]
    ),
)
def test_dynamic_scale_after_each_step(loss_scale, flags, expected, update):
    assert scales_over(loss_scale, grads_of(flags), update) == expected


@pytest.mark.parametrize(
    "loss_scale",
    [Dynamic(8, 2), Dynamic(2.0**127, 2), Dynamic(8, 2, max_loss_scale=8)],
    ids=["grows", "float32_ends", "ceiling"],
)
def test_step_count_resets_at_each_growth_even_if_the_scale_cannot_grow(loss_scale, update):
    counts = []
    for grad in grads_of("TTTFT"):
        loss_scale, _ = update(loss_scale, grad)
        counts.append(int(loss_scale.num_good_steps))
    assert counts == [1, 0, 1, 0, 1]


def test_nonfinite_step_is_skipped_while_hysteresis_keeps_the_scale(update):
    loss_scale, should_apply = update(Dynamic(64, hysteresis=3), np.float32(np.inf))
    assert (float(loss_scale()), bool(should_apply), int(loss_scale.hysteresis_left)) == (64, False, 2)


def oracle(config, flags):
    """Yield (scale, number of good steps, hysteresis left) after each step, computed in plain Python."""
    scale, num_good_steps, hysteresis_left = np.float32(config["initial_loss_scale"]), 0, config["hysteresis"]
    backoff = 1 / config["multiplier"] if config["backoff_factor"] is None else config["backoff_factor"]
    for finite in flags:
        if finite:
            num_good_steps += 1
            if config["hysteresis_refill"] == "finite":
                hysteresis_left = config["hysteresis"]
            if num_good_steps == config["increment_period"]:
                num_good_steps, hysteresis_left = 0, config["hysteresis"]
                with np.errstate(over="ignore"):
                    grown = scale * np.float32(config["multiplier"])
                if config["max_loss_scale"] is not None:
                    scale = min(grown, np.float32(config["max_loss_scale"]))
                elif np.isfinite(grown):
                    scale = grown
        else:
            num_good_steps, hysteresis_left = 0, max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                scale = max(scale * np.float32(backoff), np.float32(config["min_loss_scale"]))
        yield float(scale), num_good_steps, hysteresis_left if config["hysteresis"] > 1 else None


@st.composite
def configs(draw):
    initial = draw(st.sampled_from([1.0, 3.0, 2.0**15, 1e30, 2.0**126]) | st.floats(0.125, 1e6, width=32))
    return {
        "initial_loss_scale": initial,
        "increment_period": draw(st.integers(1, 6)),
        "multiplier": draw(st.sampled_from([2.0, 4.0]) | st.floats(1.125, 1e6, width=32)),
        "backoff_factor": draw(st.none() | st.floats(0.0625, 0.9375, width=32)),
        "min_loss_scale": initial * draw(st.sampled_from([1.0, 0.5, 2.0**-4, 2.0**-20])),
        "max_loss_scale": draw(st.sampled_from([None, initial, initial * 1.5, F32_MAX])),
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_refill": draw(st.sampled_from(["growth", "finite"])),
    }


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(configs(), st.lists(st.sampled_from([True, True, True, False]), max_size=30))
def test_dynamic_scale_equals_a_plain_python_reference(config, flags):
    loss_scale = Dynamic.from_config(config)
    for finite, expected in zip(flags, oracle(config, flags), strict=True):
        loss_scale = loss_scale.adjust(finite)
        assert (float(loss_scale()), loss_scale.num_good_steps, loss_scale.hysteresis_left) == expected


# --- Manual changes of the state ---


def test_replace_changes_the_scale_and_keeps_the_other_state():
    loss_scale = Dynamic(8, 9, hysteresis=3).adjust(False).adjust(True)
    by_hand = replace(loss_scale, current_loss_scale=2)
    assert (by_hand.num_good_steps, by_hand.hysteresis_left, by_hand()) == (1, 2, 2)
    assert by_hand.get_config() == loss_scale.get_config()
    chex.assert_trees_all_equal_shapes_and_dtypes(by_hand, loss_scale)


@pytest.mark.parametrize("change", [{"increment_period": 5}, {"max_loss_scale": 16}])
def test_replace_changes_the_configuration_and_keeps_the_state(change):
    loss_scale = Dynamic(8, 2).adjust(False).adjust(True)
    changed = replace(loss_scale, **change)
    chex.assert_trees_all_equal(jax.tree.leaves(changed), jax.tree.leaves(loss_scale))
    assert changed.get_config() == loss_scale.get_config() | change


@pytest.mark.parametrize(("before", "after", "left"), [(1, 3, 3), (3, 1, None), (3, 4, 2)])
def test_replace_turns_hysteresis_on_and_off(before, after, left):
    loss_scale = Dynamic(8, hysteresis=before).adjust(False)
    assert replace(loss_scale, hysteresis=after).hysteresis_left == left


def test_replace_changes_the_scale_under_jit():
    set_scale = jax.jit(lambda loss_scale, scale: replace(loss_scale, current_loss_scale=scale))
    assert set_scale(Dynamic(), 4.0)() == 4


@pytest.mark.parametrize("batch", [False, True])
def test_replace_rejects_a_concrete_scale_of_zero(batch):
    with pytest.raises(ValueError, match=r"current_loss_scale=.*got"):
        replace(Dynamic(), current_loss_scale=np.float32([1, 0]) if batch else np.float32(0))


def test_replacing_the_configuration_keeps_the_state():
    """The state is also kept if the initial scale is replaced."""
    begun = replace(Dynamic(8).adjust(np.True_), initial_loss_scale=64)
    assert (float(begun()), int(begun.num_good_steps), begun.initial_loss_scale) == (8, 1, 64)
    begun = replace(Dynamic(8).adjust(np.True_), initial_loss_scale=8, increment_period=3)
    assert (int(begun.num_good_steps), begun.increment_period) == (1, 3)


def test_step_count_does_not_overflow_int32():
    grown = replace(Dynamic(8, 3), num_good_steps=2**31 - 1).adjust(np.True_)
    assert (float(grown()), int(grown.num_good_steps)) == (16, 0)
