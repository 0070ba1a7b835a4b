"""`all_finite` is exact: any NaN or infinity, anywhere, in any floating or complex dtype, and nothing else."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import FLOAT8S, enable_x64
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from jax_lossscale._measure import finite_and_largest, largest

DTYPES = (*FLOAT8S, "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
SHAPES = ((), (3, 43))
BAD = (np.nan, np.inf, -np.inf)

compiled_all_finite = jax.jit(jls.all_finite)
vmapped_all_finite = jax.jit(jax.vmap(jls.all_finite))


@st.composite
def planted(draw, dtype):
    """A leaf of extreme finite values, with nothing or one bad value among them."""
    shape = draw(st.sampled_from(SHAPES))
    limits = jnp.finfo(dtype)
    leaf = np.full(shape, draw(st.sampled_from((limits.max, limits.min))), dtype)
    bad = draw(st.sampled_from((None, *BAD)))
    if bad is not None:
        part = leaf.imag if np.iscomplexobj(leaf) and draw(st.booleans()) else leaf.real
        part.reshape(-1)[draw(st.integers(0, leaf.size - 1))] = (
            bad  # where the dtype has none, whatever NumPy makes of it
        )
    return leaf


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=30)
def test_as_numpy_sees_it(dtype, data):
    leaf = data.draw(planted(dtype))
    expected = bool(np.isfinite(leaf.astype(np.complex128)).all())
    tree = {"frozen": None, "clean": np.float16([1, 2]), "leaf": leaf, "step": 3}
    with enable_x64(True):
        assert bool(jls.all_finite(tree)) == expected
        assert bool(compiled_all_finite(tree)) == expected
        assert vmapped_all_finite(np.stack([np.ones_like(leaf), leaf])).tolist() == [True, expected]


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float8_e5m2", np.inf, False),
        ("float8_e5m2", np.nan, False),
        ("float8_e4m3", -np.inf, False),
        ("float8_e4m3fn", np.nan, False),  # has no infinity
        ("float8_e4m3fnuz", np.nan, False),
        ("float8_e8m0fnu", np.nan, False),
        ("float8_e4m3fn", 448.0, True),  # its largest, next to NaN
        ("float16", 65504.0, True),
        ("float16", 2.0**-24, True),
        ("bfloat16", -np.inf, False),
        ("float32", -0.0, True),
        ("complex64", complex(0, np.nan), False),
        ("complex64", complex(-np.inf, 0), False),
    ],
)
def test_single_values(dtype, value, expected):
    assert jls.all_finite(jnp.full(3, value, dtype)).tolist() is expected


SIZE = 2**20 + 7  # no multiple of any vector, tile or block
POSITIONS = sorted(
    {0, SIZE - 1, SIZE // 2} | {block + offset for block in (8, 16, 128, 2**15, 2**20) for offset in (-1, 0, 1)}
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_value_in_a_large_leaf(dtype, bad):
    def found(position):
        leaf = np.ones(SIZE, dtype)
        leaf[position] = bad
        return not jls.all_finite([leaf])

    assert [position for position in POSITIONS if not found(position)] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("sign", [1, -1, "mixed"])
def test_finite_values_whose_sum_overflows_are_finite(dtype, sign):
    signs = np.where(np.arange(SIZE) % 3, 1, -1) if sign == "mixed" else sign
    with enable_x64(True):
        largest = np.full(SIZE, jnp.finfo(dtype).max, dtype)
        assert jls.all_finite([largest * np.asarray(signs, dtype), largest[:3]])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_bad_value_among_values_whose_sum_overflows(dtype, bad):
    leaf = np.full(SIZE, jnp.finfo(dtype).max, dtype)
    leaf[2**15] = bad
    assert not jls.all_finite([leaf])


# So many leaves that several of one shape and dtype are read together; a CPU reads them in one way, others in another.
MANY_SHAPES = [(200, 200), (2**15 + 3,), (100, 401)]
MANY = [(MANY_SHAPES[n % 3], ("float16", "bfloat16", "float32", "complex64")[n % 4]) for n in range(140)]
READINGS = {
    "here": jls.all_finite,
    "divided": lambda tree: finite_and_largest(tree, jnp.float32(8))[0],
    "elsewhere": lambda tree: largest.anywhere(*tree) < jnp.inf,
}


# So many small leaves of each dtype that they are read in more blocks than one.
MANY_SMALL = [((2**15 - n % 2,), ("float16", "float32")[n // 2 % 2]) for n in range(38)]


@pytest.mark.parametrize(("many", "stride"), [(MANY, 5), (MANY_SMALL, 1)], ids=["large", "small"])
@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_one_bad_value_in_one_of_many_leaves(read, many, stride):
    leaves = [jax.device_put(np.ones(shape, dtype)) for shape, dtype in many]
    read = jax.jit(read)
    assert read(leaves)

    def found(n, bad):
        spoiled = np.ones(*many[n])
        spoiled[(-1,) * spoiled.ndim] = bad
        return not read([*leaves[:n], spoiled, *leaves[n + 1 :]])

    bad_ones = [*range(0, len(leaves), stride), len(leaves) - 1]  # large: of every shape and dtype
    assert [n for n in bad_ones if not found(n, BAD[n % len(BAD)])] == []


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_large_values_in_many_large_leaves_are_finite(read):
    assert jax.jit(read)([jnp.full(shape, jnp.finfo(dtype).max, dtype) for shape, dtype in MANY])
    alternating = [jnp.full(s, (-1) ** n * float(jnp.finfo(dtype).max), dtype) for n, (s, dtype) in enumerate(MANY)]
    assert jax.jit(read)(alternating)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_overflow_made_in_the_same_program_is_seen(dtype):
    """Though the compiler might keep the value that was checked in a wider dtype than the one that is stored."""
    largest = jnp.full(64, jnp.finfo(dtype).max, dtype)

    @jax.jit
    def double_and_check(x):
        doubled = (x.astype(jnp.float32) * 2).astype(dtype)
        return doubled, jls.all_finite(doubled), jls.all_finite(x + x)

    doubled, *verdicts = double_and_check(largest)
    assert np.isinf(doubled).all()
    assert verdicts == [False, False]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, True),
        (None, True),
        ((), True),
        (jnp.zeros((0, 3)), True),
        ([jnp.zeros(0, jnp.float16), jnp.zeros(0, jnp.complex64)], True),
        ([None, 3, True, "adam", len, np.int64(3), jnp.arange(3), jnp.array([True])], True),
        ([np.zeros(2, jax.dtypes.float0), jax.random.key(0)], True),
        (1.0, True),
        (float("nan"), False),
        ([1, float("-inf")], False),
        (complex(0, float("nan")), False),
        (np.float64("nan"), False),
        ({"dense": jnp.ones(2), "none": None, "last": [jnp.zeros(0), jnp.array(jnp.nan)]}, False),
        (sparse.BCOO((jnp.array([jnp.inf]), jnp.array([[0]])), shape=(2,)), False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_trees(tree, expected):
    verdict = jls.all_finite(tree)
    assert (verdict.shape, verdict.dtype, bool(verdict)) == ((), jnp.bool_, expected)


ALL, BAD_ROW = np.ones((4, 2), bool), np.array([[1, 1], [0, 0], [1, 1], [1, 1]], bool)
BAD_ELEMENT = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], bool)
BAD_COLUMN = np.array([[1, 0]] * 4, bool)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axis_name", "spec", "expected"),
    [  # on a mesh of 4 x 2 devices, where the shard at (1, 1) holds a NaN
        (None, P("x", "y"), BAD_ELEMENT),
        ((), P("x", "y"), BAD_ELEMENT),
        ("x", P("x", "y"), BAD_COLUMN),
        ("y", P("x", "y"), BAD_ROW),
        (("x",), P("x", "y"), BAD_COLUMN),
        (("x", "y"), P("x", "y"), ~ALL),
        (None, P("x"), BAD_ROW),
        ("y", P("x"), BAD_ROW),  # agreed over an axis that the gradients do not vary over
        ("x", P("x"), ~ALL),
        ("x", P(), ~ALL),
    ],
    ids=str,
)
def test_shards_agree_along_the_named_axes(axis_name, spec, expected, check_vma):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    values = jax.device_put(jnp.ones((4, 2)).at[1, 1].set(jnp.nan), NamedSharding(mesh, spec))

    def verdicts(tree):
        return jls.all_finite(tree, axis_name=axis_name)[None, None]

    in_specs = ({"w": spec, "b": P()},)
    sharded = jax.jit(jax.shard_map(verdicts, mesh=mesh, in_specs=in_specs, out_specs=P("x", "y"), check_vma=check_vma))
    np.testing.assert_array_equal(sharded({"w": values, "b": jnp.ones(3)}), expected)
    np.testing.assert_array_equal(sharded({"w": jnp.ones_like(values), "b": jnp.ones(3)}), ALL)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_tree_of_nothing_is_finite_on_all_shards(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    verdict = jax.shard_map(
        lambda: jls.all_finite([], axis_name="x"), mesh=mesh, in_specs=(), out_specs=P(), check_vma=check_vma
    )
    assert jax.jit(verdict)()


@pytest.mark.parametrize(("axis_name", "expected"), [(None, [True, False, True]), ("runs", [False, False, False])])
def test_named_vmap(axis_name, expected):
    values = jnp.array([1.0, jnp.inf, 2.0])
    verdicts = jax.vmap(lambda x: jls.all_finite(x, axis_name=axis_name), axis_name="runs")(values)
    assert verdicts.tolist() == expected


def test_it_can_be_exported_with_symbolic_shapes():
    (size,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: jls.all_finite([x, 1.0])))(
        jax.ShapeDtypeStruct((size,), jnp.float32)
    )
    assert exported.call(jnp.ones(3, jnp.float32))
    assert not exported.call(jnp.array([1.0, jnp.nan], jnp.float32))
