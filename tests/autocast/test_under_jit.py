"""The forward and backward pass use the same numbers, also if XLA may omit the rounding of intermediate results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import is_older_than
from kinds import slow_except
from reading import primitives_of
from small_programs import PROGRAMS, W, X

import jax_lossscale as jls
from benchmarks.autocast import models, untuned

pytestmark = pytest.mark.as_for_users

RANDOM = np.random.default_rng(0)
INPUTS, WEIGHTS = RANDOM.normal(size=(64, 32)).astype(np.float32), RANDOM.normal(size=(32, 128)).astype(np.float32)
TARGETS = RANDOM.integers(0, 128, size=(64, 1))
VALUES = RANDOM.normal(size=(64, 128)).astype(np.float32)
TEACHER = jax.nn.softmax(VALUES)
# Losses of the logits `x @ w`.
LOSSES = {
    "cross entropy": lambda y: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), TARGETS, 1)),
    "softmax": lambda y: jnp.mean(jnp.sum(jax.nn.softmax(y) * VALUES, axis=1) ** 2),
    "logsumexp": lambda y: jnp.mean(jax.nn.logsumexp(y, axis=1)),
    "distillation": lambda y: jnp.mean(jnp.sum(TEACHER * (jnp.log(TEACHER) - jax.nn.log_softmax(y)), axis=1)),
    "entropy": lambda y: -jnp.mean(jnp.sum(jax.nn.softmax(y) * jax.nn.log_softmax(y), axis=1)),
}
DTYPES = [jnp.float16, jnp.bfloat16]
# Since jax 0.11, XLA for CPUs adds up some products of bfloat16 matmuls in bfloat16 unless this option is empty.
OPTIONS = {} if is_older_than("0.11.0") else {"xla_cpu_experimental_ynn_fusion_type": ""}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.dtype.name)


def flat(gradients):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(gradients)])


def check(loss, arguments, dtype, policy=None, argnums=0):
    """Check that the gradients of `autocast` are as accurate with `jax.jit` as without it.

    ``arguments`` is a list of tuples of arguments. The errors of all tuples are added up, because XLA may omit the
    rounding of a matmul operand, which changes the errors randomly.
    """
    scale = 2.0**8 if dtype == jnp.float16 else 1.0
    half = jax.grad(jls.autocast(lambda *args: scale * loss(*args), dtype, policy=policy), argnums)
    compiled, exact = jax.jit(half, compiler_options=OPTIONS), jax.jit(jax.grad(loss, argnums))

    def gradients(function, scale=1.0):
        return np.concatenate([flat(function(*args)) for args in arguments]) / scale

    expected = gradients(exact)
    with_jit, without = (np.linalg.norm(gradients(f, scale) - expected) for f in (compiled, half))
    assert np.isfinite(with_jit)
    assert with_jit <= 1.1 * without + 1e-6 * np.linalg.norm(expected)


@each_dtype
@pytest.mark.parametrize("times", slow_except([4], [1, 4]))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_logits_are_as_accurate_as_without_jit(loss, times, dtype):
    check(lambda w, x: loss(x @ w), [(times * WEIGHTS, INPUTS)], dtype)


@each_dtype
def test_value_that_is_rounded_after_arithmetic_has_one_value(dtype):
    """A residual stream in half precision is the sum of several results, which is computed in float32."""

    def loss(w, x):
        for _ in range(2):
            x = x + jnp.sin(x @ w[:, :32])
        return jnp.mean(jax.nn.logsumexp(4 * x, axis=1))

    check(loss, [(WEIGHTS, INPUTS)], dtype, jls.PrecisionPolicy(half_residual_stream=True))


@pytest.mark.parametrize("around", [jax.checkpoint, lambda function: jls.autocast(function, jnp.bfloat16)])
def test_results_of_autocast_have_one_value(around):
    """The logits are rounded inside of `autocast` and used outside of it."""
    logits = jls.autocast(lambda w, x: x @ w, jnp.bfloat16)
    loss = around(lambda y: LOSSES["softmax"](y))

    def gradients(w):
        return jax.grad(lambda w: loss(logits(w, INPUTS)))(w)

    np.testing.assert_allclose(jax.jit(gradients)(4 * WEIGHTS), gradients(4 * WEIGHTS), rtol=0, atol=2e-5)


def test_float16_values_outside_of_the_normal_range_are_not_changed():
    """The first three values are subnormal in float16, and the last value is infinite."""
    rows = np.float32([[6e-8, 0], [3e-7, 0], [5e-6, 0], [7e-5, 0], [6e4, 0], [1e5, 0]])
    product = jls.autocast(lambda x: 1.5 * (x @ jnp.ones((2, 1))))
    expected = 1.5 * jnp.asarray(rows[:, :1]).astype(jnp.float16).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(product)(rows), expected)


def test_casts_of_the_user_are_not_rounded_again():
    def function(w, x):
        return jnp.sin(x.astype(jnp.bfloat16).astype(jnp.float32)) + jnp.sin(x @ w)

    assert primitives_of(jls.autocast(function, jnp.bfloat16), W, X).count("rounded") == 1


# XLA for CPUs does not omit roundings to float16, so float16 is tested less often.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_small_programs_are_as_accurate_as_without_jit(program, dtype):
    arguments = [(W, X), (W.T, -X), (W[::-1], X[:, ::-1]), (-W, X[::-1])]
    check(program, arguments, dtype, argnums=(0, 1))


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("name", models.small() | untuned.small())
@pytest.mark.parametrize("is_stream_half", [False, True], ids=["float32_stream", "half_stream"])
def test_models_are_as_accurate_as_without_jit(name, is_stream_half, dtype):
    model = (models.small() | untuned.small())[name]
    policy = jls.PrecisionPolicy(half_residual_stream=is_stream_half)
    with jax.numpy_rank_promotion("allow"):  # The Mamba model uses rank promotion.
        params = jax.jit(model.params)()
        # With EGNN in bfloat16, the ratio of the errors varies from 0.8 to 1.2 between batches. Its mean is 1.
        batches = range(10 if name == "EGNN" else 2)
        check(model.loss(None), [(params, model.batch(number)) for number in batches], dtype, policy)
