"""Rounding of float32 weights to 16-bit parameters, compared with tables of all 16-bit numbers in NumPy.

The tests use the default options of XLA, which removes casts to 16 bits and back.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_lossscale._sixteen_bit import rounding

pytestmark = pytest.mark.as_for_users

DTYPES = {"bfloat16": jnp.dtype(jnp.bfloat16), "float16": jnp.dtype(jnp.float16)}
# All nonnegative finite numbers of each dtype, in increasing order. The index of a number is its bits.
NUMBERS = {
    name: np.arange(infinity, dtype=np.uint16).view(DTYPES[name]).astype(np.float64)
    for name, infinity in {"bfloat16": 0x7F80, "float16": 0x7C00}.items()
}
LARGEST = {name: numbers[-1] for name, numbers in NUMBERS.items()}
KEYS = rounding.keys_of_step(np.uint32(1), 2)(3)
MODES = {"eager": lambda function: function, "jit": jax.jit}

both_dtypes = pytest.mark.parametrize("name", DTYPES)
both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def random_weights(name):
    """Return random bits and random numbers in the range of the dtype."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    low, high = np.log2(NUMBERS[name][1]) - 18, np.log2(LARGEST[name]) + 0.5
    magnitudes = np.exp2(rng.uniform(max(low, -149), min(high, 127.9), 20_000))
    return np.concatenate([bits[np.isfinite(bits)], (magnitudes * rng.choice([-1, 1], 20_000)).astype(np.float32)])


def ties(name):
    """Return numbers in the middle between two 16-bit numbers, or at the limit of saturation, with both signs."""
    numbers = np.append(NUMBERS[name], 2 * NUMBERS[name][-1] - NUMBERS[name][-2])
    middle = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)[::-7]
    return np.concatenate([middle, -middle])


def lower_and_fraction(weights, name):
    """Return the bits of the largest number that does not exceed the magnitude, and the position up to the next one."""
    magnitudes, numbers = np.abs(weights.astype(np.float64)), NUMBERS[name]
    lower = np.searchsorted(numbers, magnitudes, side="right") - 1
    above = np.minimum(lower + 1, len(numbers) - 1)
    distance = np.where(above > lower, numbers[above] - numbers[lower], np.inf)
    return lower, (magnitudes - numbers[lower]) / distance


def nearest(weights, name):
    """Return the nearest 16-bit numbers, ties away from zero, without numbers beyond the largest finite one."""
    lower, fraction = lower_and_fraction(weights, name)
    bits = lower + (fraction >= 0.5)
    return (bits | np.where(np.signbit(weights), 0x8000, 0)).astype(np.uint16)


def bits_of(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}")


@both_modes
@both_dtypes
def test_weights_are_rounded_to_nearest_with_ties_away_from_zero(name, mode):
    weights = np.concatenate([random_weights(name), ties(name), np.float32([0.0, -0.0])])
    params, _ = mode(lambda weights: rounding.split(weights, DTYPES[name]))(weights)
    assert params.dtype == DTYPES[name]
    np.testing.assert_array_equal(bits_of(params), nearest(weights, name))


@both_modes
def test_bfloat16_weights_are_restored_exactly(mode):
    weights = np.concatenate([random_weights("bfloat16"), ties("bfloat16"), np.float32([0.0, -0.0])])
    weights = weights[np.abs(weights) < np.uint32(0x7F7F8000).view(np.float32)]  # larger weights saturate
    params, remainders = mode(lambda weights: rounding.split(weights, DTYPES["bfloat16"]))(weights)
    np.testing.assert_array_equal(bits_of(mode(rounding.join)(params, remainders)), bits_of(weights))
    # The remainders are the lower bits, with the exception of weights whose parameter is zero.
    is_positive = np.abs(weights) > 1e-38
    np.testing.assert_array_equal(remainders[is_positive], (bits_of(weights) & 0xFFFF)[is_positive])


@both_modes
def test_float16_weights_are_restored_within_the_stated_errors(mode):
    weights = np.concatenate([random_weights("float16"), ties("float16"), np.float32([0.0, -0.0])])
    weights = weights[np.abs(weights) <= LARGEST["float16"]]
    params, remainders = mode(lambda weights: rounding.split(weights, DTYPES["float16"]))(weights)
    assert remainders.dtype == jnp.int16  # With bfloat16, the dtype is uint16.
    restored = np.asarray(mode(rounding.join)(params, remainders))
    is_normal = np.abs(weights) >= 2.0**-14
    np.testing.assert_array_equal(bits_of(restored)[is_normal], bits_of(weights)[is_normal])
    assert np.abs(restored.astype(np.float64) - weights).max() <= 2.0**-41
    np.testing.assert_array_equal(np.signbit(restored), np.signbit(weights))


def test_every_nan_remains_nan():
    bits = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF])
    for dtype in DTYPES.values():
        params, remainders = rounding.split(bits.view(np.float32), dtype)
        assert np.isnan(np.asarray(params, np.float32)).all()
        assert np.isnan(rounding.join(params, remainders)).all()
        assert np.isnan(np.asarray(rounding.round_stochastically(bits.view(np.float32), dtype, KEYS), np.float32)).all()


@both_modes
@both_dtypes
def test_every_16_bit_number_is_its_own_weight(name, mode):
    """The conversion consists of integer operations, so its derivative is zero."""
    params = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(DTYPES[name])
    is_number = ~np.isnan(params.astype(np.float32))
    exact = params[is_number].astype(np.float32)
    restored, vjp = jax.vjp(mode(rounding.as_float32), params[is_number])
    np.testing.assert_array_equal(bits_of(restored), bits_of(exact))
    assert not np.float32(vjp(restored)[0]).any()
    again, remainders = mode(lambda weights: rounding.split(weights, DTYPES[name]))(exact)
    np.testing.assert_array_equal(bits_of(again), bits_of(params[is_number]))
    assert not remainders.any()
    again = mode(lambda weights: rounding.round_stochastically(weights, DTYPES[name], KEYS))(exact)
    np.testing.assert_array_equal(bits_of(again), bits_of(params[is_number]))


@both_dtypes
def test_the_sign_of_a_small_weight_does_not_depend_on_the_sign_of_its_parameter(name):
    """`optax.apply_updates` does not preserve the sign of a zero parameter."""
    weights = np.float32([2.0**-30, -(2.0**-30)]) if name == "float16" else np.uint32([1, 0x80000001]).view(np.float32)
    params, remainders = rounding.split(weights, DTYPES[name])
    assert not np.asarray(params, np.float32).any()
    np.testing.assert_array_equal(bits_of(rounding.join(params, remainders)), bits_of(weights))
    np.testing.assert_array_equal(bits_of(rounding.join(-params, remainders)), bits_of(weights))


@both_modes
@both_dtypes
def test_updates_lead_exactly_to_the_new_parameters(name, mode):
    weights = random_weights(name)
    weights = weights[(np.abs(weights) < 1e37) & (np.abs(weights) > 1e-34)]  # XLA flushes smaller updates to zero
    factors = np.float32([0.11, -0.9, 1.0, 1.001, -5.0])[np.arange(len(weights)) % 5]
    old, new = (nearest(array, name).view(DTYPES[name]) for array in (weights, weights * factors))

    def applied(old, new):
        return (old + rounding.update_between(old, new)).astype(old.dtype)

    # A zero can have the other sign.
    np.testing.assert_array_equal(np.float32(mode(applied)(old, new)), np.float32(new))
    np.testing.assert_array_equal(bits_of(rounding.update_between(old, old)), np.full(len(old), 0x80000000))


# --- Stochastic rounding ---


def rounded_at(weights, name, counters, seed=0, leaf=0):
    """Return the bits of the weights, rounded at each of the counters."""

    def at(counter):
        keys = rounding.keys_of_step(np.uint32(seed), counter)(leaf)
        return rounding.round_stochastically(weights, DTYPES[name], keys)

    return bits_of(jax.jit(jax.vmap(at))(jnp.asarray(counters, jnp.int32)))


@both_dtypes
def test_stochastic_rounding_is_unbiased_at_all_distances(name):
    """The fraction of weights that are rounded up differs from the position by less than four standard errors."""
    positions = np.concatenate([np.arange(1, 128) / 128, 2.0 ** -np.arange(8, 14), 1 - 2.0 ** -np.arange(8, 14)])
    exponents = [0, -3, 10, -14, -15] if name == "float16" else [0, -3, 100, -100]
    index = np.repeat(np.searchsorted(NUMBERS[name], np.exp2(exponents)) + 1, len(positions))
    lower, spacing = NUMBERS[name][index], NUMBERS[name][index + 1] - NUMBERS[name][index]
    positions = np.tile(positions, len(exponents))
    signs = np.where(np.arange(len(lower)) % 2, -1, 1)
    weights = (signs * (lower + positions * spacing)).astype(np.float32)
    below, fraction = lower_and_fraction(weights, name)
    np.testing.assert_allclose(fraction, positions, atol=2.0**-13)

    counters = np.arange(2**15) - 2**14
    bits = rounded_at(weights, name, counters)
    np.testing.assert_array_equal(bits >> 15, np.broadcast_to(signs < 0, bits.shape))
    is_up = (bits & 0x7FFF) - below
    assert set(np.unique(is_up)) == {0, 1}
    errors = is_up.mean(0) - fraction
    standard_errors = np.sqrt(fraction * (1 - fraction) / len(counters))
    assert np.abs(errors / standard_errors).max() < 4
    # The errors are those of independent random numbers, so rounding is not too regular either.
    assert 0.9 < np.sqrt(np.mean((errors / standard_errors) ** 2)) < 1.1


def correlation(a, b):
    """Return the correlation of two samples in standard errors."""
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)


@both_dtypes
def test_roundings_of_neighbors_leaves_and_steps_are_uncorrelated(name):
    weights = np.full((128, 256), 1 + 0.5 * (NUMBERS[name][np.searchsorted(NUMBERS[name], 1.0) + 1] - 1), np.float32)
    steps = rounded_at(weights, name, range(16)).astype(np.float64)
    assert 0.49 < np.mean(steps == steps.max()) < 0.51
    others = {
        "neighbors in the last axis": (steps[..., 1:], steps[..., :-1]),
        "neighbors in the first axis": (steps[:, 1:], steps[:, :-1]),
        "distant elements": (steps[:, 64:], steps[:, :-64]),
        "consecutive steps": (steps[1:], steps[:-1]),
        "other leaf": (steps, rounded_at(weights, name, range(16), leaf=1).astype(np.float64)),
        "other seed": (steps, rounded_at(weights, name, range(16), seed=1).astype(np.float64)),
        "other leaf and step": (steps[1:], rounded_at(weights, name, range(15), leaf=1).astype(np.float64)),
        "other shape": (steps, rounded_at(weights.T, name, range(16)).swapaxes(1, 2).astype(np.float64)),
    }
    assert {kind: correlation(*pair) for kind, pair in others.items() if abs(correlation(*pair)) > 4} == {}


@pytest.mark.parametrize(("seed", "leaf", "counter"), [(0, 0, 0), (3, 5, 2), (6, 1, 5), (2**32 - 1, 2, -1)])
def test_random_bits_are_a_hash_of_the_seed_the_leaf_the_step_and_the_element(seed, leaf, counter):
    """This hash must not change, because a resumed run has the same random bits as an uninterrupted run."""

    def mixed(number, key=0):
        number = (number ^ number >> 16) * 0x7FEB352D + key & 0xFFFFFFFF
        return (number ^ number >> 15) * 0x846CA68B & 0xFFFFFFFF

    constants = (0x9E3779B9, 0x85EBCA6B)
    key = mixed(mixed(constants[counter % 2] ^ seed) + leaf & 0xFFFFFFFF)
    step = counter * constants[0] & 0xFFFFFFFF
    second = key * constants[1] + step & 0xFFFFFFFF
    expected = [mixed(index ^ key ^ step, second) >> 16 for index in range(100)]
    found = rounding._random_bits(jnp.zeros((4, 25)), rounding.keys_of_step(np.uint32(seed), jnp.int32(counter))(leaf))
    np.testing.assert_array_equal(found.ravel(), expected)


def test_random_bits_are_the_same_eagerly_and_for_every_shape_of_the_same_elements():
    weights = np.random.default_rng(0).normal(size=24).astype(np.float32)
    flat = rounding.round_stochastically(weights, DTYPES["bfloat16"], KEYS)
    for shape in (24, 1), (4, 6), (2, 3, 4):
        array = rounding.round_stochastically(weights.reshape(shape), DTYPES["bfloat16"], KEYS)
        np.testing.assert_array_equal(bits_of(array), bits_of(flat).reshape(shape))
    with jax.disable_jit():
        np.testing.assert_array_equal(rounding.round_stochastically(weights, DTYPES["bfloat16"], KEYS), flat)
    assert bits_of(rounding.round_stochastically(weights[0], DTYPES["bfloat16"], KEYS)) == bits_of(flat)[0]
    large = jax.ShapeDtypeStruct((2, 2**32 + 1), jnp.float32)
    assert jax.eval_shape(rounding._indices, large).shape == large.shape


@both_dtypes
def test_stochastic_rounding_never_makes_a_number_infinite(name):
    largest = LARGEST[name]
    weights = np.float32([largest * (1 + 2.0**-9), -largest * (1 + 2.0**-9), min(10 * largest, 3.4028234e38)])
    params = rounded_at(weights, name, range(100)).view(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(params, np.broadcast_to([largest, -largest, largest], params.shape))
    infinite = rounded_at(np.float32([np.inf, -np.inf]), name, range(3)).view(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(infinite, np.broadcast_to([np.inf, -np.inf], infinite.shape))
