"""A constant becomes an operand of a half-precision matmul only if the bounds of its values fit in half precision."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import matmul_dtypes

import jax_lossscale as jls
from jax_lossscale._autocast.constants import UNKNOWN, Intervals
from jax_lossscale._program.inline import inlined

pytestmark = pytest.mark.ci

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8)), jnp.float32)
N = 8
ROW, COLUMN = (lambda: jax.lax.broadcasted_iota(jnp.float32, (N, N), 0)), (lambda: jnp.arange(8.0)[None] + ROW() * 0)
EYE = np.eye(N, dtype=np.float32)
KEY = jax.random.key(0)


def drawn(shape=(N, N)):
    return jax.random.normal(jax.random.key(0), shape)


# Constants that float16 cannot represent, by the operation that computes them.
TOO_LARGE = {
    "a number": lambda: jnp.full((N, N), 1e6),
    "a power": lambda: (ROW() + 1) ** 8,
    "a power of floats": lambda: (ROW() + 1.0) ** 7.5,
    "a power of a number": lambda: 100.0 ** ROW(),
    "a negative power": lambda: (1e-4 + 0 * ROW()) ** -2,
    "an absolute value": lambda: jnp.abs(-1e5 - ROW()),
    "logspace": lambda: jnp.logspace(0, 9, 64).reshape(N, N),
    "cumsum": lambda: jnp.cumsum(jnp.full((N, N), 3e4), axis=0),
    "sum": lambda: jnp.broadcast_to(jnp.full((N, N), 3e4).sum(0), (N, N)),
    "exp": lambda: jnp.exp(2 * ROW()),
    "a quotient": lambda: 1 / (1e-6 * (ROW() + 1)),
    "a reciprocal square root": lambda: jax.lax.rsqrt(1e-12 * (ROW() + 1)),
    "cosh": lambda: jnp.cosh(-2 * ROW()),
    "random normal with a global key": lambda: 1e6 * jax.random.normal(KEY, (N, N)),
    "integers": lambda: (jnp.arange(64) * 3000).reshape(N, N).astype(jnp.float32),
    "integers that overflow": lambda: (jnp.full((N, N), 2**30, jnp.int32) * 3).astype(jnp.float32),
    "a shift": lambda: (jnp.ones((N, N), jnp.int32) << 20).astype(jnp.float32),
    "select": lambda: jnp.select([ROW() > 3, COLUMN() > 3], [1e6 * ROW(), ROW()], 0.0),
    "a clip": lambda: jnp.clip(1e7 * EYE, 0.0, 1e6),
    "gathered": lambda: jnp.asarray(1e6 * EYE)[jnp.arange(N)[::-1]],
    "joined": lambda: jnp.concatenate([EYE[:4], 1e6 * EYE[4:]]),
    "padded": lambda: jnp.pad(EYE[:4, :4], 2, constant_values=1e6),
    "scatter-add": lambda: jnp.zeros((N, N)).at[jnp.zeros(N, int)].add(3e4),
    "a condition": lambda: jax.lax.cond(jnp.sum(ROW()) > 0, lambda: jnp.full((N, N), 1e6), lambda: ROW()),
    "an outer product": lambda: jnp.matmul(1e9 * jnp.arange(1.0, 9.0)[:, None], jnp.ones((1, N))),
    "a custom_jvp function": lambda: jax.nn.relu(1e6 * EYE),
    "jit": lambda: jax.jit(lambda x: 1e6 * x)(EYE),
    "remat": lambda: jax.checkpoint(lambda x: 1e6 * x)(EYE),
    "3000 operations": lambda: one_after_another(jnp.full((N, N), 1.0), 3000, lambda x: x * 1.005),
}
# Constants whose computed bounds fit in float16.
FITS = {
    "a table of angles": lambda: jnp.sin(ROW() / 10_000 ** (COLUMN() / 8)),
    "tanh of anything": lambda: jnp.tanh(1e6 * drawn()),
    "a sign": lambda: jnp.sign(drawn()),
    "a mask": lambda: (drawn() > 0).astype(jnp.float32),
    "a clip of anything": lambda: jnp.clip(1e6 * drawn(), -1.0, 1.0),
    "a decay": lambda: jnp.exp(-jnp.abs(ROW() - COLUMN())),
    "small bits": lambda: (jax.random.bits(jax.random.key(0), (N, N), jnp.uint8)).astype(jnp.float32),
    "a normalised row": lambda: (ROW() - ROW().mean(0, keepdims=True)) / jnp.sqrt(ROW().var(0, keepdims=True) + 1.0),
    "reciprocals": lambda: 1 / (ROW() + COLUMN() + 1),
    "an outer product": lambda: jnp.matmul(1e9 * jnp.arange(1.0, 9.0)[:, None], jnp.full((1, N), 1e-9)),
    "powers of numbers below one": lambda: (ROW() / N) ** COLUMN(),
    "remainders": lambda: (jnp.arange(64) % 5).reshape(N, N).astype(jnp.float32),
}


def one_after_another(x, number, function):
    for _ in range(number):
        x = function(x)
    return x


def times(constant):
    return lambda x: x @ constant()


@pytest.mark.parametrize("constant", TOO_LARGE.values(), ids=TOO_LARGE)
def test_matmul_with_a_constant_out_of_range_stays_float32(constant):
    assert jnp.max(jnp.abs(constant())) > 65_504
    assert matmul_dtypes(jls.autocast(times(constant)), X) == ["float32"]


@pytest.mark.parametrize("constant", FITS.values(), ids=FITS)
def test_matmul_with_a_constant_in_range_is_half_precision(constant):
    assert matmul_dtypes(jls.autocast(times(constant)), X) == ["float16"]
    largest = float(jnp.nanmax(jnp.abs(constant())))
    np.testing.assert_allclose(jls.autocast(times(constant))(X), X @ constant(), rtol=1e-2, atol=2e-3 * largest)


OF_ONE = {
    **{name: getattr(jnp, name) for name in "abs arctan ceil cos cosh exp exp2 expm1 floor log log1p".split()},
    **{name: getattr(jnp, name) for name in "negative round sign sin sinh sqrt square tanh cbrt".split()},
    **{name: getattr(jax.lax, name) for name in ("erf", "erfc", "logistic", "rsqrt")},
    **{f"power of {n}": lambda x, n=n: jax.lax.integer_pow(x, n) for n in (-3, -2, -1, 2, 3, 4)},
    "integers": lambda x: x.astype(jnp.int32).astype(jnp.float32),
    "applied": lambda x: x.at[0].apply(lambda row: row * row),
    "bytes": lambda x: x.astype(jnp.int8).astype(jnp.float32),
    "half": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "largest": lambda x: jnp.max(x) - x,
    "sum": lambda x: x.sum(0, keepdims=True) + x,
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "turned": lambda x: x.T[::-1],
    "clip": lambda x: jnp.clip(x, -3.0, 100.0),
}
OF_TWO = {
    **{name: getattr(jnp, name) for name in "add subtract multiply divide maximum minimum power".split()},
    "joined": lambda x, y: jnp.concatenate([x[:4], y[4:]]),
    "written": lambda x, y: x.at[2:5].set(y[:3]),
    "remainder": jax.lax.rem,
    "remainder of integers": lambda x, y: jax.lax.rem(x.astype(jnp.int32), y.astype(jnp.int32)).astype(jnp.float32),
    "chosen": lambda x, y: jnp.where(x > y, x, y),
}


HALVES = np.array([0.25, 0.5, 1.0], np.float32)
# Since version 0.11, JAX converts the dtype of a NumPy array when a program is traced, so this is a JAX array.
THREE_AND_NAN = jnp.float32([3, np.nan])
# The bounds that are computed for a constant. With wider bounds, some matmuls would stay in float32 unnecessarily.
INTERVALS = {
    "an array": (lambda: jax.lax.neg(HALVES), (-1, -0.25)),
    "iota": (lambda: jax.lax.iota(jnp.float32, 8), (0, 7)),
    "sin": (lambda: jax.lax.sin(HALVES), (-1, 1)),
    "a comparison": (lambda: jax.lax.gt(HALVES, jax.lax.neg(HALVES)), (0, 1)),
    "a negative power": (lambda: jax.lax.integer_pow(HALVES, -2), (1, 16)),
    "a negative power of a value that may be zero": (lambda: jax.lax.integer_pow(HALVES - 1, -2), UNKNOWN),
    "the power 0": (lambda: jax.lax.integer_pow(HALVES - 1, 0), (1, 1)),
    "a power": (lambda: jax.lax.pow(HALVES, 1.5), (0.125, 1)),
    "a power to a negative number": (lambda: jax.lax.pow(HALVES, -1.5), (1, 8)),
    "a quotient": (lambda: 1 / jax.lax.neg(HALVES), (-4, -1)),
    "a quotient by a value that may be zero": (lambda: 1 / jax.lax.sub(HALVES, jnp.float32(1)), UNKNOWN),
    "a scatter": (lambda: jnp.full(8, 5.0).at[jnp.array([1, 3])].set(-2.0), (-2, 5)),
    "zero times infinity": (lambda: jnp.zeros(3) * jnp.exp(1e3 * jnp.asarray(HALVES)), UNKNOWN),
    "the real part of complex numbers": (lambda: jax.lax.real(HALVES + 1j), UNKNOWN),
    "an empty array": (lambda: jax.lax.neg(np.zeros((0, 3), np.float32)), (0, 0)),
    "an absolute value": (lambda: jax.lax.abs(np.float32([-1, 3])), (0, 3)),
    "a reciprocal square root": (lambda: jax.lax.rsqrt(HALVES), (1, 2)),
    "logistic": (lambda: jax.lax.logistic(HALVES), (1 / (1 + math.exp(-0.25)), 1 / (1 + math.exp(-1)))),
    "a scatter that applies a function": (lambda: jnp.full(8, 5.0).at[1].apply(lambda x: 1e6 * x), UNKNOWN),
    "a remainder": (lambda: jax.lax.rem(np.float32([5, 6, 7]), HALVES), (-1, 1)),
    "a remainder of integers": (lambda: jax.lax.rem(np.int32([5, -9]), np.int32([1, 2])), (-2, 2)),
    "a remainder of integers by zero": (lambda: jax.lax.rem(np.int32([5, -9]), np.int32([0, 2])), (-9, 5)),
    "integers of NaN": (lambda: jax.lax.convert_element_type(THREE_AND_NAN, jnp.int32), (0, 3)),
    "bytes from the smallest value": (lambda: jax.lax.max(np.int8([-128, 3]), np.int8([-128, -128])), (-128, 3)),
    "bytes up to the largest value": (lambda: jax.lax.max(np.int8([0, 127]), np.int8([0, 0])), (0, 127)),
}


@pytest.mark.parametrize(("constant", "expected"), INTERVALS.values(), ids=INTERVALS)
def test_bounds_of_a_constant(constant, expected):
    program = inlined(jax.make_jaxpr(constant)())
    assert Intervals(program, []).of(program.outputs[0])() == expected


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 150))])
def test_matmul_with_a_random_constant_out_of_range_stays_float32(seed):
    numbers = random.Random(seed)

    def constant():
        values = [ROW() * numbers.choice([-1, 1, 100]), jnp.full((N, N), numbers.choice([-2.0, 0.0, 0.5, 3e4]))]
        for _ in range(numbers.randrange(1, 6)):
            if numbers.random() < 0.6:
                values.append(OF_ONE[numbers.choice(list(OF_ONE))](numbers.choice(values)))
            else:
                values.append(OF_TWO[numbers.choice(list(OF_TWO))](*numbers.sample(values, 2)))
        return values[-1]

    found = constant()
    numbers.seed(seed)
    dtypes = matmul_dtypes(jls.autocast(times(constant)), X)
    assert dtypes == ["float32"] or not jnp.any(jnp.abs(found) > 65_504), found


def test_ppermute_without_a_sender_has_the_bounds_of_zero():
    def received(x):
        constant = jnp.full((N, N), 3.0)
        return x @ (1.0 / (jax.lax.ppermute(constant, "data", []) + 1e-6))

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.jit(jax.shard_map(jls.autocast(received), mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data")))
    np.testing.assert_allclose(function(jnp.ones((2, N))), N * 1e6, rtol=1e-3)


def custom_vjp(c):
    function = jax.custom_vjp(lambda x, c: x @ c)
    function.defvjp(lambda x, c: (x @ c, (x, c)), lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g))
    return lambda x: function(x, c)


def custom_vjp_with_a_residual_of_constants(c):
    function = jax.custom_vjp(lambda x, c: x @ c)
    function.defvjp(lambda x, c: (x @ c, 2 * c.T), lambda twice, g: (g @ twice / 2, None))
    return lambda x: function(x, c)


def custom_jvp(c):
    function = jax.custom_jvp(lambda x, c: x @ c + x @ EYE)
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] @ primals[1] + tangents[0]))
    return lambda x: function(x, c)


def custom_vmap(c):
    function = jax.custom_batching.custom_vmap(lambda x, c: x @ c + x @ EYE)
    function.def_vmap(lambda axis_size, is_batched, x, c: (x @ c + x @ EYE, True))
    return lambda x: function(x, c)


def linear_call(c):
    def transpose(c, g):
        return g @ c.T + g @ EYE

    return lambda x: jax.custom_derivatives.linear_call(lambda c, x: x @ c + x @ EYE, transpose, c, x)


RULES = [custom_vjp, custom_vjp_with_a_residual_of_constants, custom_jvp, linear_call]
DERIVATIVES = {
    **{rule.__name__: (rule, jax.value_and_grad) for rule in RULES},
    "custom_vmap": (custom_vmap, lambda function: lambda x: jax.vmap(function)(x[None])),
}
LARGE = {"too large": lambda: jnp.full((N, N), 1e6), "unknown": lambda: jnp.linalg.cholesky(1e12 * (EYE + 0.1))}


@pytest.mark.parametrize("constant", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize(("rule", "transformation"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_constant_arguments_of_custom_rules_are_supported(rule, transformation, constant):
    """The value is the same with and without the transformation that uses the rule."""

    def loss(x):
        return jnp.sum(rule(constant())(x))

    half, x = jls.autocast(loss), jnp.ones((2, N))
    np.testing.assert_allclose(half(x), loss(x), rtol=1e-3)
    for function in (transformation, lambda loss: jax.jit(transformation(loss))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), function(half)(x), function(loss)(x))


@pytest.mark.parametrize(("rule", "transformation"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_constants_in_range_are_half_precision_in_custom_rules(rule, transformation):
    half = jls.autocast(lambda x: jnp.sum(rule(jnp.full((N, N), 2.0))(x)))
    assert set(matmul_dtypes(transformation(half), jnp.ones((2, N)))) == {"float16"}


def test_constant_without_a_dtype_has_unknown_bounds():
    """An array with a user-defined extended dtype is an example of a constant without bounds."""
    program = inlined(jax.make_jaxpr(lambda: HALVES + 1)())
    (constant,) = program.constants
    constants = Intervals(program._replace(constants={constant: object()}), ())
    assert constants.of(constant)() == UNKNOWN
