"""The list of matmuls of a traced function, with location, dtype, and the reason if a matmul is in float32."""

import jax
import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from jax_lossscale._autocast.matmuls import trace_with_reasons
from jax_lossscale.diagnostics._operations import operations

HALF = jnp.dtype(jnp.float16)
W, X = jnp.ones((4, 4)), jnp.ones((8, 4))


def loss(w, x):
    with jax.named_scope("trunk"):
        hidden = jnp.tanh(x @ w)
    with jax.named_scope("head"), jls.keep_float32():
        return jnp.sum(hidden @ w)


def matmuls(fun):
    program = trace_with_reasons(fun, (W, X), {})
    return program.is_autocast, [each for each in operations(program.used.jaxpr, HALF) if each.is_matmul]


def listed(fun):
    is_autocast, found = matmuls(fun)
    kinds = [(each.layer.split("/")[0], each.is_backward, each.dtype, each.reason) for each in found]
    return is_autocast, [kind for kind, each in zip(kinds, found, strict=True) for _ in range(each.count)]


def test_forward_and_backward_matmuls_have_the_reason_of_the_plan():
    reason = "inside `keep_float32`"
    is_autocast, found = listed(jax.value_and_grad(jls.autocast(loss)))
    assert is_autocast
    assert sorted(found) == [
        ("head", False, "float32", reason),
        ("head", True, "float32", reason),
        ("head", True, "float32", reason),
        ("trunk", False, "float16", ""),
        ("trunk", True, "float16", ""),
    ]


def test_matmuls_without_autocast_have_no_plan():
    is_autocast, found = listed(loss)
    assert not is_autocast
    assert {reason for *_, reason in found} == {"outside of `autocast`, or part of a derivative"}


def test_flops_include_all_iterations_of_a_loop():
    def looped(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y @ w, x)

    _, (matmul,) = matmuls(jls.autocast(looped))
    assert matmul.flops == 3 * 2 * 8 * 4 * 4
    assert (matmul.dtype, matmul.result, matmul.reason) == ("float16", "float16", "")


@pytest.mark.parametrize(
    ("left", "right", "result", "expected", "is_reported"),
    [
        ("float16", "float16", "float16", "float16", False),
        ("float16", "float16", "float32", "float16", True),
        ("float16", "float32", "float16", "float32", True),
        ("float32", "float16", "float16", "float32", True),
        ("int8", "int8", "float16", "float16", False),
    ],
)
def test_dtype_is_that_of_the_widest_floating_operand(left, right, result, expected, is_reported):
    def fun(w, x):
        return jax.lax.dot(x.astype(left), w.astype(right), preferred_element_type=result)

    _, (matmul,) = matmuls(fun)
    assert (matmul.dtype, matmul.result, bool(matmul.reason)) == (expected, result, is_reported)
