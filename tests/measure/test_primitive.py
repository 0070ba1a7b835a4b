"""Tests that `all_finite` returns the same result in eager mode, under each JAX transformation and on meshes."""

import contextlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import enable_x64, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users]

GOOD = np.ones((8, 16), np.float32)
LARGE = np.ones((8, 2**13), np.float32)  # This leaf is too large to be read in a block with other leaves.
BAD = GOOD.copy()
BAD[5, 3] = np.nan


def as_flag(tree):
    return jnp.where(jls.all_finite(tree), 1.0, 0.0)


def scanned(tree):
    flags = jax.lax.scan(lambda total, _: (total + as_flag(tree), None), 0.0, length=3)[0]
    return flags / 3


def exported(tree):
    program = jax.export.export(jax.jit(as_flag), platforms=["cpu", "cuda", "rocm", "tpu"])(tree)
    return jax.export.deserialize(program.serialize()).call(tree)


def exported_for_any_number_of_rows(tree):
    (rows,) = jax.export.symbolic_shape("rows")
    matrix = jax.ShapeDtypeStruct((rows, *tree["a"].shape[1:]), tree["a"].dtype)
    both = jax.export.export(jax.jit(lambda *leaves: as_flag(leaves)))(matrix, tree["b"])
    return both.call(tree["a"], tree["b"])


def differentiated(tree):
    """Return half the derivative of a sum that is multiplied by 1 if the tree is finite and by 0 otherwise."""
    derivative = jax.grad(lambda leaf: as_flag((leaf, tree)) * jnp.sum(jnp.float32(2) * leaf[0, 0]))
    return derivative(jax.tree.leaves(tree)[0])[0, 0] / 2


def rematerialized(tree):
    kept = jax.checkpoint(lambda x: jnp.sin(x) * as_flag((tree, x)))
    return jax.grad(kept)(jnp.float32(0.0))


def without_jit(tree):
    with jax.disable_jit():
        return as_flag(tree)


def in_double_precision(tree):
    with enable_x64(True):
        return float(as_flag(tree))


TRANSFORMED = {
    "eager": as_flag,
    "jit": jax.jit(as_flag),
    "scan": scanned,
    "scan in jit": jax.jit(scanned),
    "cond": lambda tree: jax.lax.cond(True, as_flag, lambda _: -1.0, tree),
    "while": lambda tree: jax.lax.while_loop(lambda x: x < 0, lambda x: as_flag(tree), -1.0),
    "grad": differentiated,
    "grad of jit": jax.jit(differentiated),
    "checkpoint": rematerialized,
    "jvp": lambda tree: jax.jvp(as_flag, (tree,), (tree,))[0],
    "linearize": lambda tree: jax.linearize(as_flag, tree)[0],
    "export": exported,
    "export for any number of rows": exported_for_any_number_of_rows,
    "disable_jit": without_jit,
    "x64": in_double_precision,
}


@pytest.mark.parametrize("leaf", [GOOD, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_result_is_the_same_under_every_transformation(transformed, leaf):
    spoiled = leaf.copy()
    spoiled[7, -1] = -np.inf
    assert transformed({"a": jnp.asarray(leaf), "b": jnp.ones(3)}) == 1
    assert transformed({"a": jnp.asarray(spoiled), "b": jnp.ones(3)}) == 0


MEMBERS = np.stack([GOOD, BAD, GOOD])
MAPPED = {  # Each entry contains `in_axes`, the leaves and the expected results.
    "one leaf": ((0,), (MEMBERS,), [True, False, True]),
    "another axis": ((2,), (np.moveaxis(MEMBERS, 0, 2),), [True, False, True]),
    "an unbatched leaf": ((0, None), (MEMBERS, GOOD), [True, False, True]),
    "an unbatched nonfinite leaf": ((0, None), (MEMBERS, BAD), [False, False, False]),
    "a batched scalar": ((0, 0), (MEMBERS, np.float32([np.inf, 1, 2])), [False, False, True]),
}


@pytest.mark.parametrize(("in_axes", "leaves", "expected"), MAPPED.values(), ids=MAPPED)
def test_vmap_returns_one_result_for_each_batch_element(in_axes, leaves, expected):
    mapped = jax.vmap(lambda *leaves: jls.all_finite(leaves), in_axes=in_axes)
    assert mapped(*leaves).tolist() == expected
    assert jax.jit(mapped)(*leaves).tolist() == expected
    twice = jax.vmap(mapped)(*(jnp.stack([leaf, jnp.ones_like(leaf)]) for leaf in leaves))
    assert twice.tolist() == [expected, [True] * len(expected)]


# --- Tests on a mesh of 4 x 2 devices ---

TYPES = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
SPECS = [P("x", "y"), P("y", "x"), P("x"), P(None, "y"), P(("x", "y")), P()]


@pytest.mark.parametrize("in_context", [True, False], ids=["set_mesh", "no set_mesh"])
@pytest.mark.parametrize("axis_types", TYPES.values(), ids=TYPES)
def test_nonfinite_element_on_one_device_is_found_on_all_devices(axis_types, in_context):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=axis_types)
    is_finite = jax.jit(lambda *leaves: jls.all_finite([*leaves, np.float32([1, 2]), 3.0]))
    with set_mesh(mesh) if in_context else contextlib.nullcontext():

        def verdict(kernels):
            shardings = [NamedSharding(mesh, spec) for spec in SPECS]
            found = is_finite(*map(jax.device_put, kernels, shardings))
            assert found.sharding.is_fully_replicated
            return {bool(shard.data) for shard in found.addressable_shards}

        assert verdict([GOOD] * len(SPECS)) == {True}
        for n in range(len(SPECS)):
            for row, column in (0, 0), (2, 15), (5, 7), (7, 8):
                spoiled = GOOD.copy()
                spoiled[row, column] = (np.nan, np.inf, -np.inf)[n % 3]
                assert verdict([spoiled if m == n else GOOD for m in range(len(SPECS))]) == {False}


@pytest.mark.parametrize("axis_types", TYPES.values(), ids=TYPES)
def test_vmap_over_a_sharded_axis(axis_types):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=axis_types)
    members = jax.device_put(jnp.ones((8, 4, 3)).at[5, 2, 1].set(jnp.nan), NamedSharding(mesh, P("x", "y")))
    assert np.flatnonzero(~np.asarray(jax.jit(jax.vmap(jls.all_finite))(members))).tolist() == [5]


def test_shard_map_over_some_axes_checks_all_shards_of_the_other_axes():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=TYPES["auto"])
    values = jax.device_put(jnp.ones((8, 4)).at[5, 2].set(jnp.nan), NamedSharding(mesh, P("x", "y")))

    def verdicts(shard):
        return jls.all_finite(shard)[None]

    of_rows = jax.jit(jax.shard_map(verdicts, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))
    assert of_rows(values).tolist() == [True, True, False, True]


def test_unreduced_sums_are_rejected():
    """The partial sums on the devices can overflow if the sum does not, so they must not be checked."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with set_mesh(mesh):
        rows = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x")))

        def verdict(rows):
            unreduced = jnp.einsum("ij,ik->jk", rows, rows, out_sharding=P(None, None, unreduced={"x"}))
            return jls.all_finite([unreduced, rows])

        with pytest.raises(Exception, match=r"unreduced rule|is unreduced"):  # The class depends on JAX.
            jax.jit(verdict)(rows)
