"""`all_finite` for computed values and sharded arrays. `test_largest.py` tests each dtype and implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from jax_lossscale._measure import agree

pytestmark = pytest.mark.as_for_users


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_overflow_of_a_value_computed_in_the_same_program_is_found(dtype):
    """The compiler may keep the checked value in a wider dtype than the stored value, which would hide an overflow."""
    largest = jnp.full(64, jnp.finfo(dtype).max, dtype)

    @jax.jit
    def double_and_check(x):
        doubled = (x.astype(jnp.float32) * 2).astype(dtype)
        return doubled, jls.all_finite(doubled), jls.all_finite(x + x)

    doubled, *verdicts = double_and_check(largest)
    assert np.isinf(doubled).all()
    assert verdicts == [False, False]


ALL, BAD_ROW = np.ones((4, 2), bool), np.array([[1, 1], [0, 0], [1, 1], [1, 1]], bool)
BAD_ELEMENT = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], bool)
BAD_COLUMN = np.array([[1, 0]] * 4, bool)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axis_name", "spec", "expected"),
    [  # The mesh has 4 x 2 devices, and the shard at (1, 1) contains a NaN.
        (None, P("x", "y"), BAD_ELEMENT),
        ((), P("x", "y"), BAD_ELEMENT),
        ("x", P("x", "y"), BAD_COLUMN),
        ("y", P("x", "y"), BAD_ROW),
        (("x",), P("x", "y"), BAD_COLUMN),
        (("x", "y"), P("x", "y"), ~ALL),
        (None, P("x"), BAD_ROW),
        ("y", P("x"), BAD_ROW),  # The gradients do not vary over this axis.
        ("x", P("x"), ~ALL),
        ("x", P(), ~ALL),
    ],
    ids=str,
)
def test_all_finite_reduces_over_the_named_axes_under_shard_map(axis_name, spec, expected, check_vma):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    values = jax.device_put(jnp.ones((4, 2)).at[1, 1].set(jnp.nan), NamedSharding(mesh, spec))

    def verdicts(tree):
        return jls.all_finite(tree, axis_name=axis_name)[None, None]

    in_specs = ({"w": spec, "b": P()},)
    sharded = jax.jit(jax.shard_map(verdicts, mesh=mesh, in_specs=in_specs, out_specs=P("x", "y"), check_vma=check_vma))
    np.testing.assert_array_equal(sharded({"w": values, "b": jnp.ones(3)}), expected)
    np.testing.assert_array_equal(sharded({"w": jnp.ones_like(values), "b": jnp.ones(3)}), ALL)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("largest", [None, [0.5, 8.0, 2.0], [0.5, np.nan, 2.0], [np.nan, 8.0, 2.0], [0.0, 0.0, 0.0]])
def test_agree_reduces_flags_and_the_largest_magnitude_together(number, largest):
    """A flag that is false on one device is false on all devices, and a NaN on one device is NaN on all devices."""
    flags = np.array([[True, True, False], [True, True, True], [True, False, True]])[:, :number]
    of_devices = jax.vmap(lambda flags, largest: agree(flags, largest, "devices"), axis_name="devices")
    agreed, found = of_devices(list(flags.T), None if largest is None else jnp.array(largest))
    np.testing.assert_array_equal(agreed, np.tile(flags.all(axis=0)[:, None], 3))
    assert found is None if largest is None else np.array_equal(found, np.tile(np.max(largest), 3), equal_nan=True)


def test_all_finite_rejects_leaves_on_different_devices():
    """One program cannot read arrays on different devices. Two meshes with the same devices are allowed."""
    for number in 2, 3:
        places = jax.devices()[:number] * 2
        with pytest.raises(ValueError, match="incompatible devices"):
            jls.all_finite([jax.device_put(np.ones(4, np.float32), place) for place in places])
    four = np.array(jax.devices()[:4])
    meshes = jax.sharding.Mesh(four, "x"), jax.sharding.Mesh(four.reshape(2, 2), ("x", "y"))
    split = [NamedSharding(mesh, P("x")) for mesh in meshes]
    assert jls.all_finite([jax.device_put(np.ones(4, np.float32), sharding) for sharding in split])
