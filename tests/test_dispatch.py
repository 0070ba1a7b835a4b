"""Trees whose leaves lie on several devices or meshes, as those of a pipeline do: everything eager works on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from jax_lossscale import _tree
from jax_lossscale._measure import finite_and_largest

DEVICES = jax.devices()


def on_mesh(devices, axis_type, name="x"):
    return NamedSharding(jax.make_mesh((len(devices),), (name,), devices=devices, axis_types=(axis_type,)), P(name))


PLACES = {
    "two devices": [SingleDeviceSharding(DEVICES[0]), SingleDeviceSharding(DEVICES[1])],
    "two meshes": [on_mesh(DEVICES[:4], AxisType.Auto), on_mesh(DEVICES[4:], AxisType.Auto)],
    "two explicit meshes": [on_mesh(DEVICES[:4], AxisType.Explicit), on_mesh(DEVICES[4:], AxisType.Explicit)],
    "two meshes of the same devices": [on_mesh(DEVICES[:4], AxisType.Explicit, name) for name in "xy"],
    "the same devices in another order": [on_mesh(DEVICES[:4][::step], AxisType.Auto) for step in (1, -1)],
    "a device and a mesh": [SingleDeviceSharding(DEVICES[5]), on_mesh(DEVICES[:4], AxisType.Auto)],
}
every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)


def tree_on(places, *changes):
    """Leaves of both places in turn, and some that lie nowhere; ``changes``: what is put into each array."""
    values = [np.full(8, 2.0 + n, np.float32) for n in range(4)]
    for n, value in changes:
        values[n][3] = value
    arrays = [jax.device_put(value, places[n % 2]) for n, value in enumerate(values)]
    return {"a": arrays, "numpy": np.float32([1, 2]), "free": jnp.ones(2), "none": None, "count": 3}


def assert_equal_in_place(found, expected, places):
    """Each array is where it was."""
    for n, (array, value) in enumerate(zip(found["a"], expected, strict=True)):
        np.testing.assert_array_equal(array, value)
        assert array.sharding.is_equivalent_to(places[n % 2], 1)
    assert (found["none"], found["count"]) == (None, 3)


@every_place
@pytest.mark.parametrize("scale_at", [None, 0, 1], ids=["free", "with the first", "with the others"])
def test_what_is_made_of_leaves_lies_where_they_lie(places, scale_at):
    tree, scale = tree_on(places), np.float32(4)
    if scale_at is not None:
        place = places[scale_at]
        replicated = NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else place
        scale = jax.device_put(scale, replicated)
    loss_scale = jls.FixedLossScale(scale)
    expected = [np.asarray(leaf) for leaf in tree["a"]]
    assert_equal_in_place(loss_scale.unscale(tree), [leaf / 4 for leaf in expected], places)
    assert_equal_in_place(loss_scale.scale(tree), [leaf * 4 for leaf in expected], places)
    assert_equal_in_place(_tree.widen(tree), expected, places)
    cast = jls.cast_floating(tree, jnp.float16)
    assert_equal_in_place(cast, expected, places)
    assert all(leaf.dtype == jnp.float16 for leaf in (*cast["a"], cast["numpy"], cast["free"]))
    others = {**tree, "a": [leaf + 1 for leaf in tree["a"]]}
    assert_equal_in_place(jls.select_tree(jnp.array(False), tree, others), [leaf + 1 for leaf in expected], places)


@every_place
def test_with_a_traced_scale_all_is_one_program(places):
    tree = tree_on(places)
    unscaled = jax.eval_shape(lambda loss_scale: loss_scale.unscale(tree), jls.DynamicLossScale(8.0))
    assert [leaf.shape for leaf in unscaled["a"]] == [(8,)] * 4


@every_place
def test_one_answer_is_given_about_all(places):
    for n in range(4):
        for value in np.nan, np.inf, -np.inf:
            spoiled = tree_on(places, (n, value))
            assert not jls.all_finite(spoiled)
            assert jls.diagnostics.first_nonfinite(spoiled) == n
            assert [float(found) for found in finite_and_largest(spoiled)] == [0, 0]
        assert [float(found) for found in finite_and_largest(tree_on(places, (n, -9.0)), 2.0)] == [1, 4.5]
    assert jls.all_finite(tree_on(places)).shape == ()
    assert jls.diagnostics.first_nonfinite(tree_on(places)) == -1


@every_place
@pytest.mark.parametrize("kind", [jls.DynamicLossScale(8.0, 1), jls.AutoLossScale(8.0)], ids=["dynamic", "auto"])
def test_a_loss_scale_is_moved(places, kind):
    for tree in tree_on(places), tree_on(places, (3, np.nan)):
        found, verdict = kind.update(tree)
        expected, expected_verdict = kind.update(jax.device_get(tree))
        assert found == expected
        assert verdict == expected_verdict


@every_place
def test_a_wrapped_optimizer_is_initialized_as_a_bare_one(places):
    params = {key: value for key, value in tree_on(places).items() if key in ("a", "none")}
    moments = jls.loss_scaled(optax.adam(0.1)).init(params).inner_state[0].mu
    assert_equal_in_place({**moments, "count": 3}, np.zeros((4, 8)), places)
