"""Gradients in the range of a dtype: histograms, underflow, and suggested loss scales."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from any_jax import enable_x64, is_older_than, set_mesh, skip_before
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from samples import FLOATS, INF, NAN, random_bits

import jax_lossscale as jls
from jax_lossscale._measure import first_fault
from jax_lossscale.diagnostics import exponent_histogram, nonfinite_report, suggest_loss_scale, underflow_fraction

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("strict_promotion")]


def numpy_histogram(values):
    """Return the histogram by `numpy.frexp` in float64, in which no value of the other dtypes is subnormal."""
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    zero = exact == 0
    subnormal = finite & ~zero & (np.abs(exact) < float(ml_dtypes.finfo(values.dtype).smallest_normal))
    _, exponents = np.frexp(exact[finite & ~zero & ~subnormal])
    return np.unique(exponents - 1, return_counts=True), zero.sum(), subnormal.sum(), (~finite).sum()


def as_dictionary(histogram):
    return {int(e): int(n) for e, n in zip(histogram.exponents, np.asarray(histogram.counts), strict=True) if n}


@pytest.mark.parametrize("dtype", FLOATS)
def test_histogram_agrees_with_numpy_in_every_dtype(dtype):
    with enable_x64(dtype == "float64"):
        values = random_bits(dtype)
        histogram = jax.jit(exponent_histogram)(jnp.asarray(values))
        (exponents, counts), zeros, subnormals, nonfinite = numpy_histogram(values)
        assert as_dictionary(histogram) == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
        rest = histogram.zeros, histogram.subnormals, histogram.nonfinite
        assert tuple(map(int, rest)) == (zeros, subnormals, nonfinite)
        assert histogram.smallest_exponent == (-1022 if dtype == "float64" else -126)
        assert histogram.counts.dtype == jnp.uint32


HISTOGRAMS = {
    # Each entry contains a tree, the counts by exponent, and the numbers of zeros, subnormal and non-finite elements.
    "a tree": ({"a": [1.0, 2.0, 0.0], "b": {"c": np.float16([1.5, INF])}, "steps": 3}, {0: 2, 1: 1}, 1, 0, 1),
    "64 bits and 16": ({"a": np.array([1e-300, 1.0]), "b": np.float16([1.0, 2**-24, INF])}, {-997: 1, 0: 2}, 0, 1, 1),
    "complex, both parts": (np.complex64([1 + 4j, 0 - 1j]), {0: 2, 2: 1}, 1, 0, 0),
    "no leaves": ({"steps": 3}, {}, 0, 0, 0),
    "an empty leaf": (np.zeros((0, 3), np.float32), {}, 0, 0, 0),
}


@pytest.mark.parametrize(("tree", "counts", "zeros", "subnormals", "nonfinite"), HISTOGRAMS.values(), ids=HISTOGRAMS)
def test_histogram_of_a_tree_is_the_sum_over_its_leaves(tree, counts, zeros, subnormals, nonfinite):
    with enable_x64(any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(tree))):
        found = exponent_histogram(tree)
        assert (as_dictionary(found), found.zeros, found.subnormals, found.nonfinite) == (
            counts,
            zeros,
            subnormals,
            nonfinite,
        )


def test_histogram_per_leaf():
    leaves = exponent_histogram({"a": jnp.array([1.0, 2.0, 0.0]), "steps": jnp.arange(3)}, per_leaf=True)
    assert as_dictionary(leaves["a"]) == {0: 1, 1: 1}
    assert leaves["steps"] is None


def test_histogram_with_too_many_elements_raises_an_error():
    leaf = jax.ShapeDtypeStruct((2**16, 2**15 + 1), jnp.float32)
    with pytest.raises(ValueError, match="per_leaf=True"):
        jax.eval_shape(lambda: exponent_histogram([jnp.zeros(leaf.shape), jnp.zeros(leaf.shape)]))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_arrays_have_the_same_results(axis_type):
    if axis_type is AxisType.Explicit:
        skip_before("0.7.1", "`.at[...].add` takes no `out_sharding`")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    values = random_bits("float32", 4096 - 10).reshape(64, 64)
    with set_mesh(mesh):
        sharded = jax.device_put(values, NamedSharding(mesh, P("data", "model")))
        for of_tree in (jax.jit(exponent_histogram), underflow_fraction, suggest_loss_scale):
            jax.tree.map(np.testing.assert_array_equal, of_tree(sharded), of_tree(jnp.asarray(values)))
        assert nonfinite_report(sharded) == nonfinite_report(jnp.asarray(values))
        assert first_fault([jnp.ones(2), sharded], None) == (1, True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_underflow_equals_that_of_a_numpy_cast(dtype):
    target = np.dtype(dtype)
    info = ml_dtypes.finfo(target)
    step = float(info.smallest_subnormal)
    # Test values near the limits (including ties) and random values.
    near = np.array([step / 2, 3 * step / 2, float(info.smallest_normal) - step / 2, float(info.smallest_normal)])
    near = near.astype(np.float32)
    grads = np.concatenate(
        [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1)), [0.0, NAN, INF]]
    )
    grads = np.concatenate([grads, random_bits("float32")]).astype(np.float32)
    with np.errstate(over="ignore"):
        cast = np.abs(grads.astype(target).astype(np.float64))
    counted = np.isfinite(grads) & (grads != 0)
    zero = counted & (cast == 0)
    subnormal = counted & (cast > 0) & (cast < float(info.smallest_normal))
    found = jax.jit(underflow_fraction, static_argnums=1)(jnp.asarray(grads), dtype)
    assert found.zero == np.float32(zero.sum() / np.float32(counted.sum()))
    assert found.subnormal == np.float32(subnormal.sum() / np.float32(counted.sum()))
    assert dtype == "float32" or found.zero > 0


def test_zeros_do_not_count_as_underflow_and_small_shares_are_exact():
    assert underflow_fraction(jnp.array([0.0, 0.0, 1e-9, 1.0])).zero == 0.5
    assert underflow_fraction(jnp.ones(2**25).at[0].set(1e-9)).zero == np.float32(2.0**-25)


SUGGESTED = {
    # Each entry contains the largest gradient, the dtype, the headroom, and the suggested scale.
    "the top itself": (65504.0, "float16", 1, 1.0),
    "above the top": (1e6, "float16", 1, 1.0),
    "half of the top": (32752.0, "float16", 1, 2.0),
    "just above half": (32768.0, "float16", 1, 1.0),
    "headroom": (1.0, "float16", 8, 2.0**12),
    "an odd headroom": (1.0, "float16", 3, 2.0**14),
    "tiny": (1e-30, "float16", 1, 2.0**115),
    "a scale out of the range of float32": (1e-37, "float16", 8, 2.0**127),
    "subnormal": (1e-42, "float16", 8, 2.0**127),
    "bfloat16": (2.0**100, "bfloat16", 1, 2.0**27),
    "float8": (1.0, "float8_e5m2", 1, 2.0**15),
}


@pytest.mark.parametrize(("largest", "dtype", "headroom", "scale"), SUGGESTED.values(), ids=SUGGESTED)
def test_suggested_scale_is_the_largest_with_the_headroom(largest, dtype, headroom, scale):
    grads = {"a": jnp.array([-largest, largest / 2, 0.0, NAN], jnp.float32)}
    suggestion = suggest_loss_scale(grads, dtype, headroom=headroom)
    assert suggestion.loss_scale == scale
    assert suggestion.largest.dtype == suggestion.loss_scale.dtype == jnp.float32
    top = float(ml_dtypes.finfo(dtype).max)
    assert scale == 1 or largest * scale * headroom <= top
    assert scale == 2.0**127 or 2 * largest * scale * headroom > top
    jls.FixedLossScale(suggestion.loss_scale)


def test_rescued_share_is_the_underflow_that_the_scale_prevents():
    # The scale cannot rescue the first element, rescues the next two, and is not needed for the last two.
    grads = jnp.array([1e-20, 1e-9, -2e-8, 0.5, 0.0], jnp.float32)
    suggestion = suggest_loss_scale(grads)
    assert (suggestion.loss_scale, suggestion.rescued) == (2.0**13, 0.5)
    lost = underflow_fraction(grads).zero, underflow_fraction(grads * suggestion.loss_scale).zero
    assert suggestion.rescued == lost[0] - lost[1]


WITHOUT_NUMBERS = {
    # Each entry contains a tree, its underflow, its suggestion, and the first words of both.
    "no leaves": ({"steps": 3}, (0, 0, 0), (1, 0, 0, 0), ("0.000% of", "A loss scale of 2^0 = 1")),
    "nothing finite": ([NAN, INF], (0, 0, 0), (1, 0, 0, 0), ("0.000% of", "A loss scale of 2^0 = 1")),
    "all zero": (
        {"kernel": jnp.array([0.0, -0.0, NAN]), "bias": jnp.zeros(3, jnp.float16)},
        (0, 0, 1),
        (1, 0, 0, 1),
        ("All gradients are exactly zero.", "No loss scale can be suggested. All gradients are exactly zero."),
    ),
}


@pytest.mark.parametrize(("tree", "underflow", "suggestion", "words"), WITHOUT_NUMBERS.values(), ids=WITHOUT_NUMBERS)
def test_trees_without_nonzero_finite_elements_have_no_suggestion(tree, underflow, suggestion, words):
    found = underflow_fraction(tree), suggest_loss_scale(tree)
    assert found == (underflow, suggestion)
    assert all(str(each).startswith(first) for each, first in zip(found, words, strict=True))


def test_share_of_zeros_is_reported():
    some = jnp.array([0.0, 1e-9, 1.0, INF])
    assert underflow_fraction(some).already_zero == suggest_loss_scale(some).already_zero == np.float32(1 / 3)
    assert "33.333% of all numbers are already zero" in str(underflow_fraction(some))
    assert jax.jit(lambda grads: str(underflow_fraction(grads)) and grads)(some).shape == (4,)


def test_underflow_per_leaf():
    grads = {"a": jnp.array([1e-9, 1.0]), "b": {"c": jnp.zeros(2), "steps": jnp.arange(3)}, "none": None}
    leaves = underflow_fraction(grads, per_leaf=True)
    assert leaves == {"a": (0.5, 0.0, 0.0), "b": {"c": (0.0, 0.0, 1.0), "steps": None}, "none": None}
    compiled = jax.jit(lambda g: underflow_fraction(g, per_leaf=True))(grads)
    assert jax.tree.leaves(compiled) == jax.tree.leaves(leaves)


SUBNORMAL = [(2.0**-149, jnp.float32), (3 * 2.0**-149, jnp.float32), (2.0**-130, jnp.bfloat16), (2.0**-24, jnp.float16)]


@pytest.mark.parametrize(("number", "dtype"), SUBNORMAL)
def test_largest_subnormal_gradient_is_not_zero(number, dtype):
    values = jnp.asarray(np.array([0.0, -number], np.float32).astype(dtype))
    assert float(np.asarray(suggest_loss_scale(values).largest)) == number
    assert nonfinite_report(values)[0].largest_finite == number


@pytest.mark.parametrize("number", [1e-300, 2.0**-150, 1.5 * 2.0**-149, 2.5 * 2.0**-149, 1e-40, 2.0**-126, 1e-5, 1e30])
def test_largest_float64_gradient_is_rounded_to_float32(number):
    with enable_x64(True):
        found = np.asarray(suggest_loss_scale(jnp.array([number, 0.0], jnp.float64)).largest)
    assert found == np.float64(number).astype(np.float32)


# The cost of a tree with many leaves.

SIZES = [(3, 5), (128, 129), (130, 130), (7,), (4, 4, 4)]


def many_leaves(number):
    return [jnp.ones(SIZES[n % len(SIZES)]) for n in range(number)]


OF_TREES = {
    "exponent_histogram": exponent_histogram,
    "underflow_fraction": underflow_fraction,
    "underflow_fraction, per leaf": lambda tree: underflow_fraction(tree, per_leaf=True),
    "suggest_loss_scale": suggest_loss_scale,
}
of_trees = pytest.mark.parametrize("of_tree", OF_TREES.values(), ids=OF_TREES)


@pytest.mark.slow
@of_trees
def test_program_size_is_linear_in_the_number_of_leaves(of_tree):
    def instructions(number):
        program = jax.jit(lambda tree: of_tree(tree)).lower(many_leaves(number)).compile().as_text()
        return len([line for line in program.splitlines() if " = " in line])

    ten, twenty, thirty = map(instructions, (10, 20, 30))
    assert thirty - twenty <= 1.1 * (twenty - ten)
    # Before jax 0.8.0, XLA compiles `suggest_loss_scale` to more fusions.
    assert thirty - twenty <= 10 * (150 if is_older_than("0.8.0") else 120)


@pytest.mark.parametrize("of_tree", [*OF_TREES.values(), nonfinite_report], ids=[*OF_TREES, "nonfinite_report"])
def test_similar_leaves_share_programs_in_eager_calls(of_tree, compilations):
    of_tree(many_leaves(100))
    assert len(compilations) <= 4 * len(SIZES)


@of_trees
def test_results_are_the_same_under_jit(of_tree):
    leaves = [jnp.asarray(random_bits("float32", 50 + n, seed=n)) for n in range(4)]
    leaves += [jnp.asarray(random_bits("float16", 50)), jnp.asarray(random_bits("bfloat16", 9))]
    leaves += [jnp.array([1 + 0j, 1e-9 - 1e-8j]), 0.5, 3]
    jax.tree.map(np.testing.assert_array_equal, of_tree(leaves), jax.jit(of_tree)(leaves))


@of_trees
def test_only_results_are_communicated_on_a_mesh(of_tree):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    values = np.ones((64, 64), np.float32)
    tree = [jax.device_put(values, NamedSharding(mesh, spec)) for spec in (P("data", "model"), P("model"), P())]
    program = jax.jit(lambda tree: of_tree(tree)).lower(tree).compile().as_text()
    collective = r"= \(?\w+\[([\d,]*)\].* (?:all-gather|all-reduce|all-to-all|collective-permute)\("
    shapes = re.findall(collective, program)
    assert shapes
    assert all(math.prod(map(int, filter(None, shape.split(",")))) <= 256 + 8 for shape in shapes)
