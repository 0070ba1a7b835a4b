"""What jmp's own tests state of its loss scales and trees, asked of ours.

Where the answer is another on purpose, the test says so, and `docs/migrating.md` says why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import Dynamic, Fixed

import jax_lossscale as jls


def adjusted(loss_scale, finite, steps):
    """The loss scales after each of ``steps`` equal verdicts."""
    adjust = jax.jit(Dynamic.adjust)
    for _ in range(steps):
        loss_scale = adjust(loss_scale, finite)
        yield loss_scale


def test_without_a_loss_scale_trees_are_returned_as_they_are():
    tree = {"a": jnp.ones([])}
    assert jls.NoOpLossScale().scale(tree) is tree
    assert jls.NoOpLossScale().unscale(tree) is tree


@pytest.mark.parametrize("kind", [Fixed, Dynamic])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_scaling_multiplies_and_unscaling_undoes_it(kind, scale):
    loss_scale = kind(scale)
    assert loss_scale.scale({"a": jnp.array(1.0)}) == {"a": scale}
    assert loss_scale.unscale({"a": jnp.array(1.0 * scale)}) == {"a": 1.0}


def test_no_loss_scale_has_no_leaves_and_a_fixed_one_has_one():
    """On purpose: a fixed scale of jmp has no leaves, and so a new value compiles anew."""
    assert jax.tree.leaves(jls.NoOpLossScale()) == []
    assert jax.tree.leaves(Fixed(8)) == [8.0]
    step = jax.jit(Fixed.scale)
    assert [float(step(Fixed(value), 1.0)) for value in (2, 4)] == [2.0, 4.0]
    assert step._cache_size() == 1


def test_a_fixed_scale_of_zero_is_refused():
    """On purpose: jmp makes one."""
    with pytest.raises(ValueError, match="at least 1"):
        Fixed(0)


def test_a_dynamic_one_has_scale_and_counter_as_leaves_and_survives_a_map():
    loss_scale = Dynamic(1.0, 2000, 2)
    assert jax.tree.leaves(loss_scale) == [1.0, 0]
    assert jax.tree.map(lambda leaf: leaf, loss_scale) == loss_scale


@pytest.mark.parametrize(("period", "multiplier"), [(20, 2), (30, 3)])
def test_it_grows_after_a_period_of_finite_steps(period, multiplier):
    steps = list(adjusted(Dynamic(10, period, multiplier), True, period))
    assert [float(step()) for step in steps] == [10.0] * (period - 1) + [10.0 * multiplier]
    assert [int(step.num_good_steps) for step in steps] == [*range(1, period), 0]
    assert {(step.increment_period, step.multiplier) for step in steps} == {(period, multiplier)}


@pytest.mark.parametrize(("period", "multiplier"), [(20, 2), (30, 3)])
@pytest.mark.parametrize("floor", [1.0, 0.3125, 0.37])
def test_it_falls_to_its_floor_and_stays_there(period, multiplier, floor):
    """Under `jax.jit`, too, where jmp forgets a floor that is not 1."""
    steps = list(adjusted(Dynamic(10, period, multiplier, min_loss_scale=floor), False, 100))
    expected = [max(floor, 10.0 / multiplier**step) for step in range(1, 101)]
    np.testing.assert_allclose([float(step()) for step in steps], expected, rtol=1e-5)
    assert {int(step.num_good_steps) for step in steps} == {0}


def test_a_floor_of_zero_is_refused():
    """On purpose: from a scale of 0 there is no way back."""
    with pytest.raises(ValueError, match="min_loss_scale"):
        Dynamic(10, 5, 2, min_loss_scale=0.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [2.0**15, 2**15, np.int32(2**15), jnp.int32(2**15)])
def test_numbers_of_every_type_make_a_float32_scale(scale):
    """On purpose: jmp warns of integers, and then fails."""
    assert Dynamic(scale)().dtype == jnp.float32
    assert Dynamic(8.0, min_loss_scale=np.int32(1)).min_loss_scale == 1.0


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (None, True),
        ({}, True),
        ({"a": jnp.ones([]), "b": jnp.ones([])}, True),
        *[({"a": jnp.array(bad)}, False) for bad in (jnp.inf, jnp.nan)],
        *[({"a": jnp.ones([]), "b": jnp.array(bad)}, False) for bad in (jnp.inf, jnp.nan)],
        *[({"a": jnp.array(bad), "b": jnp.ones([])}, False) for bad in (jnp.inf, jnp.nan)],
    ],
)
def test_all_finite(tree, expected):
    assert bool(jls.all_finite(tree)) is expected


def test_select_tree():
    one, other = {"a": jnp.ones([]), "b": jnp.zeros([])}, {"a": jnp.zeros([]), "b": jnp.ones([])}
    assert jls.select_tree(jnp.bool_(True), one, other) == one
    assert jls.select_tree(jnp.bool_(False), one, other) == other
    assert jls.select_tree(jnp.bool_(True), None, None) is None


def test_select_tree_wants_one_boolean():
    """A `ValueError`, where jmp has an assertion, which `python -O` leaves out."""
    with pytest.raises(ValueError, match=r"select_tree\(pred="):
        jls.select_tree(jnp.ones([1]), None, None)


def test_unscaling_widens_half_precision():
    """On purpose: jmp's result has the dtype that promotion with the scale gives."""
    for scale in Fixed(2.0**15), Dynamic():
        unscaled = scale.unscale(jnp.float16(2.0**-10))
        assert (unscaled.dtype, unscaled) == (jnp.float32, 2.0**-25)
