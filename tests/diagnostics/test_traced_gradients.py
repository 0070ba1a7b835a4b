"""`TracedGradients` computes each of its properties once, when the property is first used."""

import jax.numpy as jnp
import pytest
from flax import nnx

import jax_lossscale as jls
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics import _lost_constants
from jax_lossscale.diagnostics._loss_call import check_call
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

HALF = jnp.dtype(jnp.float16)
W, X = jnp.ones((4, 4)), jnp.ones((8, 4))


def loss(weights, x):
    return jnp.mean(jnp.tanh(x @ weights) ** 2)


def call_of(fun):
    return check_call("range_report", fun, (W, X), {}, 0, False)


def test_property_is_computed_when_it_is_first_used():
    gradients = TracedGradients(call_of(jls.autocast(loss)), HALF)
    assert "matmuls" not in vars(gradients)
    summary = gradients.matmuls
    assert (summary.matmuls, summary.half_matmuls) == (2, 2)
    assert gradients.matmuls is summary
    assert not {"argument_faults", "lost_constants"} & vars(gradients).keys()


@pytest.mark.parametrize("unused", [X, nnx.Linear(4, 4, rngs=nnx.Rngs(0))], ids=["the same array", "nnx"])
def test_origins_have_the_correct_names_if_an_argument_is_unused(unused):
    def with_unused(weights, before, x, after):
        return loss(weights, x)

    call = check_call("range_report", with_unused, (W, unused, X, unused), {}, 0, False)
    first = TracedGradients(call, HALF).matmuls.first_float32
    assert first.endswith("; its operand comes from `x`, which is float32")


@pytest.mark.parametrize("is_pytree", [True, False])
@pytest.mark.parametrize("array", [W, X], ids=["parameter", "x"])
def test_origins_have_the_correct_names_if_an_nnx_module_contains_the_same_array(is_pytree, array):
    class Module(nnx.Module, pytree=is_pytree):
        def __init__(self):
            self.param = nnx.Param(array)

    call = check_call("range_report", lambda w, module, x: loss(w, x), (W, Module(), X), {}, 0, False)
    first = TracedGradients(call, HALF).matmuls.first_float32
    assert first.endswith("; its operand comes from `x`, which is float32")


def test_elements_of_variable_arguments_are_named_by_their_position():
    def fun(params, *batch, scale):
        return scale * loss(params, batch[0])

    for function, names in (
        (fun, ["params", "args[1]", "args[2]"]),
        (lambda *args: 0, ["args[0]", "args[1]", "args[2]"]),
    ):
        assert check_call("range_report", function, (W, X, X), {"scale": 1.0}, 0, False).names == names


def test_lost_constants_are_empty_with_a_separate_reference():
    def with_epsilon(weights, x):
        return jnp.sum(1 / (loss(weights, x).astype(jnp.float16) + jnp.float16(1e-9)))

    call = call_of(with_epsilon)
    assert [constant.value for constant in TracedGradients(call, HALF).lost_constants] == [0.0]
    assert TracedGradients(call, HALF, reference=call_of(loss)).lost_constants == ()


def test_lost_epsilon_is_stored_once_if_terms_of_a_sum_share_it():
    def repeated(x):
        total = x + jnp.float16(1e-9)
        for _ in range(4):
            total = jnp.concatenate([total, total + total])
        return total, total + total

    jaxpr = Traced(repeated, (jnp.ones(4, jnp.float16),), {}).jaxpr
    outputs = _lost_constants._LostConstants(False).outputs(jaxpr, [_lost_constants._KnownValue()])
    assert [len(output.epsilons) for output in outputs] == [1, 1]
