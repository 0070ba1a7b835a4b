"""Lookups of rows in half precision, such as those of a tied embedding table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import set_mesh, skip_before
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reading import distance, equations, result_dtypes
from small_programs import W, X

import jax_lossscale as jls
from jax_lossscale._autocast import use_analysis

pytestmark = pytest.mark.ci

HALF, FLOAT32 = "float16", "float32"
TABLE = jax.random.normal(jax.random.key(3), (64, 8)) / 3
TOKENS = jax.random.randint(jax.random.key(4), (16, 6), 0, len(TABLE))


def block(x, w):
    return x + jnp.tanh(x / jnp.sqrt(1 + jnp.mean(x * x, axis=-1, keepdims=True)) @ w)


def model(table, tokens, start=lambda table, tokens: table[tokens], block=block):
    """Return the logits of two blocks between a lookup and a matmul with the same table."""
    x = start(table, tokens)
    for _ in range(2):
        x = block(x, W)
    return x @ table.T


def scanned(x, w):
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, jnp.stack([w, w.T]))[0]


# Lookups of a table that a matmul also uses. The rows are part of a residual stream.
IN_HALF = {
    "index": model,
    "jnp.take": functools.partial(model, start=lambda table, tokens: jnp.take(table, tokens, axis=0)),
    "scaled": functools.partial(model, start=lambda table, tokens: table[tokens] * len(W) ** 0.5),
    "with positions": functools.partial(model, start=lambda table, tokens: table[tokens] + X[:1, None]),
    "scan": functools.partial(model, block=scanned),
    "jax.jit": functools.partial(model, block=jax.jit(block)),
    "jax.checkpoint": functools.partial(model, block=jax.checkpoint(block)),
    "bias by index": lambda table, tokens: (jnp.exp(X @ W + table[tokens[:4, 0]]), X @ table.T),
    "untied, but used only by matmuls": lambda table, tokens: table[tokens] @ W,
    "parts of rows": lambda table, tokens: table[tokens, :4] @ W[:4],
}
# Lookups whose rows may cancel, or are used in other float32 arithmetic.
IN_FLOAT32 = {
    "no matmul uses the table": lambda table, tokens: block(table[tokens], W),
    "differences of rows": lambda table, tokens: ((table[tokens] - table[tokens[::-1]]) @ W, table @ W),
    "activation before the sum": lambda table, tokens: (jnp.tanh(table[tokens]) + X[:1, None], X @ table.T),
    "codebook": lambda table, tokens: (jnp.sum((jnp.tanh(X @ W) - table[tokens[:4, 0]]) ** 2), X @ table.T),
    "keep_float32": functools.partial(model, start=jls.keep_float32(lambda table, tokens: table[tokens])),
    "constant table": lambda table, tokens: model(TABLE, tokens) + jnp.sum(table),
}


def dtypes_of_lookups(function, dtype=jnp.float16):
    return set(result_dtypes(["gather"], jls.autocast(function, dtype), TABLE, TOKENS))


@pytest.mark.parametrize("function", IN_HALF.values(), ids=IN_HALF)
def test_lookup_is_in_half_precision(function):
    if function is IN_HALF["with positions"]:
        skip_before("0.9.0", "the jaxpr of this sum contains another broadcast")
    assert dtypes_of_lookups(function) == {HALF}
    assert dtypes_of_lookups(function, jnp.bfloat16) == {"bfloat16"}


@pytest.mark.parametrize("function", IN_FLOAT32.values(), ids=IN_FLOAT32)
def test_lookup_is_in_float32(function):
    assert dtypes_of_lookups(function) == {FLOAT32}


def test_calls_of_the_same_jitted_lookup_differ():
    lookup = jax.jit(lambda table, tokens: table[tokens])

    def loss(table, tokens):
        return jnp.sum((lookup(table, tokens) - lookup(table, tokens[::-1])) ** 2), model(table, tokens, lookup)

    assert sorted(result_dtypes(["gather"], jls.autocast(loss), TABLE, TOKENS)) == [HALF, FLOAT32, FLOAT32]


def test_all_lookups_are_analyzed_together(monkeypatch):
    operation, calls = use_analysis._Terms.operation, []
    monkeypatch.setattr(use_analysis._Terms, "operation", lambda *args: calls.append(args) or operation(*args))

    def rows(table, tokens):
        return sum(jnp.tanh(table[each] + 1) for each in tokens) @ table.T

    numbers = []
    for number in (4, 8):
        calls.clear()
        jax.make_jaxpr(jls.autocast(rows))(TABLE, TOKENS[:number])
        numbers.append(len(calls))
    assert 0 < numbers[1] < 2.5 * numbers[0]


def test_policy_keeps_a_lookup_in_float32():
    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", operation="gather")])
    half = jls.autocast(model, policy=policy)
    assert set(result_dtypes(["gather"], half, TABLE, TOKENS)) == {FLOAT32}


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradient_of_a_lookup_is_summed_in_float32(is_tied):
    """In float16, the sum would be 2048 or 4096, depending on the order of the terms."""

    def loss(table):
        rows = table[jnp.zeros(4097, int)]
        if not is_tied:
            return jnp.sum(rows @ jnp.ones((2, 1)))
        return jnp.sum(rows + 0 * (rows @ jnp.ones((2, 2)))) + 0 * jnp.sum(jnp.ones((1, 2)) @ table.T)

    assert result_dtypes(["gather"], jls.autocast(loss), jnp.ones((3, 2))) == [HALF]
    np.testing.assert_array_equal(jax.grad(jls.autocast(loss))(jnp.ones((3, 2)))[0], [4097, 4097])


@pytest.mark.parametrize("name", ["index", "untied, but used only by matmuls"])
def test_gradient_of_a_lookup_is_separate_from_the_gradient_of_matmuls(name):
    """Without the optimization barrier, XLA would scatter into the gradient that the matmuls compute for the table."""

    def loss(table):
        return jnp.sum(IN_HALF[name](table, TOKENS))

    eqns = list(equations(jax.make_jaxpr(jax.grad(jls.autocast(loss)))(TABLE)))
    sums = [eqn.outvars[0] for eqn in eqns if eqn.primitive.name in ("scatter-add", "scatter_add")]
    behind_barriers = [eqn.invars[0] for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert [any(each is atom for atom in behind_barriers) for each in sums] == [True]


def test_lookup_composes_with_transformations():
    def loss(scale):
        return jnp.mean(jnp.square(model(scale * TABLE, TOKENS)))

    def results(loss):
        def of_scale(x):
            derivatives = jax.jvp(loss, (x,), (x,)), jax.grad(loss)(x), jax.grad(jax.grad(loss))(x)
            return derivatives, jax.vmap(loss)(jnp.stack([x, x])), jls.autocast(loss)(x)

        return jax.jit(of_scale)(1.0)

    assert distance(results(loss), results(jls.autocast(loss))) < 4e-3


@pytest.mark.as_for_users
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_weight_is_gathered_in_float32(axis_type):
    """The program has the layout FSDP: the table and the tokens are sharded by their first axes."""

    def loss(table, tokens):
        rows = whole(table).at[tokens].get(out_sharding=P("data") if axis_type is AxisType.Explicit else None)
        return jnp.mean(jnp.square(block(rows, W) @ whole(table).T))

    def whole(table):
        return jax.sharding.reshard(table, P()) if axis_type is AxisType.Explicit else table

    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with set_mesh(mesh):
        args = [jax.device_put(each, NamedSharding(mesh, P("data"))) for each in (TABLE, TOKENS)]
        plain, half = (jax.jit(jax.grad(f)).lower(*args).compile() for f in (loss, jls.autocast(loss)))
        gathered = [line for line in half.as_text().splitlines() if " all-gather" in line]
        assert gathered
        assert not any("f32[" in line.partition("(")[0] for line in gathered)
        result = half(*args)
        assert distance(plain(*args), result) < 4e-3
        assert result.sharding == plain(*args).sharding
