"""The loss scales: what each kind does step by step, what it accepts, and how it travels as a pytree."""

import copy
import dataclasses
import json
import pickle
import re
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_lossscale as jls

Fixed, Dynamic = jls.FixedLossScale, jls.DynamicLossScale
F32_MAX = float(np.finfo(np.float32).max)


@partial(jax.tree_util.register_dataclass, data_fields=["num_overflows"], meta_fields=["initial"])
@dataclasses.dataclass(frozen=True)
class HalvingLossScale(jls.LossScale):
    """A user's own kind, with the three methods that the interface asks for: down on overflow, and never up."""

    initial: float
    num_overflows: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros([], jnp.int32))

    def __call__(self):
        return jnp.ldexp(jnp.float32(self.initial), -self.num_overflows)

    def adjust(self, grads_finite):
        return replace(self, num_overflows=jnp.where(grads_finite, 0, 1) + self.num_overflows)

    def get_config(self):
        return {"initial": self.initial}


ONE_OF_EACH = {
    "fixed": partial(Fixed, 8),
    "fixed_skipping": partial(Fixed, 8, skip_nonfinite=True),
    "no_op": jls.NoOpLossScale,
    "dynamic": partial(Dynamic, 8, 2),
    "dynamic_full": partial(
        Dynamic,
        8,
        2,
        4,
        backoff_factor=0.5,
        min_loss_scale=0.25,
        max_loss_scale=64,
        hysteresis=2,
        hysteresis_refill="finite",
    ),
    "users_own": partial(HalvingLossScale, 8.0),
}
each_kind = pytest.mark.parametrize("make", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
UPDATES = {"eager": lambda loss_scale, grads: loss_scale.update(grads), "jit": jax.jit(lambda s, g: s.update(g))}


@pytest.fixture(params=UPDATES.values(), ids=UPDATES)
def update(request):
    return request.param


def grads_of(flags):
    """A gradient for each letter: T is finite, F is not."""
    return [np.float32(1.0 if flag == "T" else np.nan) for flag in flags]


def scales_over(loss_scale, grads, update):
    scales = []
    for grad in grads:
        loss_scale, _ = update(loss_scale, grad)
        scales.append(float(loss_scale()))
    return scales


def through_config(loss_scale):
    return type(loss_scale).from_config(loss_scale.get_config())


def named(rows):
    """Parameters from rows whose first column is their name."""
    return [pytest.param(*row, id=name) for name, *row in rows]


# --- What TensorFlow's own tests state of its loss scales, `loss_scale_test.py` in TensorFlow 2.21 ---


def dynamic(initial=1, period=2, multiplier=2):  # the defaults of their helper
    return Dynamic(initial, period, multiplier)


@pytest.mark.parametrize(
    ("loss_scale", "grads", "expected"),
    named(
        [
            ("fixed_basic", Fixed(1000), grads_of("TF"), [1000, 1000, 1000]),
            ("fixed_serialization", through_config(jls.get(123)), [], [123]),
            ("call_type_fixed", Fixed(123), [], [123]),
            ("call_type_dynamic", Dynamic(), [], [2**15]),
            ("increase", dynamic(), grads_of("TTTTTT"), [1, 1, 2, 2, 4, 4, 8]),
            (
                "increasing_until_capped",
                dynamic(F32_MAX / 4),
                grads_of("TTTTTT"),
                [F32_MAX / 4, F32_MAX / 4, F32_MAX / 2, F32_MAX / 2, F32_MAX, F32_MAX, F32_MAX],
            ),
            ("decrease_every_step", dynamic(1024), grads_of("FFFFFF"), [1024, 512, 256, 128, 64, 32, 16]),
            ("decreasing_until_one", dynamic(16), grads_of("FFFFFF"), [16, 8, 4, 2, 1, 1, 1]),
            ("nan_clears_good_steps", dynamic(), grads_of("TTTFT"), [1, 1, 2, 2, 1, 1]),
            ("update_each_step", dynamic(1, 1), grads_of("TTTFTT"), [1, 2, 4, 8, 4, 8, 16]),
            ("alternating_each_step", dynamic(1, 1), grads_of("TFTFTFTFT"), [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]),
            ("alternating_every_other", dynamic(32), grads_of("TFTFTFT"), [32, 32, 16, 16, 8, 8, 4, 4]),
            ("nondefault_multiplier", dynamic(4, 2, 3), grads_of("TTFTT"), [4, 4, 12, 4, 4, 12]),
            ("random_mix", dynamic(4), grads_of("FTTTFTFTTTF"), [4, 2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
            ("single_tensor_grad", Dynamic(), [np.float32(4)], [2**15, 2**15]),
            ("dynamic_serialization", through_config(dynamic(1, 2, 3)), grads_of("TT"), [1, 1, 3]),
            ("none_grads", Dynamic(), [[None]], [2**15, 2**15]),
            ("get_dynamic", jls.get("dynamic"), grads_of("F"), [2**15, 2**14]),
        ]
    ),
)
def test_tensorflow_fact(loss_scale, grads, expected, update):
    scales, applied = [loss_scale()], []
    for grad in grads:
        loss_scale, should_apply = update(loss_scale, grad)
        scales.append(loss_scale())
        applied.append(should_apply)
    always_applies = isinstance(loss_scale, Fixed)
    assert [float(scale) for scale in scales] == expected
    finite = [all(np.isfinite(jax.tree.leaves(grad))) for grad in grads]
    assert [bool(flag) for flag in applied] == [always_applies or flag for flag in finite]
    chex.assert_type([*scales, *applied], [jnp.float32] * len(scales) + [jnp.bool_] * len(applied))
    chex.assert_shape([*scales, *applied], ())


# --- The dynamic loss scale beyond TensorFlow's ---


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
def test_count_restarts_when_the_scale_grows_and_when_it_cannot(loss_scale, update):
    counts = []
    for grad in grads_of("TTTFT"):
        loss_scale, _ = update(loss_scale, grad)
        counts.append(int(loss_scale.num_good_steps))
    assert counts == [1, 0, 1, 0, 1]


def test_every_bad_step_is_skipped_while_hysteresis_keeps_the_scale(update):
    loss_scale, should_apply = update(Dynamic(64, hysteresis=3), np.float32(np.inf))
    assert (float(loss_scale()), bool(should_apply), int(loss_scale.hysteresis_left)) == (64, False, 2)


def oracle(config, flags):
    """The rule of `DynamicLossScale`, one step after another in plain Python: (scale, good steps, hysteresis left)."""
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
def test_dynamic_is_its_oracle(config, flags):
    loss_scale = Dynamic.from_config(config)
    for finite, expected in zip(flags, oracle(config, flags), strict=True):
        loss_scale = loss_scale.adjust(finite)
        assert (float(loss_scale()), loss_scale.num_good_steps, loss_scale.hysteresis_left) == expected


# --- State set by hand ---


def test_replace_sets_the_scale_by_hand_and_keeps_the_rest():
    loss_scale = Dynamic(8, 9, hysteresis=3).adjust(False).adjust(True)
    by_hand = replace(loss_scale, current_loss_scale=2)
    assert (by_hand.num_good_steps, by_hand.hysteresis_left, by_hand()) == (1, 2, 2)
    assert by_hand.get_config() == loss_scale.get_config()
    chex.assert_trees_all_equal_shapes_and_dtypes(by_hand, loss_scale)


@pytest.mark.parametrize("change", [{"increment_period": 5}, {"initial_loss_scale": 64}, {"max_loss_scale": 16}])
def test_replace_changes_the_configuration_and_keeps_the_state(change):
    loss_scale = Dynamic(8, 2).adjust(False).adjust(True)
    changed = replace(loss_scale, **change)
    chex.assert_trees_all_equal(jax.tree.leaves(changed), jax.tree.leaves(loss_scale))
    assert changed.get_config() == loss_scale.get_config() | change


@pytest.mark.parametrize(("before", "after", "left"), [(1, 3, 3), (3, 1, None), (3, 4, 2)])
def test_replace_turns_hysteresis_on_and_off(before, after, left):
    loss_scale = Dynamic(8, hysteresis=before).adjust(False)
    assert replace(loss_scale, hysteresis=after).hysteresis_left == left


def test_scale_is_set_by_hand_under_jit():
    set_scale = jax.jit(lambda loss_scale, scale: replace(loss_scale, current_loss_scale=scale))
    assert set_scale(Dynamic(), 4.0)() == 4


# --- What the constructors accept ---

NUMBERS = [8, 8.0, np.float32(8), np.int64(8), np.array(8.0), jnp.float32(8), jnp.int32(8), jnp.array(8.0)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__}-{number!r}")
@pytest.mark.parametrize("kind", [Fixed, Dynamic, jls.get])
def test_numbers_of_every_library_are_welcome(kind, number):
    loss_scale = kind(number)
    chex.assert_trees_all_equal(loss_scale(), jnp.float32(8))
    assert not loss_scale().weak_type
    assert json.loads(json.dumps(loss_scale.get_config())) == loss_scale.get_config()


def test_defaults():
    assert Dynamic().get_config() == {
        "initial_loss_scale": 2.0**15,
        "increment_period": 2000,
        "multiplier": 2.0,
        "backoff_factor": None,
        "min_loss_scale": 1.0,
        "max_loss_scale": None,
        "hysteresis": 1,
        "hysteresis_refill": "growth",
    }
    assert Fixed(8).get_config() == {"loss_scale_value": 8.0, "skip_nonfinite": False}
    assert jls.NoOpLossScale().get_config() == {}


def test_all_but_the_first_three_arguments_are_keyword_only():
    with pytest.raises(TypeError):
        Dynamic(8, 2, 2, 0.5)


NOT_A_FINITE_NUMBER = {
    "bool": True,
    "numpy_bool": np.True_,
    "jax_bool": jnp.array(True),
    "string": "8",
    "list": [8.0],
    "complex": 8j,
    "nan": float("nan"),
    "numpy_nan": np.float32("nan"),
    "jax_nan": jnp.float32(jnp.nan),
    "inf": float("inf"),
    "minus_inf": -float("inf"),
    "beyond_float32": 1e39,
    "beyond_float64": 10**400,
}


def bad(kind, argument, *values, **others):
    """One parameter for each value of an argument, beside others that would be right."""
    return [pytest.param(kind, argument, value, others, id=f"{argument}={value!r}") for value in values]


def bad_numbers(kind, argument, **others):
    rows = NOT_A_FINITE_NUMBER.items()
    return [pytest.param(kind, argument, value, others, id=f"{argument}-{name}") for name, value in rows]


@pytest.mark.parametrize(
    ("kind", "argument", "value", "others"),
    [
        *bad_numbers(Fixed, "loss_scale_value"),
        *bad(Fixed, "loss_scale_value", None, 0.999, 0, -8),
        *bad(Fixed, "skip_nonfinite", None, 1, "yes", loss_scale_value=8),
        *bad_numbers(Dynamic, "initial_loss_scale"),
        *bad(Dynamic, "initial_loss_scale", None, 0.5, 0, -1, np.array([8.0])),  # the floor is 1
        *bad(Dynamic, "initial_loss_scale", 8, min_loss_scale=16),
        *bad(Dynamic, "initial_loss_scale", 32, max_loss_scale=16),
        *bad(Dynamic, "increment_period", None, True, np.True_, "2", 2.9, 2.0, float("nan"), 0, -1, 2**31),
        *bad_numbers(Dynamic, "multiplier"),
        *bad(Dynamic, "multiplier", None, 1, 1 + 1e-12, 0.5, 0, -2),
        *bad_numbers(Dynamic, "backoff_factor"),
        *bad(Dynamic, "backoff_factor", 0, 1, 1.5, -0.5, 1 - 1e-12),
        *bad_numbers(Dynamic, "min_loss_scale"),
        *bad(Dynamic, "min_loss_scale", None, 0, -1, 1e-39),
        *bad_numbers(Dynamic, "max_loss_scale"),
        *bad(Dynamic, "hysteresis", None, True, "2", 1.5, 0, -1, 2**31),
        *bad(Dynamic, "hysteresis_refill", None, True, "never"),
    ],
)
def test_bad_argument_is_named_with_its_value(kind, argument, value, others):
    with pytest.raises(ValueError) as error:
        kind(**{argument: value}, **others)
    assert f"{kind.__name__}({argument}=...)" in str(error.value)
    assert re.search(rf"got .*{re.escape(repr(value))}", str(error.value))


def test_ceiling_below_the_default_start_is_named():
    with pytest.raises(ValueError, match="max_loss_scale` = 16"):
        Dynamic(max_loss_scale=16)


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (Fixed, "takes bools, NaN and infinity"),
        (Dynamic, "validates nothing"),
        (Dynamic, "period of 2.9 becomes 2"),
        (Dynamic, "initial scale below 1 *rises*"),
        (jls.get, "takes bools for numbers, refuses NumPy scalars"),
    ],
)
def test_docstring_says_what_tensorflow_lets_through(kind, difference):
    docstring = " ".join(kind.__doc__.split())
    assert difference in docstring[docstring.index("References:") :]


# --- Identifiers and configurations ---


@pytest.mark.parametrize(
    ("identifier", "expected"),
    named(
        [
            ("dynamic", "dynamic", Dynamic()),
            ("None", None, jls.NoOpLossScale()),
            ("number", 8, Fixed(8)),
            ("one", 1, Fixed(1)),
            ("dictionary", {"class_name": "NoOpLossScale", "config": {}}, jls.NoOpLossScale()),
            (
                "dictionary_with_defaults",
                {"class_name": "DynamicLossScale", "config": {"initial_loss_scale": 8}},
                Dynamic(8),
            ),
            ("users_own", {"class_name": "HalvingLossScale", "config": {"initial": 8.0}}, HalvingLossScale(8.0)),
        ]
    ),
)
def test_get(identifier, expected):
    loss_scale = jls.get(identifier)
    assert type(loss_scale) is type(expected)
    assert loss_scale == expected


@each_kind
def test_get_returns_a_loss_scale_as_it_is(make):
    loss_scale = make()
    assert jls.get(loss_scale) is loss_scale


def test_get_takes_a_traced_number():
    assert jax.jit(lambda number: jls.get(number)())(8.0) == 8


@pytest.mark.parametrize(
    "identifier",
    [
        *["Dynamic", "DYNAMIC", "fixed", "8", "", b"dynamic", np.array("dynamic")],
        *[True, False, np.True_, jnp.array(True), 8j, [8], (8,), {8}, np.array([8.0]), jnp.ones(1)],
        *[Dynamic, len],
        *[{}, {"class_name": "DynamicLossScale"}, {"class_name": "NoOpLossScale", "config": {}, "state": 8}],
    ],
    ids=repr,
)
def test_get_lists_what_it_accepts(identifier):
    with pytest.raises(ValueError) as error:
        jls.get(identifier)
    for accepted in repr(identifier), "a number", "'dynamic'", "None", "a `LossScale`", "`serialize`":
        assert accepted in str(error.value)


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("NoLossScale", {}),
        ("LossScale", {}),
        ("dynamic", {}),
        (None, {}),
        (["DynamicLossScale"], {}),
        ("DynamicLossScale", {"multiplier": 0.5}),
        ("DynamicLossScale", {"period": 3}),
        ("DynamicLossScale", None),
        ("DynamicLossScale", [8]),
        ("DynamicLossScale", {8: 8}),
        ("FixedLossScale", {}),
        ("NoOpLossScale", {"loss_scale_value": 1}),
        ("HalvingLossScale", {"final": 1}),
    ],
)
def test_get_refuses_dictionary(class_name, config):
    with pytest.raises(ValueError) as error:
        jls.get({"class_name": class_name, "config": config})
    assert str(class_name) in str(error.value)


def test_get_finds_a_class_below_another():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class BelowHalvingLossScale(HalvingLossScale):
        initial: float = dataclasses.field(metadata={"static": True})

    rebuilt = jls.get(jls.serialize(BelowHalvingLossScale(16.0)))
    assert (type(rebuilt), float(rebuilt())) == (BelowHalvingLossScale, 16)


def test_get_lists_the_known_classes():
    with pytest.raises(ValueError) as error:
        jls.get({"class_name": "NoLossScale", "config": {}})
    for name in "DynamicLossScale", "FixedLossScale", "NoOpLossScale", "HalvingLossScale":
        assert name in str(error.value)


@pytest.mark.parametrize(
    "number", [0, 0.5, -1, float("nan"), float("inf"), np.float32(0.5), jnp.float32(0.5)], ids=repr
)
def test_get_refuses_number_below_one_or_not_finite(number):
    with pytest.raises(ValueError, match="FixedLossScale"):
        jls.get(number)


@each_kind
def test_serialize_and_get_round_trip_through_json_without_the_state(make):
    moved = make().adjust(False)
    rebuilt = jls.get(json.loads(json.dumps(jls.serialize(moved))))
    assert type(rebuilt) is type(moved)
    assert rebuilt == make()
    assert through_config(moved) == make()


def test_serialize():
    config = {"loss_scale_value": 8.0, "skip_nonfinite": True}
    serialized = {"class_name": "FixedLossScale", "config": config}
    assert jls.serialize(Fixed(8, skip_nonfinite=True)) == serialized


@pytest.mark.parametrize("value", [8, "dynamic", None, Dynamic], ids=repr)
def test_serialize_refuses_what_is_no_loss_scale(value):
    with pytest.raises(ValueError, match="LossScale"):
        jls.serialize(value)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (jnp.float16, Dynamic),
        ("float16", Dynamic),
        (np.dtype("float16"), Dynamic),
        (jnp.bfloat16, jls.NoOpLossScale),
        ("bfloat16", jls.NoOpLossScale),
        (jnp.float32, jls.NoOpLossScale),
        (jnp.float64, jls.NoOpLossScale),
    ],
)
def test_loss_scale_for(dtype, kind):
    assert jls.loss_scale_for(dtype) == kind()


@pytest.mark.parametrize(
    "dtype", [None, jnp.int32, jnp.complex64, jnp.bool_, jnp.float8_e4m3fn, "half-precision", 16], ids=str
)
def test_loss_scale_for_refuses(dtype):
    with pytest.raises(ValueError, match="loss_scale_for"):
        jls.loss_scale_for(dtype)


# --- Every kind, one interface ---


@each_kind
def test_interface(make, update):
    loss_scale = make()
    assert isinstance(loss_scale, jls.LossScale)
    for grad in grads_of("TF"):
        loss_scale, should_apply = update(loss_scale, grad)
        chex.assert_shape([loss_scale(), should_apply], ())
        chex.assert_type([loss_scale(), should_apply], [jnp.float32, jnp.bool_])


@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        ("fixed", False),
        ("fixed_skipping", True),
        ("no_op", False),
        ("dynamic", True),
        ("dynamic_full", True),
        ("users_own", True),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_who_skips_a_nonfinite_step(kind, skips, value, update):
    _, should_apply = update(ONE_OF_EACH[kind](), {"kernel": np.array([1, value, 1], np.float32)})
    assert bool(should_apply) is not skips


@each_kind
@pytest.mark.parametrize("flag", [True, False])
def test_adjust_is_update_with_a_known_verdict(make, flag):
    loss_scale = make()
    expected, _ = loss_scale.update(np.float32(1.0 if flag else np.nan))
    for grads_finite in flag, np.bool_(flag), jnp.array(flag):
        chex.assert_trees_all_equal(loss_scale.adjust(grads_finite), expected, strict=True)


@each_kind
def test_unscale_undoes_scale(make):
    loss_scale = make()
    tree = {"kernel": jnp.array([1.0, -0.5], jnp.float16), "bias": jnp.float32(3), "step": 3, "frozen": None}
    scaled = loss_scale.scale(tree)
    chex.assert_trees_all_equal(scaled["bias"], 3 * loss_scale())
    assert scaled["kernel"].dtype == jnp.float16
    unscaled = loss_scale.unscale(scaled)
    chex.assert_trees_all_equal(unscaled["kernel"].astype(jnp.float16), tree["kernel"])
    chex.assert_trees_all_equal(unscaled["bias"], tree["bias"])
    assert (unscaled["step"], unscaled["frozen"]) == (3, None)


@pytest.mark.parametrize(
    ("grads", "finite"),
    named(
        [
            ("scalar", np.float32(4), True),
            ("python_number", 4.0, True),
            ("python_nan", float("nan"), False),
            ("none", None, True),
            ("none_leaves", {"frozen": None, "kernel": [None]}, True),
            ("none_beside_nan", [None, np.float32(np.nan)], False),
            ("nan_in_the_first_of_two", [np.float32(np.nan), np.float32(1)], False),
            ("empty_list", [], True),
            ("empty_tree", {"encoder": {}, "decoder": ([], ())}, True),
            ("empty_array", np.ones((0, 3), np.float32), True),
            ("nested", {"encoder": [np.ones(3), (np.zeros(2), {"bias": np.float32(1)})]}, True),
            ("nested_inf", {"encoder": [np.ones(3), (np.zeros(2), {"bias": np.float32(-np.inf)})]}, False),
            ("complex", np.array([1 + 2j], np.complex64), True),
            ("complex_real_nan", np.array([complex(np.nan, 1)], np.complex64), False),
            ("complex_imaginary_inf", np.array([complex(1, np.inf)], np.complex64), False),
            ("float16_at_its_largest", np.full(9, 65504, np.float16), True),
            ("float16_inf", np.array([1, np.inf], np.float16), False),
            ("bfloat16_nan", jnp.array([1, jnp.nan], jnp.bfloat16), False),
            ("integers", [3, np.array([2**31 - 1], np.int32)], True),
            ("booleans", [True, np.zeros(2, bool)], True),
            ("integers_beside_nan", [np.arange(3), np.float32(np.nan)], False),
        ]
    ),
)
def test_update_judges_any_tree(grads, finite, update):
    loss_scale, should_apply = update(Dynamic(8), grads)
    assert (bool(should_apply), float(loss_scale())) == (finite, 8 if finite else 4)


def test_update_passes_by_float0_keys_and_what_is_no_array():
    float0 = np.zeros(2, jax.dtypes.float0)
    loss_scale, should_apply = Dynamic(8).update([float0, jax.random.key(0), "kernel", len])
    assert (bool(should_apply), float(loss_scale())) == (True, 8)


def test_no_op_is_free():
    loss_scale, tree = jls.NoOpLossScale(), {"kernel": jnp.ones(3, jnp.float16), "step": 3}

    def step(grads):
        new_loss_scale, should_apply = loss_scale.update(grads)
        return loss_scale.unscale(loss_scale.scale(grads)), new_loss_scale, should_apply

    assert jax.tree.leaves(loss_scale) == []
    assert loss_scale.scale(tree) is tree
    assert loss_scale.unscale(tree) is tree
    assert loss_scale.adjust(False) is loss_scale
    assert jax.make_jaxpr(step)(tree).eqns == []


# --- Values: abstract or frozen, copied, pickled, mapped over, donated ---


class WithoutAdjust(jls.LossScale):
    def __call__(self):
        return jnp.float32(1)

    def get_config(self):
        return {}


@pytest.mark.parametrize("kind", [jls.LossScale, WithoutAdjust])
def test_abstract_class_cannot_be_instantiated(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind()


@each_kind
def test_loss_scales_are_frozen(make):
    loss_scale = make()
    for name in [field.name for field in dataclasses.fields(loss_scale)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(loss_scale, name, 1)


@each_kind
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda loss_scale: pickle.loads(pickle.dumps(loss_scale))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_duplicate_keeps_configuration_and_state(make, duplicate):
    loss_scale = make().adjust(False).adjust(True)
    copied = duplicate(loss_scale)
    assert jax.tree.structure(copied) == jax.tree.structure(loss_scale)
    chex.assert_trees_all_equal(copied, loss_scale, strict=True)
    chex.assert_trees_all_equal(copied.update(np.float32(1)), loss_scale.update(np.float32(1)), strict=True)


STAND_INS: dict[str, Any] = {
    "string": "bad",
    "none": None,
    "shape": jax.ShapeDtypeStruct((), jnp.float32),
    "nan": np.nan,
    "below_the_floor": 0.0,
    "object": object(),
}


@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=STAND_INS)
@pytest.mark.parametrize("kind", [kind for kind in ONE_OF_EACH if kind not in ("no_op", "users_own")])
def test_unflatten_is_not_construction(kind, stand_in):
    loss_scale = ONE_OF_EACH[kind]()
    leaves, structure = jax.tree.flatten(loss_scale)
    mapped = jax.tree.map(lambda leaf: stand_in, loss_scale)
    assert structure.flatten_up_to(mapped) == [stand_in] * len(leaves)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert vars(rebuilt) == vars(loss_scale)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("fixed", [".loss_scale_value"]),
        ("no_op", []),
        ("dynamic", [".current_loss_scale", ".num_good_steps"]),
        ("dynamic_full", [".current_loss_scale", ".num_good_steps", ".hysteresis_left"]),
    ],
)
def test_leaves_have_their_names_as_paths(kind, leaves):
    paths = jax.tree_util.tree_leaves_with_path(ONE_OF_EACH[kind]())
    assert [jax.tree_util.keystr(path) for path, _ in paths] == leaves


@each_kind
def test_eval_shape_sees_the_state(make):
    shapes = jax.eval_shape(make)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, make())
    assert jax.tree.structure(shapes) == jax.tree.structure(make())


@each_kind
def test_fresh_state_shares_no_buffer_and_can_be_donated(make):
    first, second = make(), make()
    leaves = jax.tree.leaves((first, second))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    donating = jax.jit(lambda loss_scale, grad: loss_scale.update(grad), donate_argnums=0)
    expected, _ = second.update(np.float32(np.nan))
    moved, _ = donating(first, np.float32(np.nan))
    chex.assert_trees_all_equal(moved, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    donating(moved, np.float32(1))


# --- Under the transformations of JAX ---


@each_kind
def test_one_trace_over_many_steps(make):
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda loss_scale, grads: loss_scale.update(grads), n=1))
    loss_scale = fresh = make()
    for grad in grads_of("TTFTFFTT"):
        loss_scale, _ = step(loss_scale, grad)
    chex.assert_trees_all_equal_shapes_and_dtypes(loss_scale, fresh)
    assert [leaf.weak_type for leaf in jax.tree.leaves(loss_scale)] == [False] * len(jax.tree.leaves(fresh))


def test_default_constructor_compiles_once():
    update = jax.jit(Dynamic.update)
    loss_scale = Dynamic()
    for grad in grads_of("TFT"):
        loss_scale, _ = update(loss_scale, grad)
    assert update._cache_size() == 1


def test_new_fixed_value_does_not_recompile():
    chex.clear_trace_counter()
    unscale = jax.jit(chex.assert_max_traces(lambda loss_scale, grads: loss_scale.unscale(grads), n=1))
    assert [float(unscale(Fixed(value), np.float32(8))) for value in (1, 2, 8)] == [8, 4, 1]


@each_kind
def test_scan_is_the_loop(make):
    grads = grads_of("TTTFFTFTT")
    _, scales = jax.lax.scan(lambda s, grad: (s := s.update(grad)[0], s()), make(), jnp.stack(grads))
    assert scales.tolist() == scales_over(make(), grads, UPDATES["eager"])


@each_kind
def test_vmap_over_flags(make):
    loss_scale, flags = make(), jnp.array([True, False, True])
    batch = jax.vmap(loss_scale.adjust)(flags)
    batch = jax.vmap(lambda one, flag: one.adjust(flag))(batch, ~flags)
    expected = [loss_scale.adjust(flag).adjust(not flag)() for flag in flags.tolist()]
    scales = jax.vmap(lambda one, flag: one(), axis_size=3)(batch, flags)
    chex.assert_trees_all_equal(scales, jnp.stack(expected))


@pytest.mark.parametrize(
    ("make", "scales", "after_overflow"),
    named(
        [
            ("fixed", Fixed, [1, 8, 1024], [1, 8, 1024]),
            ("by_hand", lambda s: replace(Dynamic(), current_loss_scale=s), [1, 8, 9], [1, 4, 4.5]),
        ]
    ),
)
def test_vmap_over_scales(make, scales, after_overflow):
    scales = jnp.array(scales, jnp.float32)
    batch = jax.vmap(make)(scales)
    unscaled = jax.vmap(lambda loss_scale, grad: loss_scale.unscale(grad))(batch, 2 * scales)
    chex.assert_trees_all_equal(unscaled, jnp.full(3, 2.0))
    moved = jax.vmap(lambda loss_scale: loss_scale.update(jnp.nan)[0]())(batch)
    chex.assert_trees_all_equal(moved, jnp.array(after_overflow, jnp.float32))


def test_fixed_takes_an_array_as_it_is():
    assert Fixed(jnp.array([0.5, 8]))().tolist() == [0.5, 8]


@each_kind
def test_update_agrees_along_a_named_axis(make):
    def step(grad):
        loss_scale, should_apply = make().update(grad, axis_name="devices")
        return loss_scale(), should_apply

    expected, should_apply = make().update(np.float32(np.nan))
    scales, applied = jax.vmap(step, axis_name="devices", out_axes=0)(jnp.stack(grads_of("TFT")))
    assert scales.tolist() == [float(expected())] * 3
    assert applied.tolist() == [bool(should_apply)] * 3


def test_the_config_of_a_batch_is_refused():
    with pytest.raises(ValueError, match="loss_scale_value"):
        jls.serialize(jax.vmap(jls.FixedLossScale)(jnp.array([1.0, 2.0])))
