"""The sub-jaxprs of equations, the tables of primitives, the layers of operations, and factorizations in loops."""

import functools
import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from reading import equations, matmul_dtypes
from small_programs import PROGRAMS, W, X

import jax_lossscale as jls
from jax_lossscale._autocast import linear_algebra
from jax_lossscale._program import location, primitives
from jax_lossscale._program.remat3 import with_remat2
from jax_lossscale._program.subjaxprs import HIGHER_ORDER, subjaxprs, with_jaxprs


def solved(w, x):
    return jnp.sum(jnp.linalg.solve(w @ w.T + jnp.eye(8), x[0]))


def solved_by_steps(w, x):
    return jnp.sum(jax.scipy.sparse.linalg.cg(w @ w.T + jnp.eye(8), x[0])[0])


def unscaled(w, x):
    return jax.grad(lambda x: jls.scale_gradient(jnp.sum(jls.unscale_gradient(x, 8.0) @ w), 8.0))(x)


def types(atoms, positions, is_part):
    """Return the types of some operands or results, without the first axis if it is sliced by the iterations."""
    avals = [(n, atoms[n].aval) for n in positions if n >= 0]
    return [(aval.shape[1:] if is_part(n) else aval.shape, aval.dtype) for n, aval in avals]


@pytest.mark.parametrize(
    "program", [*PROGRAMS, solved, solved_by_steps, unscaled], ids=lambda program: program.__name__
)
def test_subjaxprs_have_the_types_of_operands_and_results(program):
    """Operands have the types of the inputs of the sub-jaxpr, and results have the types of its outputs."""
    for eqn in equations(jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(program(*args))))(W, X)):
        bodies, carried, sliced, _ = found = subjaxprs(eqn)
        # A system has a sub-jaxpr only if its matrix is the identity.
        name = eqn.primitive.name
        assert bool(bodies) == (program is unscaled if name == "custom_linear_solve" else name in HIGHER_ORDER)
        is_stacked = functools.partial(operator.le, len(carried)) if eqn.primitive.name == "scan" else lambda n: False
        for closed, operands, results in bodies:
            if eqn.primitive.name == "shard_map":  # The jaxpr has the types of one shard.
                continue
            given = [v for v, n in zip(closed.jaxpr.invars, operands, strict=True) if n >= 0]
            made = [v for v, n in zip(closed.jaxpr.outvars, results, strict=True) if n >= 0]
            assert types(eqn.invars, operands, sliced.__contains__) == types(given, range(len(given)), lambda n: False)
            assert types(eqn.outvars, results, is_stacked) == types(made, range(len(made)), lambda n: False)
        for result, operand in found.carried:
            assert eqn.outvars[result].aval.shape == eqn.invars[operand].aval.shape


def test_constants_of_a_checkpoint_become_operands():
    x, factors = jnp.ones(4), jnp.arange(4.0)
    (checkpoint,) = with_remat2(jax.make_jaxpr(jax.checkpoint(jnp.sin))(x)).eqns
    scaled = jax.make_jaxpr(lambda x: factors * x)(x)
    assert scaled.consts
    gradient = jax.grad(lambda x: jnp.sum(with_jaxprs(checkpoint, [scaled], [x])[0]))(x)
    np.testing.assert_array_equal(gradient, factors)


# Each entry contains a function and, for each result of its last operation, the positions of the operands that it
# contains.
DATA_MOVEMENT = {
    "copy": (lambda w, x: jnp.array(w, copy=True), [[0]]),
    "concatenate": (lambda w, x: jnp.concatenate([x, w]), [[0, 1]]),
    "split": (lambda w, x: jnp.split(x, 2), [[0], [0]]),
    "select": (lambda w, x: jax.lax.select(w > 0, x, w), [[1, 2]]),
    "dynamic_slice": (lambda w, x: jax.lax.dynamic_slice(x, (w[0, 0].astype(int), 0), (2, 8)), [[0]]),
    "dynamic_update_slice": (lambda w, x: jax.lax.dynamic_update_slice(x, w[:2], (w[0, 0].astype(int), 0)), [[0, 1]]),
    "optimization_barrier": (lambda w, x: jax.lax.optimization_barrier((w, x)), [[0], [1]]),
    "cast": (lambda w, x: x.astype(jnp.float16), [[0]]),
    "add": (jnp.add, None),
}


@pytest.mark.parametrize(("program", "moved"), DATA_MOVEMENT.values(), ids=DATA_MOVEMENT)
def test_moved_operands_of_data_movement(program, moved):
    *_, eqn = jax.make_jaxpr(program)(jnp.ones((8, 8)), jnp.ones((8, 8))).eqns
    found = primitives.moved_operands(eqn)
    assert (found and list(map(list, found))) == moved


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        ("jvp(M)/Checkpoint_0/Dense_0", "M/Checkpoint_0/Dense_0"),
        ("transpose(jvp(M))/jvp(M)/rematted_computation/Checkpoint_0/Dense_0", "M/Checkpoint_0/Dense_0"),
        ("a/transpose(jvp(b))/c/jvp(b)/c/rematted_computation/d", "a/b/c/d"),
        ("transpose(jvp(a))/b/c/jvp(a)/b/c", "a/b/c"),
        ("a/b/a", "a/b/a"),
        ("a/while/body/bi,ij->bj", "a"),
        ("jvp()", ""),
    ],
)
def test_layer_removes_transformations_from_the_name_stack(stack, layer):
    assert location._layer(stack) == layer


# Primitives that user programs do not contain: parts of kernels, and primitives that JAX only uses while it traces or
# lowers a function.
_NOT_MET = {
    *("call", "core_map", "closed_call", "create_linear", "custom_lin", "cudnn_fusion", "delay"),
    *("get_global", "jaxpr_call", "masked_load", "masked_swap", "mpmd_map", "multiple_of", "num_programs", "pin"),
    *("program_id", "reciprocal", "remat_opt", "run_scoped", "run_state", "semaphore_read", "semaphore_signal"),
    *("semaphore_wait", "unpin", "unreachable", "with_memory_space_constraint"),
    *("box_get", "box_set", "call_hi_primitive", "call_hi_primitive_linearized", "log_extend", "log_read", "new_box"),
    *("custom_jvp_call_jaxpr", "new_log", "precv", "psend"),
    # Before jax 0.10:
    *("ag_done", "ag_start", "bias_bwd", "bias_fwd", "custom_transpose_call", "eigh_jacobi", "for", "full_to_shard"),
    *("mutable_array", "pgather", "shard_to_full", "xla_pmap"),
}


def test_every_jax_primitive_is_in_a_table():
    """Primitives of experimental modules are excluded, because `autocast_report` lists them."""
    found = {
        value.name
        for name, module in list(sys.modules.items())
        if name.startswith(("jax.lax", "jax._src")) and "experimental" not in name and "pallas" not in name
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }
    prefixes = "bcoo", "bcsr", "coo", "csr", "dot_product", "scaled", "xla_metadata"  # `jax.experimental.xla_metadata`
    bound_to_others = {name for name in found if name.startswith(prefixes)}
    unknown = found - primitives.KNOWN - HIGHER_ORDER - _NOT_MET - bound_to_others
    assert {name for name in unknown if not name.startswith(("probe", "spsolve", "todense"))} == set()


def test_kinds_of_primitives_are_disjoint():
    kinds = primitives.MATMULS, primitives.DATA_MOVEMENT, primitives.ARITHMETIC, primitives.SELECTIONS, primitives.BITS
    assert len(set().union(*kinds)) == sum(map(len, kinds))


_strange = Primitive("strange")
_strange.def_impl(lambda x: x)
_strange.def_abstract_eval(lambda aval: aval)


def test_unknown_primitive_is_computed_in_float32():
    def function(w, x):
        return _strange.bind(x @ w) @ w

    eqns = equations(jax.make_jaxpr(jls.autocast(function))(W, X))
    (eqn,) = (eqn for eqn in eqns if eqn.primitive is _strange)
    assert [atom.aval.dtype.name for atom in (*eqn.invars, *eqn.outvars)] == ["float32"] * 2
    assert matmul_dtypes(jls.autocast(function), W, X) == ["float16"] * 2


# Factorizations in loops.


def in_scans(depth, function):
    for _ in range(depth):
        function = (lambda inner: lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, length=2)[0])(function)
    return function


def test_nested_loops_around_a_factorization_are_analyzed_in_linear_time(monkeypatch):
    reads = []
    inlined = linear_algebra.inlined
    monkeypatch.setattr(linear_algebra, "inlined", lambda closed: reads.append(closed) or inlined(closed))

    def number(depth):
        reads.clear()
        jax.make_jaxpr(jls.autocast(in_scans(depth, lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(8)))))(W)
        return len(reads)

    assert number(8) - number(6) == number(6) - number(4) > 0
