"""State transitions of `DynamicLossScale` that TensorFlow's tests do not cover, and manual changes of its state."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import F32_MAX, Dynamic, dynamic_configs, grads_of, named, scales_over, with_rule_state

# --- State transitions that TensorFlow's tests do not cover ---


@pytest.mark.parametrize(
    ("loss_scale", "flags", "expected"),
    named(
        [
            ("growth_exactly_at_3", Dynamic(8, 3), "TTTTTT", [8, 8, 16, 16, 16, 32]),
            ("floor_is_no_power_of_two", Dynamic(8, min_loss_scale=3), "FFF", [4, 3, 3]),
            ("set_to_the_ceiling", Dynamic(4, 1, max_loss_scale=10), "TTTF", [8, 10, 10, 5]),
            ("kept_where_float32_ends", Dynamic(2.0**126, 1), "TTTF", [2.0**127] * 3 + [2.0**126]),
            ("kept_at_the_largest_float32", Dynamic(F32_MAX, 1), "TT", [F32_MAX] * 2),
            ("hysteresis_refilled_on_growth", Dynamic(64, 2, hysteresis=2), "FFTTFF", [64, 32, 32, 64, 64, 32]),
            ("hysteresis_counts_bad_steps_far_apart", Dynamic(64, 9, hysteresis=2), "FTFTF", [64, 64, 32, 32, 16]),
            ("hysteresis_stops_at_the_floor", Dynamic(2, hysteresis=2), "FFFF", [2, 1, 1, 1]),
            ("refused_growth_refills", Dynamic(8, 1, max_loss_scale=8, hysteresis=2), "FTFF", [8, 8, 8, 4]),
            ("largest_count", with_rule_state(Dynamic(8, 3), num_good_steps=np.int32(2**31 - 1)), "TT", [16, 16]),
            ("below_the_floor_does_not_rise", replace(Dynamic(8), current_loss_scale=0.25), "FF", [0.25, 0.25]),
            ("below_the_floor_can_grow", replace(Dynamic(8, 1), current_loss_scale=0.25), "TTT", [0.5, 1, 2]),
        ]
    ),
)
def test_dynamic_scale_after_each_step(loss_scale, flags, expected, update):
    assert scales_over(loss_scale, grads_of(flags), update) == expected


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


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(dynamic_configs(), st.lists(st.sampled_from([True, True, True, False]), max_size=30))
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


@pytest.mark.parametrize("change", [{"increment_period": 5}, {"max_loss_scale": 16}, {"initial_loss_scale": 64.0}])
def test_replace_changes_the_configuration_and_keeps_the_state(change):
    loss_scale = Dynamic(8, 2).adjust(False).adjust(True)
    changed = replace(loss_scale, **change)
    chex.assert_trees_all_equal(jax.tree.leaves(changed), jax.tree.leaves(loss_scale))
    assert changed.get_config() == loss_scale.get_config() | change


@pytest.mark.parametrize(("before", "after", "left"), [(1, 3, 3), (3, 1, None), (3, 4, 2)])
def test_replace_turns_hysteresis_on_and_off(before, after, left):
    loss_scale = Dynamic(8, hysteresis=before).adjust(False)
    assert replace(loss_scale, hysteresis=after).hysteresis_left == left
