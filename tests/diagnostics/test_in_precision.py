"""`in_precision` returns the function that would have been written in another precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs_of_any_dtype as programs
import pytest
from any_jax import enable_x64, set_mesh
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from workloads import KEY, draw

from jax_lossscale import cast_floating
from jax_lossscale.diagnostics import in_precision
from jax_lossscale.diagnostics._in_precision import Evaluator

pytestmark = pytest.mark.ci

TABLE = jnp.arange(4, dtype=jnp.float16)


def assert_close(actual, expected, tolerance=1e-6):
    """Check structures, dtypes and values. The tolerance is relative to the largest magnitude of the expected leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        scale = max(float(jnp.max(jnp.abs(b))), 1e-30)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, rtol=0, atol=tolerance)


NOT_DIFFERENTIABLE_BACKWARDS = (programs.unbounded_while_loop, programs.custom_vmap)
BY_NAME = {"ids": lambda program: program.__name__}


def loss_of(fun):
    """Return a scalar loss that is computed in float32 from all results of a function."""
    return lambda *args: sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(fun(*args)))


@functools.cache
def in_float32(program):
    fun, args = program(jnp.float32)
    return jax.jit(fun)(*args)


@pytest.mark.parametrize("program", programs.PROGRAMS, **BY_NAME)
def test_float16_program_becomes_the_float32_program(program):
    fun, args = program(jnp.float16)
    half_dtypes = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(fun, *args))}
    assert_close(jax.jit(in_precision(fun, jnp.float32))(*args), in_float32(program))
    assert half_dtypes & {jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)}  # The program has float results.


@pytest.mark.parametrize("program", [p for p in programs.PROGRAMS if p not in NOT_DIFFERENTIABLE_BACKWARDS], **BY_NAME)
def test_float16_gradients_become_float32_gradients_in_either_order(program):
    fun, args = program(jnp.float16)
    float32_fun, _ = program(jnp.float32)
    argnums = tuple(range(len(args)))
    expected = jax.jit(jax.value_and_grad(loss_of(float32_fun), argnums))(*args)
    assert_close(jax.jit(in_precision(jax.value_and_grad(loss_of(fun), argnums)))(*args), expected)
    assert_close(jax.jit(jax.value_and_grad(in_precision(loss_of(fun)), argnums))(*args), expected)


@pytest.mark.parametrize("program", programs.PROGRAMS, **BY_NAME)
def test_float32_program_is_bitwise_unchanged(program):
    fun, args = program(jnp.float32)
    actual, expected = jax.jit(in_precision(fun, jnp.float32))(*args), in_float32(program)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)  # including weak types


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_float_dtype_below_32_bits_is_converted(dtype):
    fun, args = programs.casts_and_constants(dtype)
    float32_fun, _ = programs.casts_and_constants(jnp.float32)
    assert_close(in_precision(fun)(*args), float32_fun(*args))


def test_rounded_constant_stays_rounded():
    assert in_precision(lambda x: x + 0.1)(jnp.float16(0)) == np.float32(np.float16(0.1))


# Special cases.


def test_finfo_is_unchanged():
    def fun(x):
        return x.astype(jnp.float16) + jnp.finfo(jnp.float16).max

    assert in_precision(fun)(jnp.float32(65504)) == 2 * 65504
    assert fun(jnp.float32(65504)) == jnp.inf


def test_bitcasts_use_the_original_dtype():
    def fun(bits):
        return 2 * lax.bitcast_convert_type(bits, jnp.float16)

    def back(x):
        return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)

    one = jnp.uint16(np.float16(1.5).view(np.uint16))
    assert in_precision(fun)(one) == 3
    assert in_precision(fun)(one).dtype == jnp.float32
    assert in_precision(back)(jnp.float32(1.5)) == one


def test_random_numbers_are_unchanged():
    def fun(key):
        return jax.random.uniform(key, (8,), jnp.float16), jax.random.bernoulli(key, 0.5, (8,))

    actual, expected = in_precision(fun)(KEY), fun(KEY)
    np.testing.assert_array_equal(actual[0], expected[0].astype(jnp.float32))
    np.testing.assert_array_equal(actual[1], expected[1])


def test_float16_arguments_give_float32_results():
    out = in_precision(lambda x: {"y": x * x, "n": jnp.int32(3), "name": "a"})(jnp.float16(300))
    assert out == {"y": 90000, "n": 3, "name": "a"}
    assert out["y"].dtype == jnp.float32


def test_arguments_that_are_not_arrays_are_unchanged():
    def fun(x, power, training, activation, *, scale=1.0):
        assert isinstance(power, int)
        assert training is True
        return activation(x.astype(jnp.float16) ** power) * scale

    assert in_precision(fun)(jnp.float32(200), 3, True, jnp.negative, scale=2.0) == -16e6


def test_captured_tracers_are_differentiable():
    def outer(w):
        return in_precision(lambda x: w.astype(jnp.float16) * x)(jnp.float16(300)) * w

    assert jax.grad(outer)(jnp.float32(300)) == 2 * 300 * 300


def test_custom_vjp_with_a_captured_tracer_raises_the_error_of_jax():
    def fun(x, y):
        y = y.astype(jnp.float16)

        @jax.custom_vjp
        def multiply(x):
            return x * y

        multiply.defvjp(lambda x: (multiply(x), y), lambda y, cotangent: (5 * cotangent * y,))
        return multiply(x.astype(jnp.float16)).astype(jnp.float32)

    assert in_precision(jax.grad(fun))(jnp.float32(2), jnp.float32(3)) == 15
    for function in (jax.jit(fun), in_precision(jax.jit(fun)), in_precision(fun)):
        with pytest.raises(Exception, match="closed-over value"):
            jax.grad(function, 1)(jnp.float32(2), jnp.float32(3))


def test_symbolic_zeros_of_a_custom_jvp_have_the_dtype_of_its_result():
    square = jax.custom_jvp(lambda x: x * x)

    def rule(primals, _):
        result = square(*primals)
        return result, SymbolicZero(jax.typeof(result).to_tangent_aval())

    square.defjvp(rule, symbolic_zeros=True)

    def fun(x):
        return (square(x.astype(jnp.float16)) * x).astype(jnp.float32)

    assert jax.grad(in_precision(fun))(jnp.float32(300)) == 300 * 300


def test_vmap_of_in_precision_uses_the_custom_vmap_rule():
    @jax.custom_batching.custom_vmap
    def fun(x, y):
        return x * y

    fun.def_vmap(lambda size, batched, x, y: (5 * x * y[None], True))
    x, y = draw(3, 4).astype(jnp.float16), draw(4, seed=1).astype(jnp.float16)
    out = jax.vmap(in_precision(fun), in_axes=(0, None))(x, y)
    assert_close(out, 5 * x.astype(jnp.float32) * y.astype(jnp.float32)[None])


@pytest.mark.parametrize("half_dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_program_becomes_a_float64_program(half_dtype):
    with enable_x64(True):
        fun, args = programs.matmul_with_its_dtype(half_dtype)
        args = cast_floating(args, jnp.float32)
        out = in_precision(lambda w, x: w.astype(half_dtype) @ x.astype(half_dtype), jnp.float64)(*args)
        np.testing.assert_allclose(out, np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64), rtol=1e-12)
        assert in_precision(fun, jnp.float64)(*args).dtype == jnp.float32  # This is the preferred element type.
        conv = functools.partial(lax.conv, window_strides=(1, 1), padding="SAME", preferred_element_type=jnp.float32)
        x = cast_floating(draw(1, 1, 4, 4), half_dtype)
        assert in_precision(conv, jnp.float64)(x, x).dtype == jnp.float32


def test_float16_program_becomes_a_bfloat16_program():
    out = in_precision(lambda x: x.astype(jnp.float16) * 2, jnp.bfloat16)(jnp.float32(40000))
    assert out == 79872
    assert out.dtype == jnp.bfloat16


def test_matmul_keeps_a_larger_preferred_element_type():
    fun, args = programs.matmul_with_its_dtype(jnp.bfloat16)
    np.testing.assert_array_equal(
        in_precision(fun, jnp.float16)(*args), programs.matmul_with_its_dtype(jnp.float16)[0](*args)
    )


def test_reduce_precision_of_a_float32_value_is_kept():
    fun = functools.partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=10)
    assert in_precision(fun)(jnp.float32(1 / 3)) == np.float32(np.float16(1 / 3))


def test_reduce_precision_of_a_float16_value_to_fewer_bits_is_kept():
    fun = functools.partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=2)
    assert in_precision(fun)(jnp.float16(1.3)) == 1.25


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_program_becomes_the_float32_program(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))

    def program(dtype):
        def of_shard(w, x):
            return lax.pmean(jnp.sum(jax.nn.relu(x.astype(dtype) @ w) ** 2), "data")

        def loss(w, x):
            total = jax.shard_map(of_shard, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
            return (total(w.astype(dtype), x) + jnp.sum(x.astype(dtype))).astype(jnp.float32)

        return loss

    with set_mesh(mesh):
        w, x = draw(4, 4), jax.device_put(draw(8, 4), NamedSharding(mesh, jax.P("data")))
        expected = jax.jit(jax.value_and_grad(program(jnp.float32)))(w, x)
        assert_close(jax.jit(in_precision(jax.value_and_grad(program(jnp.float16))))(w, x), expected)
        assert_close(jax.jit(jax.value_and_grad(in_precision(program(jnp.float16))))(w, x), expected)


def test_float32_matmuls_have_the_highest_precision():
    jaxpr = jax.make_jaxpr(in_precision(lambda x: x @ x))(jnp.ones((2, 2), jnp.float16))
    (precision,) = [eqn.params["precision"] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert precision == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


# Operations that cannot be converted cause a warning.


def test_callback_is_not_converted_and_causes_a_warning():
    def fun(x):
        y = x.astype(jnp.float16)
        return y * jax.pure_callback(lambda y: np.float16(y + 1), jax.ShapeDtypeStruct((), jnp.float16), y)

    with pytest.warns(UserWarning, match="because it cannot convert them: pure_callback\\.") as warnings:
        out = in_precision(fun)(jnp.float32(2048.0))
    assert warnings[0].filename == __file__
    # The callback rounds 2049 to 2048 in float16. The result is computed in float32, because float16 would overflow.
    assert out == 2048.0 * 2048.0


def test_pallas_kernel_is_not_converted_and_causes_a_warning():
    from jax.experimental import pallas as pl

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fun(x):
        x = x.astype(jnp.float16)
        return pl.pallas_call(double, out_shape=x, interpret=True)(x)

    with pytest.warns(UserWarning, match="pallas_call"):
        out = in_precision(fun)(jnp.array([40000.0, 1.0]))
    np.testing.assert_array_equal(out, np.array([np.inf, 2], np.float32))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="from jax 0.8 on")
def test_mutable_array_is_not_converted_and_causes_a_warning():
    def fun(x, ref):
        made = jax.new_ref(x.astype(jnp.float16))
        made[0] = made[1] + x[0].astype(jnp.float16)
        ref[...] = 2 * ref[...]
        return made[...] * 2, ref[...] + x

    ref = jax.new_ref(jnp.float16([3, 4]))
    with pytest.warns(UserWarning, match="because it cannot convert them: new_ref, get, swap\\."):
        made, read = in_precision(fun)(jnp.float32([2048, 1]), ref)
    np.testing.assert_array_equal(made, jnp.float32([4096, 2]))  # float16 rounds 2049 to 2048.
    np.testing.assert_array_equal(read, jnp.float32([2054, 9]))  # This sum is in float32.
    np.testing.assert_array_equal(ref[...], jnp.float16([6, 8]))


def test_float16_only_operation_is_not_converted_and_causes_a_warning():
    def twice(x):
        if x.dtype != jnp.float16:
            raise TypeError("float16 only")
        return x * 2

    double = Primitive("double_float16")
    double.def_abstract_eval(lambda x: x)
    double.def_impl(twice)
    with pytest.warns(UserWarning, match="double_float16"):
        assert in_precision(lambda x: double.bind(x.astype(jnp.float16)) + 1)(jnp.float32(1)) == 3


def test_debug_print_is_supported(capfd):
    def fun(x):
        jax.debug.print("x {}", x.astype(jnp.float16))
        return x.astype(jnp.float16) * 2

    assert in_precision(fun)(jnp.float32(40000)) == 80000
    jax.effects_barrier()
    assert "x 40000" in capfd.readouterr().out


@pytest.mark.parametrize(("dtype", "words"), [("pear", "must be a dtype"), ("float64", "enable_x64")])
def test_invalid_dtype_raises_an_error(dtype, words):
    with pytest.raises(ValueError, match=rf"in_precision\(dtype=\.\.\.\).*{words}"):
        in_precision(jnp.sin, dtype)


def test_layers_are_preserved():
    def fun(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.tanh(x.astype(jnp.float16))

    jaxpr = jax.make_jaxpr(in_precision(fun, jnp.float32))(draw(4))
    assert [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns if eqn.primitive.name == "tanh"] == ["outer/inner"]


def test_jaxprs_with_different_constants_are_translated_separately():
    closed = jax.make_jaxpr(lambda x: x.astype(jnp.float16) * TABLE)(TABLE)
    first, second = (ClosedJaxpr(closed.jaxpr, [table]) for table in (TABLE, 2 * TABLE))
    evaluator = Evaluator(jnp.dtype(jnp.float32))
    for each, table in ((first, TABLE), (second, 2 * TABLE)):
        translated = evaluator.translated(each)
        np.testing.assert_array_equal(jaxpr_as_fun(translated)(jnp.ones(4))[0], table)


def test_jaxpr_without_constants_is_translated_once():
    closed = jax.make_jaxpr(lambda x: x.astype(jnp.float16) * 3)(jnp.ones(4))
    evaluator = Evaluator(jnp.dtype(jnp.float32))
    assert evaluator.translated(closed) is evaluator.translated(closed)
