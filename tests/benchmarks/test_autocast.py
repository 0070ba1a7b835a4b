"""`benchmarks.autocast`: what is counted, the interpreter's rules, the programs and the marks."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.autocast import tables
from benchmarks.autocast.counting import (
    Products,
    bytes_kept,
    casts,
    compiled_casts,
    compiled_products,
    products,
)
from benchmarks.autocast.gradients import Error, Trained, scaled_gradients
from benchmarks.autocast.interpreter import interpreted, products_rounded, torch_rule
from benchmarks.autocast.models import Casts, Model, gemma, nanogpt, vae, vit
from benchmarks.autocast.programs import programs
from benchmarks.autocast.ways import AUTOCAST, BY_HAND, FLOAT32, JMP, TORCH, ways
from benchmarks.report import Mark

pytest.importorskip("flax")
pytest.importorskip("jmp")

MODELS = [
    gemma(layers=1, width=16, heads=2, batch=2, context=8),
    nanogpt(layers=1, width=16, heads=2, batch=2, context=8),
    vit(layers=1, width=16, heads=2, batch=4, size=8),
    vae(width=16, latent=4, batch=4, size=4),
]


QUICK = ("LSTM by scan", "PINN, second derivatives", "`jax.checkpoint`")


@pytest.fixture(autouse=True)
def ranks_may_differ():
    with jax.numpy_rank_promotion("allow"):  # as flax's layers need
        yield


def half(*shape):
    return jnp.ones(shape, jnp.float16)


# --- What is counted ---


def test_products_also_of_loops_and_calls_and_mixed_ones_are_not_narrow():
    def function(x, wide):
        x, _ = jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, x), None), x, length=3)
        return x @ x, x @ wide, jnp.matmul(x, x, preferred_element_type=jnp.float32)

    assert products(jax.make_jaxpr(function)(half(2, 2), jnp.ones((2, 2))).jaxpr) == Products(narrow=2, total=4)


def test_casts_between_floats_only():
    def function(x):
        return x.astype(jnp.float16).astype(jnp.float32), x.astype(jnp.int32).astype(jnp.float32), x.astype(x.dtype)

    assert casts(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr) == 2


def test_bytes_kept_are_those_of_intermediate_values():
    def loss(params, batch):
        return (jnp.sin(params * 2) * batch).sum()

    # The derivative of sin at 100 numbers; the batch is there anyway.
    assert bytes_kept(loss, jnp.ones(100), jnp.ones(100)) == 400


def test_compiled_programs_are_counted_in_fusions_too():
    text = """
%fused (p.1: f16[8,8], p.2: f16[8,8]) -> f32[8,8] {
  %p.1 = f16[8,8]{1,0} parameter(0)
  %p.2 = f16[8,8]{1,0} parameter(1)
  %dot.1 = f16[8,8]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}
  ROOT %convert.1 = f32[8,8]{1,0} convert(%dot.1)
}

ENTRY %main (a: f16[8,8], b: f32[8,8], c: s32[8]) -> f32[8,8] {
  %a = f16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %c = s32[8]{0} parameter(2)
  %convert.2 = f32[8]{0} convert(%c)
  %fusion.1 = f32[8,8]{1,0} fusion(%a, %a), kind=kCustom, calls=%fused
  ROOT %call.1 = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%fusion.1, %b), custom_call_target="__cublas$gemm"
}
"""
    assert compiled_products(text) == {("f16", "f16"): 1, ("f32", "f32"): 1}
    assert compiled_casts(text) == 1


# --- The rules of others ---


def test_torch_rule():
    def function(x, kernel, bias):
        y = x @ kernel
        return jnp.tanh(y), jnp.exp(y), y + bias, y * 2.0, y.sum(-1), jnp.sin(x)

    narrow = jax.make_jaxpr(interpreted(function, torch_rule))(jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones(2))
    dtypes = {eqn.primitive.name: str(eqn.outvars[0].aval.dtype) for eqn in narrow.eqns}
    in_float16 = {"dot_general", "tanh", "mul"}
    assert in_float16 <= dtypes.keys()
    assert {name: dtypes[name] for name in in_float16} == dict.fromkeys(in_float16, "float16")
    in_float32 = {"exp", "add", "reduce_sum", "sin"}
    assert {name: dtypes[name] for name in in_float32} == dict.fromkeys(in_float32, "float32")
    assert {str(aval.dtype) for aval in narrow.out_avals} == {"float32"}


def test_products_are_rounded_and_nothing_else():
    x = jnp.asarray([[1 + 2.0**-12]])
    results = {
        name: interpreted(lambda x: (x @ x, x * x), products_rounded(operands, results))(x)
        for name, operands, results in (("none", 0, 0), ("operands", 1, 0), ("results", 0, 1))
    }
    exact = 1 + 2.0**-11
    assert {name: float(product[0, 0]) for name, (product, _) in results.items()} == {
        "none": exact,
        "operands": 1.0,
        "results": 1.0,
    }
    assert all(float(square[0, 0]) == exact for _, square in results.values())


# --- Programs and ways ---


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=() if model.name in QUICK else pytest.mark.slow)
        for model in (*programs(), *MODELS)
    ],
)
def test_all_products_are_narrow_and_every_way_gives_about_the_same(model):
    params, batch = jax.jit(lambda: (model.params(), model.batch(0)))()
    jaxprs = {
        name: jax.make_jaxpr(jax.value_and_grad(ways()[name](model)))(params, batch).jaxpr
        for name in (FLOAT32, BY_HAND, AUTOCAST)
    }
    assert (products(jaxprs[FLOAT32]).narrow, casts(jaxprs[FLOAT32])) == (0, 0)
    ours = products(jaxprs[AUTOCAST])
    assert ours.narrow == ours.total > 0
    assert products(jaxprs[BY_HAND]).narrow > 0.75 * products(jaxprs[BY_HAND]).total
    # Of float16 arrays this function of JAX makes a product that the CPU does not have.
    cast_before = () if "attention" in model.name else (BY_HAND, JMP)
    losses = {name: ways()[name](model) for name in (FLOAT32, AUTOCAST, TORCH, *cast_before)}
    values = jax.jit(lambda *arguments: {name: loss(*arguments) for name, loss in losses.items()})(params, batch)
    assert {value.dtype for value in values.values()} == {jnp.dtype("float32")}
    for name, value in values.items():
        assert float(value) == pytest.approx(float(values[FLOAT32]), rel=0.02), name


def test_the_error_of_gradients_is_that_at_the_best_scale():
    model = Model(
        "cubes",
        lambda: jnp.full(4, 0.5),
        lambda number: jnp.full(4, 1.0 + number),
        lambda casts: lambda params, batch: (params**3 * batch).sum(),
    )
    trained = Trained(model, steps=2, batches=2)
    assert float(trained.batches[1][0]) == 4.0
    assert trained.error(scaled_gradients(trained.loss)).relative < 1e-6
    too_large = trained.error(scaled_gradients(lambda params, batch: 1.5 * trained.loss(params, batch)))
    assert too_large.relative == pytest.approx(0.5)

    def overflows(params, batch, scale):
        value, grads = scaled_gradients(trained.loss)(params, batch, scale)
        return value, jnp.where(scale > 1, jnp.inf, 2 * grads)

    assert trained.error(overflows).relative == pytest.approx(1)


def test_casts_by_hand_are_none_in_the_program_for_float32():
    tree = {"kernel": jnp.ones(2), "label": jnp.arange(2)}
    assert Casts().narrow(tree) is tree
    narrow = Casts(jnp.float16).narrow(tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(narrow)] == [jnp.float16, jnp.int32]
    assert Casts(jnp.float16).wide(narrow)["kernel"].dtype == jnp.float32


# --- Tables ---


def test_what_is_not_compiled_is_not_measured(monkeypatch):
    monkeypatch.setattr(tables.cuda, "missing", lambda: "needs a package")
    table = tables._for_h100(True, tables._QUICK_SIZES, None)
    assert {(mark.value, mark.note) for mark in table.marks} == {(None, "needs a package")}
    assert len(table.marks) == 3


def test_the_marks_of_errors():
    errors = {"VAE": {BY_HAND: Error(4e-3, ""), AUTOCAST: Error(1e-3, "")}}
    table = tables._errors(False, errors)
    assert table.marks == [Mark("autocast: gradient error over by hand, VAE", 0.25, 0.5)]
    assert table.rows == [("VAE", 4e-3, 1e-3, 0.25)]
