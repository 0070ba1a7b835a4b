"""`in_half` inside and outside of JAX transformations: which of its two functions is computed, and in which dtype.

The half-precision function computes a sine and the fallback computes a cosine, so the result shows which one was used.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import pcast
from exact_programs import STRUCTURES
from jax.sharding import PartitionSpec as P
from reading import equations, matmul_dtypes, residual_types, result_dtypes
from small_programs import W, X

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, in_precision

pytestmark = pytest.mark.ci

HALVES = (jnp.float16, jnp.bfloat16)


@jax.custom_vjp
def kernel(w, x):
    """Return ``sin(x @ w)`` for 16-bit operands. The custom derivative is three times the true derivative."""
    assert {w.dtype, x.dtype} <= {*map(jnp.dtype, HALVES)}, "16 bits only"
    return jnp.sin(x @ w)


def kernel_backward(saved, cotangent):
    w, x = saved
    of_matmul = 3 * cotangent * jnp.cos(x @ w)
    return x.T @ of_matmul, of_matmul @ w.T


kernel.defvjp(lambda w, x: (kernel(w, x), (w, x)), kernel_backward)


def reference(w, x):
    return jnp.cos(x @ w)


def by_hand(dtype, function=kernel):
    """Cast the operands of a function to `dtype` and its result to float32, as `autocast` must do with `either`."""
    return lambda w, x: function(w.astype(dtype), x.astype(dtype)).astype(jnp.float32)


either = jls.in_half(kernel, reference)
kernel_only = jls.in_half(kernel)
jitted_once = jax.jit(either)  # All tests share the cached jaxpr of this function.


def shard_mapped(function, axes, **options):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=(P(), P("data")), out_specs=axes, **options)


def with_its_own_rule(function):
    @jax.custom_jvp
    def ruled(w, x):
        return function(w, x)

    ruled.defjvp(lambda primals, tangents: (function(*primals), function(*primals) * tangents[1]))
    return ruled


def of_one_row(function, **options):
    """Return a version of a function for a single row of ``x``."""
    return lambda w, x: function(w, x[None], **options)[0]


# Transformations that are applied before `autocast`. Each one maps a function of W and X to another such function.
BELOW = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "cached jit": lambda f: jitted_once if f is either else f,
    "vmap in jit in vmap": lambda f: (
        lambda w, x: jax.vmap(jax.jit(jax.vmap(of_one_row(f), (None, 0))), (0, None))(jnp.stack([w, w.T]), x)
    ),
    **{
        name: lambda f, structure=STRUCTURES[f"in_{name}"]: functools.partial(structure, f)
        for name in ("vmap", "scan", "scan_over_weights", "fori", "while", "cond", "switch", "remat")
    },
    "remat in scan": lambda f: (
        lambda w, x: jax.lax.scan(jax.checkpoint(lambda x, w: (x + f(w, x), None)), x, jnp.stack([w, w.T]))
    ),
    "shard_map": lambda f: shard_mapped(lambda w, x: f(pcast(w, "data", to="varying"), x), P("data")),
    "custom_jvp": with_its_own_rule,
    "autocast": lambda f: jls.autocast(f) if f is either else f,
}
# Transformations that are applied to the result of `autocast`.
ABOVE = {
    "jit": lambda f: jax.jit(f)(W, X),
    "value and grad": lambda f: jax.value_and_grad(f, (0, 1))(W, X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(W, X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, X + 1])),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "value and scaled grad": lambda f: jls.value_and_scaled_grad(f, 2.0**10)(W, X),
    "autocast": lambda f: jax.grad(jls.autocast(f))(W, X),
}


def loss_of(function):
    def loss(w, x):
        return sum(jnp.mean(jnp.square(each - 0.5)) for each in jax.tree.leaves(function(w, x)))

    return loss


def assert_alike(found, expected):
    """Check that the types are equal and that the values differ at most by the order of float32 sums.

    The tolerance is far smaller than the difference between a sine in 16 bits and a sine in 32 bits.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("below", "above"),
    [*((below, "value and grad") for below in BELOW), *(("vmap in jit in vmap", above) for above in ABOVE)],
)
def test_autocast_computes_the_half_precision_function(below, above):
    below, above = BELOW[below], ABOVE[above]
    assert_alike(above(jls.autocast(loss_of(below(either)))), above(loss_of(below(by_hand(jnp.float16)))))


@pytest.mark.parametrize("below", BELOW.values(), ids=BELOW)
def test_fallback_is_computed_without_autocast(below):
    if below is not BELOW["autocast"]:
        assert_alike(loss_of(below(either))(W, X), loss_of(below(reference))(W, X))


def test_operand_of_in_half_is_saved_in_half_precision():
    def loss(w, bias, x):
        return jnp.sum(jls.in_half(jnp.sin)(x @ w + bias[None]))

    program = jax.make_jaxpr(jax.grad(jls.autocast(loss), (0, 1)))(W, jnp.ones(W.shape[1]), X).jaxpr
    (derivative,) = (eqn for eqn in equations(program) if eqn.primitive.name == "cos")
    backward = [eqn for eqn in program.eqns if eqn.primitive.name == "remat2"]
    assert derivative.invars[0].aval.dtype == jnp.float16
    assert {atom.aval.dtype.name for eqn in backward for atom in eqn.invars if atom.aval.ndim == 2} <= {"float16"}


def test_autocast_to_bfloat16_computes_the_half_precision_function():
    found = jax.value_and_grad(jls.autocast(loss_of(either), jnp.bfloat16), (0, 1))(W, X)
    assert_alike(found, jax.value_and_grad(loss_of(by_hand(jnp.bfloat16)), (0, 1))(W, X))


def test_half_precision_values_are_not_cast_again():
    """Casts between matmuls and the half-precision function are omitted."""
    half = jls.autocast(lambda w, x: jls.in_half(jnp.negative)(x @ w) @ w)
    assert result_dtypes(["convert_element_type"], half, W, X) == ["float16"] * 3 + ["float32"]


def test_in_half_saves_no_float32_residuals():
    loss = jls.autocast(lambda w, x: loss_of(either)(jnp.sin(w), jnp.sin(x)))
    assert {aval.dtype.name for aval in residual_types(loss, W, X)} == {"float16"}


# Calls for which the fallback is computed under `autocast`.

FLOAT32_BY_A_RULE = {
    "operation": {"operation": "in_half"},
    "layer": {"layer": "attention"},
    "line": {"source": "test_in_half.py:*"},
}


@pytest.mark.parametrize("below", ["nothing", "jit", "vmap in jit in vmap", "scan", "remat"])
def test_fallback_is_computed_inside_keep_float32(below):
    saved = jls.keep_float32(BELOW[below](either))
    expected = jax.value_and_grad(loss_of(BELOW[below](reference)))(W, X)
    assert_alike(jax.value_and_grad(jls.autocast(loss_of(saved)))(W, X), expected)


@pytest.mark.parametrize("rule", FLOAT32_BY_A_RULE.values(), ids=FLOAT32_BY_A_RULE)
@pytest.mark.parametrize("precision", ["float32", "float32_result"])
def test_fallback_is_computed_in_float32_if_a_rule_matches(rule, precision):
    def loss(w, x):
        with jax.named_scope("attention"):
            return loss_of(either)(w, x)

    policy = jls.PrecisionPolicy([jls.PrecisionRule(precision, **rule)])
    found = jax.value_and_grad(jls.autocast(loss, policy=policy))(W, X)
    assert_alike(found, jax.value_and_grad(loss_of(reference))(W, X))


@pytest.mark.parametrize(
    "rule", [("half", {}), ("float32", {"layer": "head"}), ("float32", {"operation": "dot_general"})]
)
def test_fallback_is_not_computed_because_of_other_rules(rule):
    precision, patterns = rule
    rules = jls.PrecisionRule(precision, **patterns), jls.PrecisionRule("float32", operation="add")
    policy = jls.PrecisionPolicy(rules)

    def loss(w, x):
        with jax.named_scope("head"):
            x = x + 1
        x = x @ w
        with jls.keep_float32() if precision == "half" else jax.named_scope("attention"):
            return loss_of(either)(w, x)

    numbers = {each.dtype for each in autocast_report(loss, W, X, policy=policy) if each.operation == "sin"}
    assert numbers == {"float16"}


# Derivatives that are taken before `autocast`. They are derivatives of the fallback, which `autocast` then casts like
# any other function.
DIFFERENTIATED = {
    "grad": lambda f: jax.grad(loss_of(f), (0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(loss_of(f))),
    "grad of vmap": lambda f: jax.grad(loss_of(BELOW["vmap"](f))),
    "grad in scan": lambda f: (
        lambda w, x: jax.lax.scan(lambda x, w: (jax.grad(loss_of(f), 1)(w, x), None), x, jnp.stack([w, w.T]))
    ),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda b: loss_of(f)(w, x + b))(jnp.zeros((1, 8))),
    "linear_transpose": lambda f: lambda w, x: jax.linear_transpose(lambda x: linear(f)(w, x)[0], x)(x),
}


def linear(function):
    """Return a linear function with an unused second result, or an `in_half` function whose fallback is linear."""

    def other(w, x):
        return x @ w, 2 * x

    return other if function is reference else jls.in_half(lambda w, x: (x @ w + 1, x), other)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "hessian" else ()) for name in DIFFERENTIATED]
)
def test_derivative_before_autocast_uses_the_fallback(name):
    derivative = DIFFERENTIATED[name]
    expected = derivative(reference)
    assert_alike(derivative(either)(W, X), expected(W, X))
    assert_alike(jls.autocast(derivative(either))(W, X), jls.autocast(expected)(W, X))
    assert set(matmul_dtypes(jls.autocast(derivative(either)), W, X)) == {"float16"}


def test_autocast_to_float32_does_not_change_in_half():
    assert jls.autocast(either, jnp.float32) is either


# Arguments and results.


def test_in_half_supports_any_arguments_and_results():
    seen = []

    def function(tree, mask, *, scale, name, bias=None, key):
        seen.append((tree["w"].dtype, [each.dtype for each in tree["x"]], mask.dtype, key.dtype, scale, name, bias))
        y = jnp.where(mask, sum(tree["x"]) @ tree["w"], 0) * scale
        return {"y": y, "float32": y.astype(jnp.float32), "number": 3, "none": None, "indices": jnp.argmax(y), "f": len}

    keywords = {"scale": 0.5, "name": "n", "key": jax.random.key(0)}
    given = ({"w": np.asarray(W), "x": [X, X.astype(jnp.bfloat16)]}, X > 0)
    found = jls.autocast(jls.in_half(function))(*given, **keywords)
    expected = function(*given, **keywords)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    arrays = {name: each for name, each in found.items() if isinstance(each, jax.Array)}
    chex.assert_trees_all_close(arrays, {name: expected[name] for name in arrays}, rtol=1e-2, atol=1e-2)
    dtypes = {name: each.dtype.name for name, each in arrays.items()}
    assert dtypes == {"y": "float32", "float32": "float32", "indices": "int32"}
    assert (found["number"], found["f"]) == (3, len)
    for dtype, record in zip((jnp.float32, *HALVES, jnp.float32), seen, strict=True):
        assert record == (dtype, [dtype, jnp.bfloat16], bool, keywords["key"].dtype, 0.5, "n", None)


def test_float32_result_of_the_half_precision_function_is_not_rounded():
    def function(w, x):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    expected = function(W.astype(jnp.float16), X.astype(jnp.float16))
    np.testing.assert_array_equal(jls.autocast(jls.in_half(function))(W, X), expected)


def test_result_in_another_half_precision_dtype_is_cast_for_a_matmul():
    half = jls.in_half(lambda w, x: (x @ w).astype(jnp.bfloat16), reference)
    assert set(matmul_dtypes(jls.autocast(lambda w, x: half(w, x) @ w), W, X)) == {"float16"}


def test_in_precision_computes_the_fallback():
    def cast(w, x):
        return jls.in_half(kernel, reference)(w.astype(jnp.float16), x.astype(jnp.float16))

    w, x = (each.astype(jnp.float16).astype(jnp.float32) for each in (W, X))
    np.testing.assert_allclose(in_precision(cast)(w, x), reference(w, x), rtol=1e-6)


def test_result_has_the_dtype_of_the_fallback():
    by_author = jls.in_half(lambda w, x: x @ w, lambda w, x: (x @ w).astype(jnp.bfloat16))
    assert jls.autocast(by_author)(W, X).dtype == by_author(W, X).dtype == jnp.bfloat16


def test_captured_constant_keeps_its_dtype():
    constant = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)
    shifted = jls.in_half(lambda w, x: kernel(w, x) + constant, lambda w, x: reference(w, x) + constant)
    assert_alike(jax.jit(jls.autocast(shifted))(W, X), by_hand(jnp.float16)(W, X) + constant)
    assert_alike(shifted(W, X), reference(W, X) + constant)


@pytest.mark.parametrize(
    "call",
    [
        lambda w, x: jls.in_half(lambda x: x @ w)(x),
        lambda w, x: jls.in_half(lambda x: jnp.sin(x), lambda x: x @ w)(x),
        lambda w, x: jls.in_half(lambda x: x @ w, lambda x: jnp.sin(x))(x),
    ],
    ids=["both", "fallback", "function"],
)
def test_captured_tracer_raises_an_error(call):
    """A captured tracer would not be cast, and it would no longer exist when `autocast` evaluates the function."""
    with pytest.raises(ValueError, match=r"uses a traced array, float32\[8,8\], that is not one of its arguments"):
        jax.jit(call)(W, X)


def with_integers(function):
    def loss(w, x):
        y, largest = function(w, x, x > 0)
        return jnp.mean(y * largest[:, None])

    return loss


def test_in_half_is_differentiable_with_integer_results():
    def function(w, x, mask):
        y = jnp.where(mask, jnp.sin(x @ w), 0)
        return y, jnp.argmax(y, axis=-1)

    def fallback(w, x, mask):
        y = jnp.where(mask, jnp.cos(x @ w), 0)
        return y, jnp.argmax(y, axis=-1)

    def hand(w, x, mask):
        y, largest = function(w.astype(jnp.float16), x.astype(jnp.float16), mask)
        return y.astype(jnp.float32), largest

    half = with_integers(jls.in_half(function, fallback))
    assert_alike(jax.grad(jls.autocast(half))(W, X), jax.grad(with_integers(hand))(W, X))
    assert_alike(jax.grad(jax.jit(half))(W, X), jax.grad(with_integers(fallback))(W, X))
    assert_alike(jax.jvp(half, (W, X), (W, X)), jax.jvp(with_integers(fallback), (W, X), (W, X)))


OVER_AXIS = {
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0), axis_name="data")(w, x[:, None]),
    "shard_map": lambda f: shard_mapped(f, P("data"), check_vma=False),
}


@pytest.mark.parametrize("mapped", OVER_AXIS.values(), ids=OVER_AXIS)
def test_axis_names_are_available_inside_in_half(mapped):
    def centred(function):
        return lambda w, x: function(w, x) - jax.lax.pmean(function(w, x), "data")

    half = jls.in_half(centred(kernel), centred(reference))
    for cast in (mapped(jls.autocast(half)), jls.autocast(mapped(half))):
        assert_alike(cast(W, X), mapped(by_hand(jnp.float16, centred(kernel)))(W, X))
    assert_alike(mapped(half)(W, X), mapped(centred(reference))(W, X))


@pytest.mark.parametrize("is_cast", [True, False])
def test_effects_occur_once(is_cast, capfd):
    def with_callback(function):
        def with_callback(w, x):
            jax.debug.print("{} is told", function.__name__, ordered=True)
            return function(w, x)

        return with_callback

    half = jls.in_half(with_callback(kernel), with_callback(reference))
    jax.jit(jls.autocast(half) if is_cast else half)(W, X).block_until_ready()
    jax.effects_barrier()
    assert jax.make_jaxpr(half)(W, X).effects
    assert capfd.readouterr().out == f"{'kernel' if is_cast else 'reference'} is told\n"


# A half-precision function without a fallback.


@pytest.mark.parametrize("below", ["nothing", "jit", "vmap", "scan", "remat", "cond"])
def test_fallback_is_optional_under_autocast(below):
    function, hand = (loss_of(BELOW[below](each)) for each in (kernel_only, by_hand(jnp.float16)))
    assert_alike(jax.value_and_grad(jls.autocast(function))(W, X), jax.value_and_grad(hand)(W, X))


WITHOUT = {
    "call": lambda f: f(W, X),
    "jit": lambda f: jax.jit(f)(W, X),
    "vmap": lambda f: jax.vmap(f)(W[None], X[None]),
    "differentiated": lambda f: jax.grad(loss_of(f))(W, X),
    "in keep_float32": lambda f: jls.autocast(jls.keep_float32(f))(W, X),
    "grad before autocast": lambda f: jls.autocast(jax.grad(loss_of(f)))(W, X),
}


@pytest.mark.parametrize("use", WITHOUT.values(), ids=WITHOUT)
def test_missing_fallback_raises_the_error_of_the_function(use):
    with pytest.raises(AssertionError, match="16 bits only") as caught:
        use(kernel_only)
    assert any("Pass a `fallback`" in note for note in caught.value.__notes__)


def test_function_may_support_a_single_dtype():
    def function(w, x):
        assert w.dtype == jnp.bfloat16, "bfloat16 only"
        return w @ x

    half = jls.in_half(function, jnp.matmul)
    assert jls.autocast(jls.in_half(function), jnp.bfloat16)(X, W).dtype == jnp.float32
    assert jls.autocast(half, jnp.bfloat16)(X, W).shape == half(X, W).shape == (4, 8)
    with pytest.raises(AssertionError, match="bfloat16 only"):
        jls.autocast(half)(X, W)


def test_cached_error_has_no_traceback():
    [eqn] = jax.make_jaxpr(jls.in_half(kernel))(W, X).eqns
    assert eqn.params["program_in"](jnp.dtype("float32")).__traceback__ is None


# Invalid functions.


# Functions and fallbacks that cannot be used together.
INVALID = {
    "structure": (
        kernel,
        lambda w, x: (reference(w, x),),
        r"\('float\[4,8\]',\) in float32, but float\[4,8\] in float16",
    ),
    "shape": (kernel, lambda w, x: reference(w, x).T, r"returns float\[8,4\] in float32, but float\[4,8\] in float16"),
    "kind": (kernel, lambda w, x: reference(w, x) > 0, r"returns bool\[4,8\] in float32"),
    "not an array": (kernel, lambda w, x: 3.0, "returns 3.0 in float32"),
    "a result that depends on the dtype": (
        lambda w, x: (x @ w)[0] if w.dtype == jnp.bfloat16 else x @ w,
        None,
        r"float\[4,8\] in float32, but float\[8\] in bfloat16",
    ),
    "an error in the fallback": (kernel, lambda w, x: x @ w[:3], "dot_general"),
}


@pytest.mark.parametrize(("function", "fallback", "message"), INVALID.values(), ids=INVALID)
def test_invalid_functions_raise_an_error_immediately(function, fallback, message):
    for call in (jls.in_half(function, fallback), jls.autocast(jls.in_half(function, fallback))):
        with pytest.raises((ValueError, TypeError), match=message):
            jax.eval_shape(call, W, X)


def test_error_that_is_unrelated_to_dtypes_is_raised_immediately():
    with pytest.raises(TypeError, match="dot_general") as caught:
        jax.eval_shape(jls.in_half(lambda w, x: x @ w), W, X[:, :3])
    assert not any("fallback" in note for note in caught.value.__notes__)


# Reports.


def test_report_counts_the_matmuls_of_the_half_precision_function():
    half = jls.in_half(jnp.matmul, lambda x, w: (x @ w) @ jnp.eye(8))
    report = autocast_report(loss_of(half), X, W)
    assert (report.summary.matmuls, report.summary.half_matmuls) == (2, 2)
    assert all("test_in_half.py:" in each.source for each in report.matmuls)
    beside_float32 = autocast_report(loss_of(lambda x, w: half(x, w) + jls.keep_float32(jnp.matmul)(x, w)), X, W)
    assert report.not_in_half == beside_float32.not_in_half == ()


HERE = "test_in_half.py:"
REPORTED = {
    "inside keep_float32": (jls.keep_float32(loss_of(either)), None, "inside `keep_float32`"),
    "by a rule": (
        loss_of(either),
        jls.PrecisionPolicy([jls.PrecisionRule("float32", operation="in_half")]),
        "a rule of the policy: PrecisionRule('float32', operation='in_half')",
    ),
    "grad before autocast": (
        lambda w, x: jnp.sum(jax.grad(loss_of(either), 1)(w, x) ** 2),
        None,
        "differentiated before `autocast`",
    ),
}


@pytest.mark.parametrize(("loss", "policy", "reason"), REPORTED.values(), ids=REPORTED)
def test_report_lists_calls_that_compute_the_fallback(loss, policy, reason):
    report = autocast_report(loss, W, X, policy=policy)
    [entry] = report.not_in_half
    assert entry.endswith(f" ({reason})")
    assert HERE in entry
    assert f"`in_half` functions that use their `fallback`: {entry}." in str(report)
    float32 = [each.reason for each in report.matmuls if each.dtype == "float32"]
    assert set(float32) == (set() if "differentiated" in reason else {"in `fallback` of `in_half`"})
