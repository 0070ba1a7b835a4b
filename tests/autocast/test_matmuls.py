"""The dtype of a matmul in the list of operations of a traced function."""

import jax
import jax.numpy as jnp
import pytest

from jax_lossscale._autocast.reasons import trace_with_reasons
from jax_lossscale.diagnostics._operations import operations


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

    program = trace_with_reasons(fun, (jnp.ones((4, 4)), jnp.ones((8, 4))), {})
    (matmul,) = (each for each in operations(program.used.jaxpr, jnp.dtype(jnp.float16)) if each.is_matmul)
    assert not program.is_autocast
    assert (matmul.dtype, matmul.result, bool(matmul.reason)) == (expected, result, is_reported)
