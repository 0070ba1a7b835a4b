"""The rule of `autocast` inside the higher-order primitives and transformations of JAX."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from exact_programs import doubled
from reading import distance, matmul_dtypes
from small_programs import PROGRAMS, W, X

import jax_lossscale as jls
from jax_lossscale._program.jaxpr import jaxprs_of

pytestmark = pytest.mark.ci

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@each_program
def test_matmuls_are_half_precision_and_results_equal_float32_except_for_rounding(program):
    """`autocast` is applied inside and outside of `jax.grad`."""
    functions = [
        jax.value_and_grad(program, (0, 1)),
        jax.value_and_grad(jls.autocast(program), (0, 1)),
        jls.autocast(jax.grad(program)),
    ]
    results = jax.jit(lambda w, x: [function(w, x) for function in functions])(W, X)
    (value, grads), (half_value, half_grads), of_gradient = results
    assert jnp.abs(value - half_value) < 2e-3 * value
    assert distance(grads, half_grads) < 4e-3
    assert distance(grads[0], of_gradient) < 4e-3
    assert {leaf.dtype.name for leaf in jax.tree.leaves(results)} == {"float32"}
    plain, half, of_gradient = (matmul_dtypes(function, W, X) for function in (program, *functions[1:]))
    assert {*plain} == {"float32"}
    assert {*half, *of_gradient} == {"float16"}
    assert len(half) >= len(plain)


MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = functools.partial(jax.shard_map, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data"))
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
# Functions with a higher-order primitive between two matmuls. Each entry contains a function, the name of the
# primitive, whether to read its operands or its results, and the expected dtype of the last one.
BETWEEN_MATMULS = {
    "the stacked results of a scan": (
        lambda w, x: jax.lax.scan(lambda carry, x: (carry, x @ w), 0.0, jnp.stack([x, x]))[1] @ w,
        ("scan", "outvars", "float16"),
    ),
    "the carry of a scan": (
        lambda w, x: jax.lax.scan(lambda carry, _: (carry @ w, None), x, length=2)[0] @ w,
        ("scan", "outvars", "float32"),
    ),
    "the result of branches": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x) @ w,
        ("cond", "outvars", "float16"),
    ),
    "the result of branches with and without a matmul": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, jnp.sin, x) @ w,
        ("cond", "outvars", "float32"),
    ),
    "the result of remat": (lambda w, x: jax.checkpoint(jnp.matmul)(x, w) @ w, ("remat2", "outvars", "float16")),
    "the result of a jit with out_shardings": (
        lambda w, x: jax.jit(jnp.matmul, out_shardings=HERE)(x, w) @ w,
        ("jit", "outvars", "float32"),
    ),
    "the result of shard_map": (lambda w, x: sharded(jnp.matmul)(x, w) @ w, ("shard_map", "outvars", "float16")),
    "the argument of a custom_jvp function": (lambda w, x: doubled(w, x @ w), ("custom_jvp_call", "invars", "float16")),
}


@pytest.mark.parametrize(("function", "expected"), BETWEEN_MATMULS.values(), ids=BETWEEN_MATMULS)
def test_value_between_matmuls_is_half_precision_if_its_dtype_is_not_fixed(function, expected):
    primitive, which, dtype = expected
    eqns = jax.make_jaxpr(jls.autocast(function))(W, X).eqns
    names = {"remat2": ("remat2", "checkpoint"), "jit": ("jit", "pjit")}.get(primitive, (primitive,))
    eqn = next(eqn for eqn in eqns if eqn.primitive.name in names)
    assert getattr(eqn, which)[-1].aval.dtype == dtype


@each_program
def test_autocast_twice_equals_autocast_once(program):
    once, twice = (
        # The addresses of functions are removed because they differ.
        re.sub(r"0x\w+", "", str(jax.make_jaxpr(jax.value_and_grad(function))(W, X)))
        for function in (jls.autocast(program), jls.autocast(jls.autocast(program)))
    )
    assert once == twice


def in_two_layers(w, x):
    with jax.named_scope("encoder"):
        x = jnp.exp(x @ w)
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x) @ w)


@pytest.mark.parametrize("program", [*PROGRAMS, in_two_layers], ids=lambda program: program.__name__)
def test_layers_of_operations_are_unchanged(program):
    """The layer of an equation inside a call is relative to the layer of the call."""

    def layers(jaxpr, outer=()):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            names = *outer, str(eqn.source_info.name_stack)
            name = eqn.primitive.name if eqn.primitive.name in ("exp", "tanh", "dot_general") else ""
            inner = [jaxpr for value in eqn.params.values() for jaxpr in jaxprs_of(value)]
            if not inner:
                yield "/".join(filter(None, names)), name
            for each in inner:
                yield from layers(each, names)

    scoped = jax.named_scope("network")(program)
    rewritten, original = ({*layers(jax.make_jaxpr(f)(W, X))} for f in (jls.autocast(scoped), scoped))
    assert rewritten - {("", "")} <= original | {(layer, "") for layer, _ in original}


def test_half_precision_values_are_passed_to_a_scan_in_half_precision():
    def function(w, x):
        return jax.lax.scan(lambda carry, row: (carry, row @ w), 0.0, jnp.stack([x @ w, x @ w]))[1]

    (scan,) = (eqn for eqn in jax.make_jaxpr(jls.autocast(function))(W, X).eqns if eqn.primitive.name == "scan")
    (body,) = jaxprs_of(scan.params["jaxpr"])
    assert {scan.invars[-1].aval.dtype, body.invars[-1].aval.dtype} == {jnp.dtype("float16")}
