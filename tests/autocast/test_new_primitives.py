"""Primitives of newer versions of JAX, represented by new primitives with the same names and semantics."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from reading import matmul_dtypes

import jax_lossscale as jls
from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.primitives import COMPUTED_ONCE, KNOWN
from jax_lossscale._program.subjaxprs import HIGHER_ORDER
from jax_lossscale.diagnostics._shadow import MeasuringEvaluator

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


def identity(name):
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, lambda context, x: [x])
    return primitive


def call(name, parameter):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: jaxpr_as_fun(params[parameter])(*args))
    primitive.def_abstract_eval(lambda *_, **params: params[parameter].out_avals)
    return primitive


def test_data_movement_has_the_dtype_of_its_operand():
    stage = identity("stage")
    jaxpr = jax.make_jaxpr(jls.autocast(lambda w, x: stage.bind(x @ w) @ w))(W, X)
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is stage)
    assert eqn.outvars[0].aval.dtype == jnp.float16


def function_with(primitive, parameter):
    def function(w, x):
        jaxpr = jax.make_jaxpr(lambda w, x: x @ w)(w, x)
        return primitive.bind(w, x, **{parameter: jaxpr})[0]

    return function


@pytest.mark.parametrize(("name", "is_kept"), [("eval_jaxpr", False), ("program_order", True)])
def test_jaxpr_of_a_call_is_rewritten(name, is_kept):
    function = jls.autocast(function_with(call(name, "call_jaxpr"), "call_jaxpr"))
    assert matmul_dtypes(function, W, X) == ["float16"]
    assert (f" {name}[" in str(jax.make_jaxpr(function)(W, X))) is is_kept


def test_reports_evaluate_the_jaxprs_whose_operations_they_list():
    assert set(MeasuringEvaluator.rules) == Propagation.follows


@pytest.mark.parametrize("name", ["compute_on", "fused_call"])
def test_jaxpr_of_an_opaque_operation_is_not_rewritten(name):
    function = function_with(call(name, "jaxpr"), "jaxpr")
    assert matmul_dtypes(jls.autocast(function), W, X) == ["float32"]
    assert matmul_dtypes(jls.autocast(lambda w, x: function(w, x @ w)), W, X) == ["float16", "float32"]


COLLECTIVES = [
    *(f"{name}_start" for name in ("all_gather", "all_gather_reduced", "all_to_all", "ppermute", "psum_invariant")),
    *(f"{name}_done" for name in ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter")),
    *("reduce_scatter_start", "unreduced_pmax", "unreduced_pmin"),
]


def test_collectives_are_computed_once_in_float32():
    assert COMPUTED_ONCE.issuperset(COLLECTIVES)


def test_new_primitives_are_known():
    names = {"broadcast_to", "compute_on", "eval_jaxpr", "fused_call", "program_order", "stage", *COLLECTIVES}
    assert names <= KNOWN | HIGHER_ORDER
