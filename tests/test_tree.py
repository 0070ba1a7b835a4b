"""The leaves that scaling, unscaling, casting and selection of pytrees change, and the results."""

import dataclasses
import re
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import FLOAT8S, enable_x64
from jax.experimental import sparse
from kinds import assert_same_bits

import jax_lossscale as jls
from jax_lossscale import _tree

pytestmark = pytest.mark.as_for_users

FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
LARGEST_APPLIED = 2.0**126

# Each entry contains a function that creates a leaf with x64 enabled, and the dtype of the unscaled leaf. The dtype is
# None if the leaf is not changed.
LEAVES = {
    "python float": (lambda: 1.0, "float64"),
    "python complex": (lambda: 1 + 0j, "complex128"),
    "numpy float16": (lambda: np.ones(2, np.float16), "float32"),
    "numpy float32 scalar": (lambda: np.float32(1), "float32"),
    "numpy float64": (lambda: np.ones(2), "float64"),
    **{name: (partial(jnp.ones, 2, name), "float32") for name in FLOAT8S},
    "float16": (lambda: jnp.ones((2, 3), jnp.float16), "float32"),
    "bfloat16": (lambda: jnp.ones(2, jnp.bfloat16), "float32"),
    "float32": (lambda: jnp.ones((), jnp.float32), "float32"),
    "float64": (lambda: jnp.ones(2, jnp.float64), "float64"),
    "complex64": (lambda: jnp.ones(2, jnp.complex64), "complex64"),
    "complex128": (lambda: jnp.ones(2, jnp.complex128), "complex128"),
    "empty float16": (lambda: jnp.ones((0, 3), jnp.float16), "float32"),
    "None": (lambda: None, None),
    "python int": (lambda: 3, None),
    "python bool": (lambda: True, None),
    "string": (lambda: "adam", None),
    "function": (lambda: len, None),
    "numpy int64": (lambda: np.int64(3), None),
    "int8": (lambda: jnp.ones(2, jnp.int8), None),
    "uint32": (lambda: jnp.ones(2, jnp.uint32), None),
    "bool": (lambda: jnp.ones(2, bool), None),
    "float0": (lambda: np.zeros(2, jax.dtypes.float0), None),
    "random key": (lambda: jax.random.key(0), None),
    **{
        f"numpy {dtype}": (partial(np.zeros, 2, dtype), None)
        for dtype in ("str", "bytes", "object", "datetime64[s]", "timedelta64[s]", "f4, i4", "V4", "longdouble")
    },
    "numpy date": (lambda: np.datetime64("2026-12-01"), None),
    "class of numbers": (lambda: jnp.float16, None),
    "numpy class of numbers": (lambda: np.float16, None),
    "dtype": (lambda: np.dtype(np.float16), None),
    "layer with a dtype": (lambda: SimpleNamespace(dtype=jnp.float16), None),
}
TOUCHED = [name for name, (_, dtype) in LEAVES.items() if dtype is not None]
UNTOUCHED = [name for name in LEAVES if name not in TOUCHED]


@pytest.mark.parametrize("name", UNTOUCHED)
@pytest.mark.parametrize("function", ["scale", "unscale", "cast_floating", "widen"])
def test_other_leaves_are_returned_as_the_same_objects(name, function):
    functions = {
        "scale": jls.FixedLossScale(2).scale,
        "unscale": jls.FixedLossScale(2).unscale,
        "cast_floating": lambda tree: jls.cast_floating(tree, jnp.float16),
        "widen": _tree.widen,
    }
    with enable_x64(True):
        leaf = LEAVES[name][0]()
        result = functions[function]({"leaf": leaf, "other": 1.0})
    assert result["leaf"] is leaf
    assert not _tree.is_inexact(leaf)


def test_widen_accepts_abstract_and_concrete_leaves():
    half = jnp.ones(2, jnp.float16)
    abstract, concrete = _tree.widen([jax.ShapeDtypeStruct((3,), jnp.bfloat16), half])
    assert (abstract.shape, abstract.dtype) == ((3,), jnp.float32)
    assert (concrete.tolist(), concrete.dtype) == ([1, 1], jnp.float32)
    partly_widened = _tree.widen([abstract, half], keep=(jnp.dtype("float16"),))
    assert [leaf.dtype for leaf in partly_widened] == ["float32", "float16"]


def test_leaves_and_nones_contains_none():
    assert _tree.leaves_and_nones({"a": None, "b": [1, (None, 2)]}) == [None, 1, None, 2]


@pytest.mark.parametrize("name", TOUCHED)
def test_scale_keeps_dtypes_and_unscale_returns_at_least_float32(name):
    make, widened_dtype = LEAVES[name]
    with enable_x64(True):
        leaf = make()
        scaled, unscaled = jls.FixedLossScale(2).scale([leaf])[0], jls.FixedLossScale(2).unscale([leaf])[0]
        widened = _tree.widen([leaf])[0]
        assert _tree.is_inexact(leaf)
        assert scaled.dtype == jnp.asarray(leaf).dtype
        assert unscaled.dtype == widened.dtype == widened_dtype
        assert scaled.shape == unscaled.shape == widened.shape == jnp.shape(leaf)
        for result, expected in ((scaled, 2.0), (unscaled, 0.5), (widened, 1.0)):
            assert np.all(np.asarray(result).astype(np.complex128) == expected)


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [(1.0, "float32"), (np.float64(1), "float32"), (np.ones(2), "float32"), (1j, "complex64")],
    ids=["python float", "numpy float64 scalar", "numpy float64", "python complex"],
)
def test_float64_leaves_become_float32_without_x64(leaf, dtype):
    assert jls.FixedLossScale(2).unscale(leaf).dtype == dtype


def test_unscale_of_a_sparse_matrix_changes_only_its_data():
    matrix = sparse.BCOO((jnp.ones(2, jnp.float16), jnp.array([[0, 1], [2, 0]])), shape=(3, 3))
    unscaled = jls.FixedLossScale(4).unscale({"embedding": matrix})["embedding"]
    assert unscaled.indices is matrix.indices
    np.testing.assert_array_equal(unscaled.data, np.float32([0.25, 0.25]), strict=True)


@pytest.mark.parametrize(
    ("dtype", "leaf", "scale", "expected"),
    [
        ("float16", 0.0, 2.0**16, 0.0),  # 2**16 is infinite in float16, so 0 * 2**16 would be NaN.
        ("float16", -0.0, 2.0**16, -0.0),
        ("float16", 2.0**-10, 2.0**16, 2.0**6),
        ("float16", 2.0**-24, 2.0**24, 1.0),
        ("float16", 1 + 2.0**-10, 2.0**14, 2.0**14 + 2.0**4),
        ("float16", 1.0, 2.0**16, np.inf),
        ("float16", -np.inf, 2.0, -np.inf),
        ("float16", np.nan, 2.0, np.nan),
        ("bfloat16", 1.0, 2.0**126, 2.0**126),
        ("bfloat16", 1 + 2.0**-7, 2.0**60, 2.0**60 + 2.0**53),
        ("bfloat16", 1.0, 2.0**127, 2.0**126),  # 2**126 is the largest applied scale.
        ("float8_e5m2", 1.0, 2.0**16, np.inf),
        ("float8_e5m2", 0.0, 2.0**127, 0.0),
        ("float8_e4m3fn", 0.0, 2.0**127, 0.0),
        ("float32", 1.0, FLOAT32_MAX, LARGEST_APPLIED),
        ("complex64", complex(1 + 2.0**-23, -(2.0**-60)), 4.0, complex(4 + 2.0**-21, -(2.0**-58))),
        ("complex64", complex(np.inf, 1), 4.0, complex(np.inf, 4)),
        ("complex64", complex(1, -np.inf), 4.0, complex(4, -np.inf)),
        ("complex64", complex(np.nan, 1), 4.0, complex(np.nan, 4)),
    ],
)
def test_scale_of_special_values(dtype, leaf, scale, expected):
    result = np.asarray(jls.FixedLossScale(scale).scale(jnp.array(leaf, dtype)))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(np.complex128), np.complex128(expected))
    assert np.signbit(result.real.astype(np.float64)) == np.signbit(np.real(expected))


@pytest.mark.parametrize("leaf", [complex(np.inf, 1), complex(1, -np.inf), np.inf, -np.inf, np.nan])
def test_unscale_of_nonfinite_values(leaf):
    expected = complex(leaf.real / 4, leaf.imag / 4) if isinstance(leaf, complex) else leaf
    np.testing.assert_array_equal(jls.FixedLossScale(4).unscale(leaf), expected)


def unscale_eagerly(leaf, scale):
    """Unscale with the public interface. The scale is a leaf, so all scales share one compiled program."""
    anywhere = jls.DynamicLossScale(min_loss_scale=2.0**-126)
    return dataclasses.replace(anywhere, current_loss_scale=jnp.float32(scale)).unscale(leaf)


def unscale_by_a_constant(leaf, scale):
    """Unscale under `jax.jit` with a constant scale, which the compiler may fold."""
    return jax.jit(lambda leaf: unscale_eagerly(leaf, scale))(leaf)


def unscale_by_a_constant_argument(leaf, scale):
    """Unscale in a nested `jax.jit` function whose scale is a constant of the outer function."""
    return jax.jit(lambda leaf: jax.jit(unscale_eagerly)(leaf, jnp.float32(scale)))(leaf)


UNSCALE = {
    "eager": unscale_eagerly,
    "jit": jax.jit(unscale_eagerly),
    "constant": unscale_by_a_constant,
    "constant argument": unscale_by_a_constant_argument,
}
MODES = pytest.mark.parametrize("unscale", UNSCALE.values(), ids=UNSCALE)


def assert_quotient(unscale, leaf, scale, max_ulp=0):
    """Compare ``leaf / scale`` with NumPy for zero or normal results. XLA flushes subnormals to zero on CPUs."""
    leaf, given, scale = np.asarray(leaf), scale, np.float32(np.clip(scale, FLOAT32_TINY, LARGEST_APPLIED))
    magnitude = np.abs(leaf.astype(np.float64)) / np.float64(scale)
    comparable = (magnitude == 0) | (magnitude >= FLOAT32_TINY)
    if max_ulp:  # The distance from infinity in units in the last place is undefined.
        comparable &= magnitude <= FLOAT32_MAX / 2
    with np.errstate(over="ignore", under="ignore"):
        expected = (leaf.astype(np.float32) / scale)[comparable]
    actual = np.asarray(unscale(leaf, given))[comparable]
    assert actual.dtype == np.float32
    if max_ulp:
        np.testing.assert_array_max_ulp(actual, expected, max_ulp)
    else:
        np.testing.assert_array_equal(actual, expected)


EXPONENTS = np.arange(-126, 128)  # These are the exponents of all power-of-two loss scales.
# The grid covers the range of normal float32 numbers.
GRID = np.ldexp(np.float32([[1], [-1.5], [2 - 2**-23]]), np.arange(-126, 128, 7)).ravel()


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_unscale_is_exact_at_every_power_of_two(mode):
    for exponent in EXPONENTS:
        assert_quotient(UNSCALE[mode], GRID, 2.0**exponent)


@pytest.mark.parametrize("exponent", [-149, -127, -126, -1, 0, 1, 15, 64, 100, 125, 126, 127])
@pytest.mark.parametrize("mode", ["constant", "constant argument"])
def test_unscale_is_exact_for_constant_scales(mode, exponent):
    assert_quotient(UNSCALE[mode], GRID, 2.0**exponent)


@MODES
@pytest.mark.parametrize("scale", [FLOAT32_MAX, 3e38, 1e20, 3.0, 65504.0, 1.1])
def test_unscale_by_other_scales_is_within_two_ulp(unscale, scale):
    assert_quotient(unscale, GRID, scale, max_ulp=2)


@MODES
def test_unscale_is_exact_for_every_subnormal_float16(unscale):
    subnormals = np.arange(1, 2**10, dtype=np.uint16).view(np.float16)
    for scale in (1.0, 2.0**15, 2.0**100):
        assert_quotient(unscale, subnormals, scale)


@MODES
@pytest.mark.parametrize("scale", [1024.0, 2.0**127, FLOAT32_MAX, 3.0])
def test_unscale_keeps_the_precision_of_float64(unscale, scale):
    with enable_x64(True):
        leaf = np.array([1 + 2.0**-52, -(2.0**900) / 3, 1e-200])
        actual = np.asarray(unscale(leaf, scale))
        np.testing.assert_array_max_ulp(
            actual, leaf / np.float64(min(np.float32(scale), LARGEST_APPLIED)), 2 if scale == 3 else 0
        )


@MODES
@pytest.mark.parametrize("exponent", [0, 15, 64, 127])
def test_unscale_of_complex_values_is_exact(unscale, exponent):
    leaf = np.complex64([3 + 5j, -1.5 + 0j]) * np.float32(2.0**100)
    expected = leaf / np.float32(min(2.0**exponent, LARGEST_APPLIED))
    np.testing.assert_array_equal(np.asarray(unscale(leaf, 2.0**exponent)), expected)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126, 2.0**127, FLOAT32_MAX])
def test_scaling_and_unscaling_functions_apply_the_same_scale(scale):
    loss_scale = dataclasses.replace(jls.DynamicLossScale(), current_loss_scale=scale)
    leaf = np.float32([1.0, -1.25]) if scale > 1 else np.float32([2.0**100, -(2.0**100)])
    assert loss_scale() == np.float32(scale)
    np.testing.assert_array_equal(loss_scale.unscale(loss_scale.scale(leaf)), leaf)
    for function, applied in (jls.scale_gradient, loss_scale.scale), (jls.unscale_gradient, loss_scale.unscale):
        pulled_back = jax.vjp(lambda x, function=function: function(x, loss_scale), leaf)[1](leaf)[0]
        np.testing.assert_array_equal(pulled_back, applied(leaf))
    grads = jls.scaled_grad(lambda x: jnp.vdot(x, leaf), loss_scale)(leaf)
    np.testing.assert_array_equal(loss_scale.unscale(grads), leaf)


# Each function is compiled. The scale and the predicate are already on the device.
COMPILED = {
    "scale": jls.FixedLossScale(2).scale,
    "unscale": jls.FixedLossScale(2).unscale,
    "update": jls.DynamicLossScale().update,
    "all_finite": jls.all_finite,
    "cast_floating": lambda tree: jls.cast_floating(tree, jnp.bfloat16),
    "select_tree": lambda tree: jls.select_tree(np.True_, tree, tree),
}


@pytest.mark.parametrize("name", COMPILED)
def test_eager_call_compiles_one_program_once(name, compilations):
    # These shapes occur nowhere else, so a separate operation would cause a compilation.
    tree = [np.ones((11, 300 + i), np.float32) for i in range(12)] + [1.0, np.ones(313, np.float16), None, "name"]
    # The call compiles constants, which JAX compiles once per dtype under x64.
    COMPILED[name](np.float32(1))
    before = len(compilations)
    for _ in range(2):
        COMPILED[name](tree)
        assert len(compilations) == before + 1


@pytest.mark.parametrize("name", COMPILED)
def test_calls_are_inlined_under_jit(name):
    """Before jax 0.11, calls are inlined when a function is traced, and since jax 0.11, when it is lowered."""
    tree = [jnp.ones(3), jnp.ones((2, 2), jnp.float16), jnp.ones(2, jnp.complex64), jnp.arange(3)]
    lowered = jax.jit(lambda tree: COMPILED[name](tree)).lower(tree).as_text()
    # `jnp.where` contains a nested call.
    assert set(re.findall(r"call @([a-z_]+?)(?:_\d+)?\(", lowered)) <= {"_where"}


FLOAT0 = np.zeros(2, jax.dtypes.float0)
SELECTIONS = {
    "float16": (jnp.ones(2, jnp.float16), jnp.zeros(2, jnp.float16)),
    "numpy": (np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)),
    "numpy and jax": (np.float32([1]), jnp.zeros(1, jnp.float32)),
    "python float": (1.5, 2.5),
    "python int": (1, 2),
    "python bool": (True, False),
    "complex": (jnp.array([1 + 2j]), jnp.array([complex(np.inf, np.nan)])),
    "int8": (jnp.int8([1, 2]), jnp.int8([3, 4])),
    "bool": (jnp.array([True, False]), jnp.array([True, True])),
    "NaN": (jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.inf])),
    "random key": (jax.random.key(1), jax.random.key(2)),
    "random keys": (jax.random.split(jax.random.key(1), 3), jax.random.split(jax.random.key(2), 3)),
    "float0": (FLOAT0, FLOAT0),
    "None": (None, None),
    "equal strings": ("adam", "adam"),
    "the same function": (len, len),
    "the same dtype": (jnp.float16, jnp.float16),
    "the same dtype of numpy": (np.float16, np.float16),
    "empty": (jnp.ones((0, 2)), jnp.zeros((0, 2))),
}


def assert_same_leaf(actual, expected):
    if expected is None or expected is FLOAT0 or isinstance(expected, str) or callable(expected):
        assert actual is expected
        return
    assert_same_bits(actual, jnp.asarray(expected))


@pytest.mark.parametrize("pred", [True, np.False_, jnp.array(True), jnp.array(False)], ids=repr)
@pytest.mark.parametrize("name", SELECTIONS)
def test_select_tree_for_each_leaf_type(name, pred):
    on_true, on_false = SELECTIONS[name]
    selected = jls.select_tree(pred, {"leaf": [on_true]}, {"leaf": [on_false]})
    assert_same_leaf(selected["leaf"][0], on_true if pred else on_false)


class NeverEqual:
    __hash__ = object.__hash__

    def __eq__(self, other):
        return False


def test_select_tree_accepts_equal_or_identical_leaves():
    name, its_copy, odd, names = "adam", "".join(["ad", "am"]), NeverEqual(), np.zeros(2, "U1, f4")
    assert name is not its_copy
    selected = jls.select_tree(False, [name, odd, names], [its_copy, odd, names.copy()])
    assert all(leaf is expected for leaf, expected in zip(selected, [name, odd, names], strict=True))


def test_select_tree_under_jit_and_vmap():
    on_true, on_false = {"mean": jnp.arange(3.0)}, {"mean": jnp.full(3, jnp.nan)}
    expected = [[0, 1, 2], [np.nan] * 3]
    select = jax.vmap(jls.select_tree, in_axes=(0, None, None))
    for function in (select, jax.jit(select)):
        selected = function(jnp.array([True, False]), on_true, on_false)
        np.testing.assert_array_equal(selected["mean"], np.float32(expected))


@pytest.mark.parametrize(
    ("on_true", "on_false"),
    [
        ("adam", "sgd"),
        (len, max),
        ("adam", 1.0),
        (1.0, "adam"),
        (1.0, 1),
        (jnp.ones(2), jnp.ones(3)),
        (jnp.ones(2), jnp.ones((1, 2))),
        (jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float32)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jnp.uint32(0)),
        (FLOAT0, np.zeros(3, jax.dtypes.float0)),
        (jnp.float16, jnp.bfloat16),
        (jnp.float16, jnp.float16(1)),
        (jnp.float16(1), Fraction(1)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (NeverEqual(), NeverEqual()),
    ],
    ids=lambda leaf: repr(leaf)[:20],
)
def test_select_tree_error_names_the_path_of_different_leaves(on_true, on_false):
    with pytest.raises(ValueError, match=r"\['stats'\]\[1\]"):
        jls.select_tree(True, {"stats": [0.0, on_true]}, {"stats": [0.0, on_false]})


@pytest.mark.parametrize("pred", [1, "yes", None, jnp.array([True, False])], ids=repr)
def test_select_tree_rejects_other_predicates(pred):
    with pytest.raises(ValueError, match=r"`select_tree\(pred=...\)` must be a boolean scalar"):
        jls.select_tree(pred, 1.0, 2.0)


@pytest.mark.parametrize(
    ("on_true", "on_false"),
    [({"mean": 1.0}, {"var": 1.0}), ([1.0], (1.0,)), ([1.0], [1.0, 2.0]), ([None], [1.0])],
)
def test_select_tree_rejects_different_structures(on_true, on_false):
    with pytest.raises(ValueError, match="same structure"):
        jls.select_tree(True, on_true, on_false)


def test_cast_floating_does_not_cast_python_floats():
    """A Python float may be a dropout rate, for example, on which user code may branch."""
    model = {"weights": jnp.ones(2), "rate": 0.5, "numpy": np.float64(0.5)}
    cast = jls.cast_floating(model, jnp.float16)
    assert cast["rate"] is model["rate"]
    assert cast["weights"].dtype == cast["numpy"].dtype == jnp.float16  # NumPy scalars have a dtype and are cast.


@pytest.mark.parametrize("dtype", [jnp.float16, "bfloat16", np.float32, np.dtype(np.float16), jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", TOUCHED)
def test_cast_floating_changes_the_dtype(name, dtype):
    with enable_x64(True):
        leaf = jnp.asarray(LEAVES[name][0]())
        cast = jls.cast_floating({"leaf": leaf}, dtype)["leaf"]
        is_complex = jnp.iscomplexobj(leaf)
        assert cast.dtype == (leaf.dtype if is_complex else jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(cast).astype(np.complex128), np.ones(leaf.shape))


MIXED = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": np.ones(3, np.float16)},
    "norm": [jnp.ones(3), np.float32(1.0)],
    "dropout rate": 0.5,
    "phase": jnp.ones(2, jnp.complex64),
    "step": jnp.int32(3),
    "frozen": None,
    "activation": jnp.tanh,
}
FLOATING = {"['dense']['bias']", "['dense']['kernel']", "['norm'][0]", "['norm'][1]"}
WHERE = {
    "all": (lambda path, leaf: True, FLOATING),
    "none": (lambda path, leaf: False, set()),
    "by path": (lambda path, leaf: "norm" not in jax.tree_util.keystr(path), {p for p in FLOATING if "dense" in p}),
    "by key": (lambda path, leaf: path[-1] == jax.tree_util.DictKey("bias"), {"['dense']['bias']"}),
    "by leaf": (lambda path, leaf: jnp.ndim(leaf) == 2, {"['dense']['kernel']"}),
    "numpy's bool": (lambda path, leaf: np.bool_(jnp.ndim(leaf) == 0), {"['norm'][1]"}),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WHERE)
def test_cast_floating_with_where(name, compiled):
    where, expected = WHERE[name]
    cast = jls.cast_floating(MIXED, jnp.bfloat16, where=where)
    if compiled:
        arrays = {key: value for key, value in MIXED.items() if key not in ("activation", "dropout rate")}
        cast = {**cast, **jax.jit(lambda tree: jls.cast_floating(tree, jnp.bfloat16, where=where))(arrays)}
    assert jax.tree.structure(cast) == jax.tree.structure(MIXED)
    found = set()
    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(MIXED), jax.tree.leaves(cast), strict=True):
        if getattr(after, "dtype", None) == jnp.bfloat16:
            found.add(jax.tree_util.keystr(path))
        elif not compiled:
            assert after is before
    assert found == expected


def test_cast_floating_calls_where_only_for_floating_leaves():
    paths = []
    jls.cast_floating(MIXED, jnp.float16, where=lambda path, leaf: paths.append(jax.tree_util.keystr(path)) or True)
    assert sorted(paths) == sorted(FLOATING)


# --- Leaves on different devices, as in pipeline parallelism ---


def across_devices():
    """Return leaves on two devices, on a mesh of three other devices, in NumPy, and on the default device."""
    mesh = jax.sharding.Mesh(jax.devices()[2:5], "x")
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = {"first": jax.devices()[0], "second": jax.devices()[1], "mesh": replicated}
    leaves = np.linspace(0, 1, 20, dtype=np.float16).reshape(4, 5)
    tree = {name: [jax.device_put(leaf, place) for leaf in leaves] for name, place in places.items()}
    return {"b": np.float16(2), **tree, "a": jnp.float16(3), "static": "relu", "frozen": None}


def test_leaves_stay_on_their_devices_with_one_dispatch_per_device(monkeypatch):
    calls = []
    for name in "_widen", "_cast":
        compiled = getattr(_tree, name)
        monkeypatch.setattr(_tree, name, lambda *args, compiled=compiled: (calls.append(args), compiled(*args))[1])
    tree = across_devices()
    for cast in _tree.widen, partial(jls.cast_floating, dtype=jnp.float32):
        calls.clear()
        result = cast(tree)
        assert sorted(len(leaves) for leaves, _ in calls) == [2, 4, 4, 4]
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        assert [leaf.sharding for leaf in jax.tree.leaves(result["mesh"])] == [leaf.sharding for leaf in tree["mesh"]]
        for name in ("first", "second"):
            assert {device for leaf in result[name] for device in leaf.devices()} == set(tree[name][0].devices())
        jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, old), result, tree)
        assert {leaf.dtype for leaf in _tree.inexact_leaves(result)} == {jnp.dtype("float32")}
        for together, number in ([tree["first"], tree["a"], tree["b"]], 1), ([tree["first"], tree["second"]], 2):
            calls.clear()
            cast(together)
            assert len(calls) == number


@pytest.mark.parametrize(
    ("tree", "paths", "crc"),
    [
        ({"a": 1, "b": [None, 2]}, ["['a']", "['b'][0]", "['b'][1]"], 672161751),
        ({"w0": [None, 1]}, ["['w0'][0]", "['w0'][1]"], 3160272883),
    ],
)
def test_hash_of_paths_is_an_int32_number_that_never_changes(tree, paths, crc):
    """Checkpoints contain the hash. Each ``None`` counts as a leaf."""
    assert _tree.paths_of(tree) == paths
    assert _tree.hash_of_paths(tree) == crc % 2**31
