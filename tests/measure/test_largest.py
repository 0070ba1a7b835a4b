"""Comparison with NumPy of the fused pass that computes the largest gradient magnitude and checks finiteness."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import FLOAT8S, enable_x64, set_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kinds import slow_except

import jax_lossscale as jls
from jax_lossscale._measure import finite_and_largest, largest
from jax_lossscale._measure.leaves import as_read

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users]

DTYPES = (*FLOAT8S, "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
BAD = (np.nan, np.inf, -np.inf)
LARGEST_FLOAT32 = np.finfo(np.float32).max


def oracle(tree, scale=1.0):
    """Return (finite, largest magnitude), computed by NumPy in float64. See `number` for subnormal magnitudes."""
    largest_so_far = 0.0
    for leaf in jax.tree.leaves(tree):
        for part in leaf.real, leaf.imag if np.iscomplexobj(leaf) else leaf:
            exact = np.asarray(part).astype(np.float64)
            limit = np.finfo(np.float64 if part.dtype == np.float64 else np.float32).max
            with np.errstate(over="ignore"):
                # `unscale` clips the scale to this range.
                exact = np.abs(exact) / np.clip(np.float64(scale), 2.0**-126, 2.0**126)
            if not (exact <= limit).all():  # The comparison is False if the array contains a NaN.
                return False, None
            largest_so_far = max(largest_so_far, np.max(exact, initial=0.0))
    return True, number(np.float32(min(largest_so_far, LARGEST_FLOAT32)))


def number(magnitude):
    """Return the magnitude as a Python float, or 0 if it is subnormal, because XLA flushes some subnormals to zero."""
    return 0.0 if magnitude < np.finfo(np.float32).tiny else float(magnitude)


def answer_of(found):
    """Check the shapes and dtypes of a result, and convert it to Python values."""
    finite, magnitude = found
    assert (finite.shape, finite.dtype, magnitude.shape, magnitude.dtype) == ((), jnp.bool_, (), jnp.float32)
    return as_numbers(finite, magnitude)


def as_numbers(finite, magnitude):
    """Return Python values, with None instead of NaN, because NaN is not equal to itself."""
    return bool(finite), None if np.isnan(magnitude) else number(magnitude)


compiled = jax.jit(finite_and_largest)
of_each_member = jax.jit(jax.vmap(finite_and_largest))


def as_pair(reading, tree):
    """Run one implementation under `jax.jit` and return (finite, largest magnitude)."""
    leaves = [leaf for leaf in map(as_read, jax.tree.leaves(tree)) if leaf.size]
    magnitude = jax.jit(reading)(*leaves)
    return magnitude < jnp.inf, jnp.where(magnitude < jnp.inf, magnitude, jnp.nan)


READINGS = {
    "eager": finite_and_largest,
    "other platforms": functools.partial(as_pair, largest.anywhere),
    "CPU": functools.partial(as_pair, largest.on_cpu),
    "separate leaves": functools.partial(as_pair, largest.of_each),
}


every_reading = pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)


@st.composite
def leaves(draw, dtype):
    """Draw an array whose values lie between the extremes of its dtype, with at most one nonfinite element."""
    limits = jnp.finfo(dtype)
    smallest, greatest = float(limits.smallest_normal), float(limits.max)
    shape = draw(st.sampled_from([(), (3, 43)]))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.5, smallest, -3 * smallest, greatest, -greatest, greatest / 2])
    parts = [np.array(draw(st.lists(values, min_size=1, max_size=4))) for _ in range(2)]
    leaf = np.resize(parts[0], shape).astype(dtype)
    if np.iscomplexobj(leaf):
        leaf = (leaf + 1j * np.resize(parts[1], shape).astype(leaf.real.dtype)).astype(dtype)
    bad = draw(st.sampled_from([None, None, *BAD]))
    if bad is not None:
        part = leaf.imag if np.iscomplexobj(leaf) and draw(st.booleans()) else leaf.real
        part.reshape(-1)[draw(st.integers(0, leaf.size - 1))] = bad
    return leaf


@pytest.mark.parametrize("dtype", slow_except(["float8_e4m3fn", "float8_e5m2fnuz", *DTYPES[-6:-1]], DTYPES))
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=15)
def test_result_equals_numpy_for_random_leaves(dtype, data):
    leaf = data.draw(leaves(dtype))
    tree = {"frozen": None, "other": np.float16([1e-4, -2e-4]), "leaf": leaf, "step": 3}
    with enable_x64(True):
        expected = oracle([tree["other"], leaf])
        assert answer_of(finite_and_largest(tree)) == expected
        assert answer_of(compiled(tree)) == expected
        assert bool(jls.all_finite(tree)) == expected[0]
        other = np.zeros_like(leaf) if expected[0] else leaf
        finite, magnitude = map(np.asarray, of_each_member([np.stack([leaf, other])]))
        assert as_numbers(finite[0], magnitude[0]) == oracle([leaf])


POWERS_OF_TWO = np.ldexp(np.float32(1), np.arange(-149, 128))  # The smallest 23 powers of two are subnormal.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_result_equals_numpy_for_every_power_of_two_scale(dtype):
    at_every_scale = jax.jit(lambda tree: jax.lax.map(lambda scale: finite_and_largest(tree, scale), POWERS_OF_TWO))
    for value in float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).smallest_normal), 1.5, *BAD:
        leaf = np.array([0, 0, -value], dtype)
        finite, magnitudes = map(np.ndarray.tolist, map(np.asarray, at_every_scale([leaf])))
        assert list(map(as_numbers, finite, magnitudes)) == [oracle([leaf], scale) for scale in POWERS_OF_TWO]


@pytest.mark.parametrize("scale", [3.0, 0.7, 1e-30, 12345.678])
def test_largest_equals_that_of_the_unscaled_gradients_bitwise(scale):
    tree = {"a": np.linspace(-9, 7, 2**16 + 5, dtype=np.float32), "b": np.float16([4.5, -8.5])}
    loss_scale = jls.FixedLossScale(1.0)
    for factor in 1, 2.0**100:
        scaled = {"a": tree["a"] * np.float32(factor), "b": tree["b"]}
        divided = jax.jit(lambda tree, scale: type(loss_scale)(scale).unscale(tree))(scaled, jnp.float32(scale))
        finite, magnitude = finite_and_largest(scaled, jnp.float32(scale))
        assert finite == jls.all_finite(divided)
        largest_there = max(float(jnp.abs(leaf).max()) for leaf in divided.values()) if finite else None
        assert as_numbers(finite, magnitude) == (bool(finite), largest_there)


SIZE = 2**17 + 7  # This size is not a multiple of a vector, tile or block size.
POSITIONS = sorted({0, SIZE - 1, SIZE // 2} | {n + offset for n in (8, 16, 128, 2**15, 2**16) for offset in (-1, 0, 1)})


@every_reading
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_one_element_anywhere_in_a_large_leaf_is_found(dtype, read):
    read = jax.jit(read)
    background = np.ones(SIZE, dtype)
    for position in POSITIONS:
        for value, expected in (-2.5, (True, 2.5)), (7.0, (True, 7.0)), *((bad, (False, None)) for bad in BAD):
            leaf = background.copy()
            leaf[position] = value
            assert answer_of(read([leaf, np.zeros(3, np.float32)])) == expected, (position, value)


@every_reading
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", [None, np.nan])
def test_elements_with_an_overflowing_sum_are_finite(dtype, bad, read):
    leaf = np.full(SIZE, jnp.finfo(dtype).max, dtype)
    if bad is not None:
        leaf[2**15] = bad
    assert answer_of(read([leaf, -leaf])) == oracle([leaf])


@every_reading
def test_one_element_of_one_of_many_leaves_is_found(read):
    shapes = [(200, 200), (2**15 + 3,), (7, 3), ()]
    tree = [np.ones(shapes[n % 4], ("float16", "bfloat16", "float32", "complex64")[n // 4 % 4]) for n in range(120)]
    read = jax.jit(read)
    assert answer_of(read(tree)) == (True, 1.0)
    for n in range(0, len(tree), 7):
        for value in -3.0, BAD[n % 3]:
            leaf = tree[n].copy()
            leaf[(-1,) * leaf.ndim] = value
            assert answer_of(read([*tree[:n], leaf, *tree[n + 1 :]])) == oracle([leaf]), n  # All other elements are 1.


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, (True, 0.0)),
        ([None, 3, True, "adam", len, jnp.arange(3)], (True, 0.0)),
        ([jnp.zeros((0, 3)), jnp.zeros(0, jnp.float16)], (True, 0.0)),
        ([np.zeros(2, jax.dtypes.float0), jax.random.key(0), jnp.zeros(3)], (True, 0.0)),
        ([1.5, jnp.zeros(0)], (True, 1.5)),
        (complex(3, -4), (True, 4.0)),
        (float("nan"), (False, None)),
        # These numbers are subnormal in float16, but normal in float32.
        (np.float16([2**-24, -(2**-23)]), (True, 2.0**-23)),
        (np.float32([-(2.0**-126)]), (True, 2.0**-126)),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_result_for_pytrees_with_other_leaf_types(tree, expected):
    assert answer_of(finite_and_largest(tree)) == expected


def test_float64_above_float32_range_is_clipped_to_the_largest_float32():
    with enable_x64(True):
        for value in 1e300, -1e39, float(LARGEST_FLOAT32) * (1 + 2.0**-26):
            assert answer_of(finite_and_largest(np.array([value, 1.0]))) == (True, float(LARGEST_FLOAT32))
        assert answer_of(finite_and_largest(np.array([1e308]), 0.01)) == (False, None)


def test_result_has_a_zero_derivative():
    assert jax.grad(lambda x: finite_and_largest(x, x[0])[1] + x[0])(jnp.array([2.0, 3.0])).tolist() == [1, 0]


def test_vmap_over_gradients_and_scales():
    grads = jnp.array([[1.0, -4.0], [jnp.inf, 1.0], [3.0, 0.0]])
    finite, magnitude = jax.jit(jax.vmap(finite_and_largest))(grads, jnp.array([2.0, 2.0, 4.0]))
    assert list(map(as_numbers, finite, magnitude)) == [(True, 2.0), (False, None), (True, 0.75)]


# --- Tests on a mesh of eight devices ---

SPECS = [P("x"), P(None, "x"), P()]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda axis_type: axis_type.name)
def test_results_on_a_mesh(axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    with set_mesh(mesh):
        for shape in (16, 8), (512, 128):
            tree = [jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec)) for spec in SPECS * 4]
            assert answer_of(compiled(tree, np.float32(2))) == (True, 0.5)
            for value, expected in (-6.0, (True, 3.0)), (np.nan, (False, None)):
                spoiled = np.ones(shape, np.float32)
                spoiled[13, 3] = value
                tree[4] = jax.device_put(spoiled, tree[4].sharding)
                assert answer_of(compiled(tree, np.float32(2))) == expected


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(8, 3), (8, 2**16)], ids=["small", "large"])
def test_shards_agree_under_shard_map(shape, check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    values = np.ones(shape, np.float32)
    values[5, 1] = -7

    def of_shards(leaf, replicated):
        return finite_and_largest([leaf, replicated], jnp.float32(2), axis_name="x")

    specs = {"in_specs": (P("x"), P()), "out_specs": (P(), P())}
    mapped = jax.jit(jax.shard_map(of_shards, mesh=mesh, check_vma=check_vma, **specs))
    with set_mesh(mesh) if check_vma else contextlib.nullcontext():
        placed = jax.device_put(values, NamedSharding(mesh, P("x")))
        same = jax.device_put(np.ones(2**16, np.float16), NamedSharding(mesh, P()))
        assert answer_of(mapped(placed, same)) == (True, 3.5)
        values[3, 2] = np.inf
        assert answer_of(mapped(jax.device_put(values, placed.sharding), same)) == (False, None)
