"""Of any program: the result is that of float32 but for rounding, in value, gradient, structure and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_program import PROGRAMS, loss_of, number_of_products
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import product_dtypes

import jax_lossscale as jls

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
some = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def arrays(seed):
    first, second = jax.random.split(jax.random.key(seed))
    w = jax.random.orthogonal(first, 6)
    return w, jax.random.normal(second, (3, 6))


def outcome(loss, w, x):
    (value, aux), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(w, x)
    return value, aux, grads


def check(program, seed, dtype):
    w, x = arrays(seed)
    loss = loss_of(program)
    narrow = jls.autocast(loss, dtype)
    value, aux, grads = outcome(loss, w, x)
    narrow_value, narrow_aux, narrow_grads = outcome(narrow, w, x)
    types = jax.tree.map(jax.typeof, (value, aux, grads))
    assert jax.tree.map(jax.typeof, (narrow_value, narrow_aux, narrow_grads)) == types
    # Each product rounds its operands and its result, forward and backward; what follows passes that on, enlarged by
    # little, since magnitudes and slopes are near 1.
    bound = 24 * (number_of_products(program) + 2) * ROUNDING[dtype]
    assert abs(value - narrow_value) <= bound * (1 + abs(value))
    for grad, narrow_grad in zip(grads, narrow_grads, strict=True):
        assert jnp.linalg.norm(grad - narrow_grad) <= bound * (1 + jnp.linalg.norm(grad))


@some
@given(PROGRAMS, st.integers(0, 3))
def test_the_result_is_that_of_float32_but_for_rounding(program, seed):
    check(program, seed, "float16")


@settings(some, max_examples=4)
@given(PROGRAMS, st.integers(0, 3))
def test_so_it_is_in_bfloat16(program, seed):
    check(program, seed, "bfloat16")


@settings(some, max_examples=16)
@given(PROGRAMS)
def test_products_are_of_one_dtype_and_twice_is_once(program):
    w, x = arrays(0)
    loss = loss_of(program)
    once = jls.autocast(loss)
    found = product_dtypes(jax.grad(once, (0, 1), has_aux=True), w, x)
    is_kept = "'kept'" in repr(program)
    assert set(found) <= {"float16", "float32"} if is_kept else set(found) == {"float16"}
    programs = [str(jax.make_jaxpr(function)(w, x)) for function in (once, jls.autocast(once))]
    assert programs[0] == programs[1]


@pytest.mark.slow
@settings(some, max_examples=4)
@given(PROGRAMS, st.integers(0, 3))
def test_so_is_autocast_of_the_gradient(program, seed):
    w, x = arrays(seed)
    loss = loss_of(program)
    grads = jax.grad(loss, (0, 1), has_aux=True)
    bound = 24 * (number_of_products(program) + 2) * ROUNDING["float16"]
    for grad, narrow in zip(grads(w, x)[0], jls.autocast(grads)(w, x)[0], strict=True):
        assert narrow.dtype == jnp.float32
        assert jnp.linalg.norm(grad - narrow) <= bound * (1 + jnp.linalg.norm(grad))


@pytest.mark.slow
@settings(some, max_examples=4)
@given(PROGRAMS, st.integers(0, 3))
def test_without_recomputing_it_is_the_same_but_for_the_order_of_sums(program, seed):
    w, x = arrays(seed)
    loss = loss_of(program)
    kept = jls.autocast(loss, policy=jls.PrecisionPolicy(recompute=False))
    value, _, grads = outcome(jls.autocast(loss), w, x)
    kept_value, _, kept_grads = outcome(kept, w, x)
    np.testing.assert_allclose(value, kept_value, rtol=4e-3, atol=4e-3)
    for grad, other in zip(grads, kept_grads, strict=True):
        assert jnp.linalg.norm(grad - other) <= 0.02 * (1 + jnp.linalg.norm(grad))
