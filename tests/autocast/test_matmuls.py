"""The list of matmuls of a traced function: the dtype and the number of floating-point operations of each matmul."""

import jax
import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from jax_lossscale._autocast.matmuls import trace_with_reasons
from jax_lossscale.diagnostics._operations import operations


def matmul_of(fun):
    """Return the only matmul of a function, and whether the function uses `autocast`."""
    program = trace_with_reasons(fun, (jnp.ones((4, 4)), jnp.ones((8, 4))), {})
    (matmul,) = (each for each in operations(program.used.jaxpr, jnp.dtype(jnp.float16)) if each.is_matmul)
    return matmul, program.is_autocast


def test_flops_include_all_iterations_of_a_loop():
    looped = jls.autocast(lambda w, x: jax.lax.fori_loop(0, 3, lambda _, y: y @ w, x))
    matmul, is_autocast = matmul_of(looped)
    assert is_autocast
    assert matmul.flops == 3 * 2 * 8 * 4 * 4
    assert (matmul.dtype, matmul.result, matmul.reason) == ("float16", "float16", "")


@pytest.mark.parametrize(
    ("left", "right", "result", "expected", "is_reported"),
    [
        ("float16", "float16", "float16", "float16", False),
        ("float16", "float16", "float32", "float16", True),
        ("float16", "float32", "float16", "float32", True),
        ("float32", "float16", "float16", "float32", True),
        ("float32", "float32", "float32", "float32", True),
        ("int8", "int8", "float16", "float16", False),
    ],
)
def test_dtype_is_that_of_the_widest_floating_operand(left, right, result, expected, is_reported):
    def fun(w, x):
        return jax.lax.dot(x.astype(left), w.astype(right), preferred_element_type=result)

    matmul, is_autocast = matmul_of(fun)
    assert not is_autocast
    assert (matmul.dtype, matmul.result, bool(matmul.reason)) == (expected, result, is_reported)
