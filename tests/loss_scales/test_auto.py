"""Comparison of `AutoLossScale` with a plain Python reference, and its behavior for various gradients."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import F32_MAX, named, with_rule_state

import jax_lossscale as jls

Auto = jls.AutoLossScale
STATE = ("current_loss_scale", "log2_peak", "log2_margin", "log2_allowance")
adjust = jax.jit(Auto.adjust)


def state_of(loss_scale):
    return {name: np.asarray(getattr(loss_scale, name)).item() for name in STATE}


@partial(jax.jit, static_argnums=3)
def run(loss_scale, largest, first, float16=True):
    """Return the scale before each step, whether each step was finite, and the final loss scale.

    ``largest`` contains the unscaled gradient magnitudes, and ``first`` the unscaled values that overflow first. If
    ``float16`` is True, the scaled gradients are rounded to float16.
    """

    def step(loss_scale, true):
        largest, first = true
        scale = loss_scale()
        finite = first * scale < 65520
        scaled = largest * scale
        seen = (scaled.astype(jnp.float16).astype(jnp.float32) if float16 else scaled) / scale
        return loss_scale.adjust(finite, largest=jnp.where(finite, seen, jnp.nan)), (scale, finite)

    final, (scales, finite) = jax.lax.scan(step, loss_scale, (largest, first))
    return scales, finite, final


def of_log2(log2_largest, log2_inside=0.0):
    """Return the arguments ``largest`` and ``first`` of `run` for base-2 logarithms."""
    log2_largest, log2_inside = np.broadcast_arrays(log2_largest, log2_inside)
    return np.exp2(log2_largest).astype(np.float32), np.exp2(log2_largest + log2_inside).astype(np.float32)


def test_initial_state_of_the_automatic_scale():
    assert Auto().needs_largest
    assert state_of(Auto(8.0)) == dict(zip(STATE, (8, -127, 87, 0), strict=True))
    assert (Auto()(), Auto().lower_bound, Auto().upper_bound) == (2**8, 2**-24, None)


# --- Comparison with a reference in plain Python ---


def oracle(config, state, finite, largest):
    """Return the state after a step, and whether it depends on the rounding of a logarithm, in plain Python."""
    floor, ceiling, headroom = config
    scale, peak, margin, allowance = (state[name] for name in STATE)
    s, at_most = math.ceil(math.log2(scale)), math.ceil(math.log2(min(ceiling, 2.0**126)))
    no_peak = peak <= -127
    fresh = {"log2_peak": -127, "log2_margin": at_most + 1 - min(at_most, 40), "log2_allowance": 0}

    limit = math.log2(65512) - headroom

    def bits_of_target(peak, margin, allowance):
        return min(limit - peak, at_most + 1) - margin - abs(allowance)

    def after(s, peak, margin, allowance):
        scale = min(max(2.0 ** min(max(s, -126), 126), floor), ceiling)
        return dict(zip(STATE, (scale, peak, margin, allowance), strict=True))

    target = math.floor(bits_of_target(peak, margin, allowance))
    if not finite:
        if no_peak and s > target - 8:
            margin += max(target - (s - 24), 0)
        elif not no_peak and s > target - 8:
            if allowance > 7 and margin > 16:
                margin, allowance = 1, -8
            elif s < target:
                margin = min(margin + target - s + 1, 30 - abs(allowance))
                allowance += 0 <= allowance <= 7
            elif 0 <= allowance <= 7:
                allowance = min(allowance + (1 if margin + allowance <= 5 else 2), 8)
            elif allowance > 7:
                margin += 8
            else:
                margin = 1
        new = after(min(s, math.floor(bits_of_target(peak, margin, allowance))) - 8, peak, margin, allowance)
        new |= fresh if scale <= floor else {}
        return {**new, STATE[0]: min(new[STATE[0]], scale)}, False

    if not 0 <= largest < math.inf:  # The magnitude is invalid, so the state does not change.
        return state, False
    if largest < 2.0**-126:
        margin = max(margin - 1 / 64, fresh["log2_margin"]) if no_peak else margin
        peak = max(peak - 1 / 768, -127)
        bits = bits_of_target(peak, margin, allowance)
        s = min(math.floor(bits), max(s, math.floor(bits) - 1))
    else:
        x = math.log2(largest)
        was_wrong = no_peak or x > peak + 8
        peak = max(peak - (1 / 64 if allowance == 0 else 1 / 768), x)
        margin = 1 if was_wrong else max(margin - (1 / 64 if allowance == 0 else 0), 1)
        allowance = 0 if was_wrong else math.copysign(max(abs(allowance) - 1 / 768, 0), allowance)
        bits = bits_of_target(peak, margin, allowance)
        s = min(math.floor(bits), max(s + 1, math.floor(bits) - 7))
    is_rounded = abs(bits - round(bits)) < 1e-3 and limit - peak < at_most + 1
    return after(s, peak, margin, allowance), is_rounded


def random_trace(random, steps):
    """Return gradients that drift, jump and vanish, with overflows that depend on the scale or occur at random."""
    log2 = random.uniform(-40, 10) + np.cumsum(random.normal(size=steps) * 0.3 + (random.random(steps) < 0.01) * 8)
    log2 += random.normal(size=steps) * random.uniform(0, 2)
    largest = np.exp2(np.clip(log2 - 0.05 * np.arange(steps), -140, 126))
    largest[random.random(steps) < 0.05] = 0
    odd = random.random(steps) < 0.02
    largest[odd] = random.choice([np.nan, np.inf, -1.0, 1e-45, 1e-40, F32_MAX], size=odd.sum())
    if random.random() < 0.5:
        start = random.integers(steps)
        largest[start : start + 80] = random.choice([0.0, np.inf])
    return largest.astype(np.float32)


CONFIGS = {
    "default": {},
    "bounds": {"min_loss_scale": 3.0, "max_loss_scale": 5000.0, "initial_loss_scale": 100.0},
    "high_floor": {"min_loss_scale": 1.0},
    "headroom": {"log2_headroom": 2.5},
}


def checked_step(loss_scale, finite, largest):
    """Check a step against the reference. Return the loss scale and whether the scale may differ due to rounding."""
    config = (loss_scale.min_loss_scale, loss_scale.max_loss_scale or math.inf, loss_scale.log2_headroom)
    before = state_of(loss_scale)
    loss_scale = adjust(loss_scale, finite, largest=largest)
    after = state_of(loss_scale)
    expected, is_rounded = oracle(config, before, finite, float(largest))
    if is_rounded:
        expected["current_loss_scale"] = after["current_loss_scale"]
    assert after == pytest.approx(expected, rel=1e-5, abs=1e-5), (before, finite, largest)
    assert after["current_loss_scale"] == expected["current_loss_scale"]
    return loss_scale, is_rounded


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_steps_equal_the_plain_python_reference(seed, config):
    random = np.random.default_rng([seed, len(config)])
    loss_scale = Auto(**config)
    rounded = 0
    for largest in random_trace(random, 600):
        by_chance = random.random() < 0.3
        fits = float(largest) * float(loss_scale()) * 8 < 65520
        loss_scale, is_rounded = checked_step(loss_scale, fits if np.isfinite(largest) else by_chance, largest)
        rounded += is_rounded
    assert rounded < 10


def random_state(random):
    """Return a random scale and the other numbers of a random state, which may be unreachable.

    The scale is often close to the target, where edge cases occur.
    """
    peak, margin, allowance = (
        random.choice([-127, random.uniform(-60, 20)]),
        random.choice([0, 0.3, 1, 16, 16.3, random.uniform(0, 35), random.uniform(80, 140)]),
        random.choice([0, 0.001, -0.001, 3.97, 4, 4.03, 6, 7, 7.01, -8, random.uniform(-8, 9)]),
    )
    beside = math.floor(16 - peak - margin - abs(allowance)) + random.choice([-17, -9, -8, -7, -2, -1, 0, 1])
    exponent = random.choice([np.clip(beside, -30, 126), random.integers(-30, 126)])
    return np.float32(2.0**exponent * random.choice([1, 1, 1.5])), {
        "log2_peak": np.float32(peak),
        "log2_margin": np.float32(margin),
        "log2_allowance": np.float32(allowance),
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_steps_from_random_states_equal_the_plain_python_reference(config):
    random = np.random.default_rng(len(config))
    for largest in random_trace(random, 1000):
        scale, numbers = random_state(random)
        near = np.exp2(numbers["log2_peak"] + random.normal(8, 2))
        finite = random.random() < 0.5
        before = with_rule_state(Auto(**config, current_loss_scale=scale), **numbers)
        checked_step(before, finite, random.choice([largest, near]))


@pytest.mark.parametrize(("allowance", "decay"), [(0.0, 1 / 64), (8.0, 1 / 768)])
def test_decay_per_step(allowance, decay):
    """The tolerance is smaller than that of the comparison with the reference."""
    numbers = {"log2_peak": np.float32(0), "log2_margin": np.float32(8), "log2_allowance": np.float32(allowance)}
    before = with_rule_state(Auto(), **numbers)
    after = state_of(adjust(before, True, largest=2.0**-20))
    assert after["log2_peak"] == np.float32(-decay)
    assert after["log2_margin"] == (8 if allowance else np.float32(8 - decay))
    assert after["log2_allowance"] == (np.float32(allowance - decay) if allowance else 0)


@pytest.mark.parametrize("log2_largest", [-20.5, -10.0, 0.3])
def test_one_nan_lowers_the_scale_by_9_bits_and_then_by_1_bit_for_up_to_768_steps(log2_largest):
    largest = np.full(800, 2.0**log2_largest, np.float32)
    settled = run(Auto(), largest, largest)[2]
    lowered = adjust(settled, False)
    scales, finite, _ = run(lowered, largest, largest)
    assert finite.all()
    bits_below = np.log2(settled() / scales).round().astype(int)
    assert bits_below[:8].tolist() in ([9, 8, 7, 6, 5, 4, 3, 2], [9, 7, 6, 5, 4, 3, 2, 1])
    assert set(bits_below[8:769]) <= {0, 1}
    assert set(bits_below[769:]) == {0}


def test_scales_between_powers_of_two_count_as_the_next_power():
    for scale, counted in (4.0, 4.0), (np.nextafter(np.float32(4), np.float32(5)), 8.0), (7.0, 8.0):
        before = replace(Auto(), current_loss_scale=jnp.float32(scale))
        assert adjust(before, False, largest=np.nan)() == counted / 2**8


def test_gradient_more_than_8_bits_above_the_peak_resets_margin_and_allowance():
    numbers = {"log2_peak": np.float32(-20), "log2_margin": np.float32(5), "log2_allowance": np.float32(3)}
    before = with_rule_state(Auto(), **numbers)
    for largest, expected in (2.0**-12, (5, 3)), (1.001 * 2.0**-12, (1, 0)):
        after = adjust(before, True, largest=largest)
        assert (round(float(after.log2_margin)), round(float(after.log2_allowance))) == expected


@pytest.mark.parametrize("zeros", [0, 49])
def test_limit_below_the_ceiling_is_found(zeros):
    """The gradients would allow a scale of 2**29, but the ceiling is 2**15, and scales above 2**8 overflow."""
    largest = np.where(np.arange(20_000) % (zeros + 1) == 0, 2.0**-14.5, 0).astype(np.float32)
    scales, finite, _ = run(Auto(max_loss_scale=2.0**15), largest, largest * 2.0**22)
    assert np.sum(~np.asarray(finite)) <= 40
    assert np.max(np.asarray(scales)) <= 2.0**15
    seen = np.asarray(finite) & (largest > 0)
    assert np.mean(np.log2(np.asarray(scales)[seen])) >= 6


# --- Number of steps until the scale reaches its limit ---


def at_rest(loss_scale, steps, finite, largest):
    """Return the loss scale after a number of identical steps."""
    return jax.lax.fori_loop(0, steps, lambda _, s: s.adjust(finite, largest=largest), loss_scale)


BEGINNINGS = {
    "fresh": Auto,
    "after_300_zeros": lambda: at_rest(Auto(), 300, True, 0.0),
    "from_2**120": lambda: Auto(2.0**120),
    "after_3000_nans": lambda: at_rest(Auto(), 3000, False, jnp.nan),
    "after_3000_nans_in_a_good_run": lambda: at_rest(at_rest(Auto(), 200, True, 1e-3), 3000, False, jnp.nan),
}


@pytest.mark.parametrize("inside", [0, 6])
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_scale_reaches_its_limit_in_16_steps(beginning, inside):
    exponents = np.repeat(np.arange(3, 67), 3)  # Each exponent is that of the highest scale without overflow.
    log2_first = 15 - exponents + np.tile([0.0, 0.4, 0.9], 64)
    largest, first = of_log2(np.tile(log2_first - inside, (40, 1)), inside)
    scales, finite, _ = jax.vmap(run, in_axes=(None, 1, 1), out_axes=(1, 1, 0))(beginning(), largest, first)
    log2_scales = np.log2(np.asarray(scales))
    arrived = (log2_scales >= exponents - 6) & (log2_scales <= exponents)
    assert np.all(np.any(arrived[:17], axis=0))
    # After 17 steps, the scale stays in this range, except for steps in which larger values inside the backward pass
    # overflow.
    assert np.all(np.asarray(finite)[17:].sum(axis=0) >= 23 - 2 * (inside > 0))
    assert np.all(log2_scales[17:][np.asarray(finite)[17:]] <= np.broadcast_to(exponents, (23, 192))[finite[17:]])


# --- Changing gradients: each row contains a trace and the limits of skipped steps and of unused bits ---

STEPS = 4000
TIME = np.arange(STEPS) / STEPS
MIDDLE = np.where(TIME < 0.5, 0.0, 8.0)


def noise(deviation, seed=0):
    return np.random.default_rng(seed).normal(size=STEPS) * deviation


FOLLOWED = named(
    [
        ("constant", of_log2(np.full(STEPS, -6.3)), 0, 2),
        ("decaying", of_log2(-14 * TIME), 0, 2),
        ("much_noise", of_log2(-9 + noise(1.5)), 8, 6),
        ("growing_with_noise", of_log2(-20 + 14 * TIME + noise(0.5)), 4, 4),
        ("jump_up", of_log2(-14 + MIDDLE), 1, 2.1),
        ("jump_down", of_log2(-6 - MIDDLE), 0, 3),
        ("spikes_with_noise", of_log2(-9 + 7.0 * (np.arange(STEPS) % 1000 == 700) + noise(0.5)), 8, 4),
        ("every_second_step_zero", of_log2(np.where(np.arange(STEPS) % 2, -np.inf, -6.3)), 0, 4),
        ("inside_2**12", of_log2(np.full(STEPS, -20.3), 12), 8, 1),
        ("inside_with_noise", of_log2(-20 + noise(0.5), 6), 8, 4),
    ]
)


@pytest.mark.parametrize(("trace", "most_skips", "most_bits"), FOLLOWED)
def test_scale_follows_changing_gradients(trace, most_skips, most_bits):
    largest, first = trace
    for float16 in True, False:
        scales, finite = map(np.asarray, run(Auto(), largest, first, float16)[:2])
        with np.errstate(divide="ignore"):
            unused = np.log2(65504 / (first.astype(float) * scales))
        assert np.sum(~finite) <= most_skips
        assert np.mean(unused[finite & np.isfinite(unused)]) <= most_bits


# --- Arbitrary inputs ---

ODD_NUMBERS = [0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 1e-8, 1.0, 65504.0, 3.4e38, math.inf, math.nan, -1.0]


@settings(max_examples=40, deadline=None)
@given(
    scale=st.floats(2.0**-126, F32_MAX, width=32),
    steps=st.lists(st.tuples(st.booleans(), st.sampled_from(ODD_NUMBERS)), min_size=1, max_size=60),
    repeat=st.sampled_from([1, 1, 30]),
)
def test_scale_stays_a_power_of_two_between_floor_and_ceiling(scale, steps, repeat):
    loss_scale = replace(Auto(max_loss_scale=2.0**100), current_loss_scale=scale)
    highest = max(scale, 2.0**100)
    for finite, largest in steps * repeat:
        loss_scale = adjust(loss_scale, finite, largest=largest)
        state = state_of(loss_scale)
        now = state["current_loss_scale"]
        assert all(math.isfinite(value) for value in state.values())
        assert state["log2_margin"] >= 1
        assert 0 < now <= highest
        if finite:
            assert 2.0**-24 <= now <= 2.0**100 or not 0 <= largest < math.inf
        assert math.frexp(now)[0] == 0.5 or now == np.float32(scale)
        highest = now if now <= 2.0**100 else highest
        highest = max(highest, 2.0**100)


def test_adjust_is_exact_at_every_power_of_two():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128))  # `np.exp2` returns an inexact 2**127 in float32.
    at_target = {"log2_peak": np.float32(-126), "log2_margin": np.float32(1)}  # The target is 2**126.
    loss_scale = with_rule_state(Auto(min_loss_scale=2.0**-126), **at_target)

    def after(finite):
        step = lambda scale: replace(loss_scale, current_loss_scale=scale).adjust(finite, largest=2.0**-126)()  # noqa: E731
        return jax.jit(jax.vmap(step))(powers)

    risen = np.maximum(2 * powers.astype(float), 2.0 ** (126 - 7))
    np.testing.assert_array_equal(after(True), np.minimum(risen, 2.0**126))
    on_the_climb = np.where(powers < 2.0**126, powers / 2**10, 2.0**126 / 2**9)
    fallen = np.where(powers <= 2.0**118, powers / 2**8, on_the_climb)
    np.testing.assert_array_equal(after(False), np.maximum(fallen, 2.0**-126))


@pytest.mark.parametrize("largest", [None, np.nan, np.inf, -1.0], ids=str)
def test_scale_stays_or_decreases_without_a_measured_gradient(largest):
    known = at_rest(Auto(), 8, True, 2.0**-20)
    for loss_scale in Auto(), known:
        stayed = at_rest(loss_scale, 5000, True, largest)
        assert state_of(stayed) == state_of(loss_scale)
    assert float(adjust(known, False, largest=largest)()) == float(known()) / 2**9


# --- Derivatives and subclasses ---


def test_derivatives_of_adjust_are_zero():
    @jax.jit
    def scale_after(scale, numbers, largest):
        loss_scale = with_rule_state(Auto(current_loss_scale=scale), **numbers)
        return loss_scale.adjust(True, largest=largest)()

    numbers = {"log2_peak": -127.0, "log2_margin": 0.0}
    for largest in 0.0, 2.0**-20, np.inf, np.nan:
        derivatives = jax.grad(scale_after, (0, 1, 2))(8.0, numbers, largest)
        chex.assert_trees_all_equal(derivatives, (0.0, dict.fromkeys(numbers, 0.0), 0.0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CountingAutoLossScale(Auto):
    num_steps: jax.Array = field(default_factory=lambda: jnp.int32(0), kw_only=True)

    def adjust(self, grads_finite, largest=None):
        return replace(super().adjust(grads_finite, largest), num_steps=self.num_steps + 1)


def test_a_subclass_can_have_an_additional_leaf():
    counting, auto, step = CountingAutoLossScale(), Auto(), jax.jit(CountingAutoLossScale.adjust)
    for finite in (True, True, False, True):
        counting, auto = step(counting, finite, largest=2.0**-10), adjust(auto, finite, largest=2.0**-10)
    assert counting.num_steps == 4
    assert state_of(counting) == state_of(auto)
