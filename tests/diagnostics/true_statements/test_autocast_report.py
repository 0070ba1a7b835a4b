"""Reports by `autocast_report` on programs whose matmuls can be counted by hand."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from programs_of_others import Classifier

import jax_lossscale as jls
from jax_lossscale._program.location import HIDDEN_SCOPE
from jax_lossscale._program.subjaxprs import nested_equations
from jax_lossscale.diagnostics import autocast_report

pytestmark = pytest.mark.ci

W = jnp.eye(8)
X = jnp.ones((4, 8))


def network(w, x):
    with jax.named_scope("encoder(2x2)"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.mean(jnp.matmul(x, w, precision="highest") ** 2)


HEAD = network.__code__.co_firstlineno + 4


def plain(w, x):
    return jnp.mean(jnp.tanh(x @ w) @ w)


def test_program_without_layers_has_no_layers_of_this_library():
    assert {operation.layer for operation in autocast_report(plain, W, X).operations} == {""}


def test_summary_counts_matmuls_and_locates_the_first_in_float32():
    counts = "Matrix multiplications and convolutions (matmuls): {} of 5 in {}"
    assert str(autocast_report(plain, W, X)).splitlines()[0] == counts.format(5, "float16") + "."
    assert str(autocast_report(plain, W, X, dtype=jnp.bfloat16).summary) == counts.format(5, "bfloat16") + "."
    summary = str(autocast_report(network, W, X).summary)
    assert summary.startswith(
        f"{counts.format(2, 'float16')}, with 40% of the floating-point operations. "
        "The first matmul that is not in float16: `head` ("
    )
    assert f"test_autocast_report.py:{HEAD}); marked with the precision" in summary


@pytest.mark.parametrize(("size", "is_small"), [(8, False), (200, True)])
def test_report_says_that_nothing_must_be_changed_if_the_other_matmuls_are_small(size, is_small):
    def fun(w, x):
        hidden = x @ w @ w
        with jls.keep_float32():
            return jnp.mean(hidden @ w[:, :1])

    report = autocast_report(fun, jnp.ones((size, size)), jnp.ones((4, size)))
    assert report.half_share < 1
    assert (report.half_share >= 0.98) == is_small
    assert ("You do not need to change anything" in str(report)) == is_small


def test_report_without_matmuls_contains_no_numbers_of_matmuls():
    report = autocast_report(lambda w, x: jnp.sum(w * x), X, X)
    assert report.matmuls == ()
    lines = str(report).splitlines()
    assert lines[0] == "Matrix multiplications and convolutions (matmuls): none."
    assert lines[1].startswith("Saved for the backward pass")
    assert "dot_general" not in "".join(lines)
    assert "excluding arguments: 0.996 MiB" in str(dataclasses.replace(report, bytes_after=1020 * 2**10))


def test_report_is_printed_as_a_table_of_matmuls():
    report = autocast_report(network, W, X)
    assert all(each.reason.startswith("marked") == (each.layer == "head") for each in report.matmuls)
    rows = [line.split() for line in str(report).splitlines()[4:]]
    assert [(row[0], row[1], row[3], row[4], row[5]) for row in rows] == [
        ("dot_general", "head", "backward", "float32", "2"),
        ("dot_general", "head", "forward", "float32", "1"),
        ("dot_general", "encoder(2x2)", "forward", "float16", "1"),
        ("dot_general", "encoder(2x2)", "backward", "float16", "1"),
    ]


def test_column_of_reasons_is_left_aligned_without_reasons():
    report = autocast_report(lambda w, x: jnp.sum(x @ w), W, X)
    heading = next(line for line in str(report).splitlines() if line.startswith("operation"))
    assert heading.endswith("flops  reason")
    assert '<th style="text-align: left">reason</th>' in report._repr_html_()


def test_long_table_is_truncated():
    def many(w, x):
        for n in range(20):
            with jax.named_scope(f"layer{n}"):
                x = x @ w
        return jnp.sum(x)

    report = autocast_report(many, W, X)
    assert len(report.matmuls) == 40
    assert "... and 24 more (see `report.matmuls`)." in str(report)


def test_number_of_flops_is_correct():
    def loss(w, x):
        image, kernel = x.reshape(1, 4, 8), jnp.broadcast_to(w[:3, :, None], (3, 8, 5))
        y = jax.lax.conv_general_dilated(image, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.sum(y) + jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=10)[0])

    forward = {each.operation: each for each in autocast_report(loss, W, X).matmuls if not each.is_backward}
    assert forward["conv_general_dilated"].flops == 2 * (2 * 5) * (3 * 8)
    assert forward["dot_general"].flops == 10 * 2 * (4 * 8) * 8
    assert forward["dot_general"].count == 1


def test_programs_that_are_traced_after_a_report_contain_no_reasons():
    def fail(w, x):
        raise ZeroDivisionError

    autocast_report(network, W, X)
    with pytest.raises(ZeroDivisionError):
        autocast_report(fail, W, X)
    jaxpr = jax.make_jaxpr(jls.autocast(network))(W, X)
    stacks = [str(nested.eqn.source_info.name_stack) for nested in nested_equations(jaxpr.jaxpr)]
    assert any("encoder(2x2)" in stack for stack in stacks)
    assert not any(HIDDEN_SCOPE in stack for stack in stacks)


def test_arithmetic_is_included():
    def tanh(policy):
        return next(each for each in autocast_report(plain, W, X, policy=policy) if each.operation == "tanh")

    assert (tanh(None).dtype, tanh(None).reason, tanh(None).flops) == ("float32", "", 0)
    assert tanh(jls.PrecisionPolicy([jls.PrecisionRule("half", operation="tanh")])).dtype == "float16"
    scatter = autocast_report(lambda x: jnp.sum(jnp.zeros(X.shape).at[0].add(x[0])), X)
    names = {each.operation.replace("_", "-") for each in scatter}
    assert "scatter-add" in names
    assert "add" not in names
    assert scatter.bytes_accessed > 4 * X.nbytes


def test_saved_bytes_equal_the_residuals_of_vjp():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.exp(jnp.exp(x @ w))))

    report = autocast_report(loss, W, X)
    # Before: the results of both exponentials and the cosine, in float32. After: y and the cast of x, in float16.
    assert report.bytes_before == 3 * 4 * 32
    assert report.bytes_after == 2 * 2 * 32
    residuals = autocast_report(loss, W, X, policy=jls.PrecisionPolicy(recompute=False))
    assert residuals.bytes_after > report.bytes_after
    nothing = autocast_report(lambda w, x: jnp.sum(x @ w) + jnp.sum(x), W, X, dtype=jnp.float32)
    assert (nothing.bytes_before, nothing.bytes_after) == (0, 0)


def test_saved_bytes_of_a_16_bit_kernel_are_known_only_under_autocast():
    def kernel(x, w):
        assert x.dtype != jnp.float32
        return x @ w

    report = autocast_report(lambda w, x: jnp.sum(jls.in_half(kernel)(x, w) ** 2), W, X)
    assert report.bytes_before is None
    assert report.bytes_after > 0
    assert re.search(r"excluding arguments: \d+ bytes\. Casts", str(report))


def test_number_of_casts_is_correct():
    assert autocast_report(plain, W, X, dtype=jnp.float32).casts == 0
    # x, w and the cotangent are cast to half precision. The result and the gradient of w are cast to float32.
    assert autocast_report(lambda w, x: jnp.sum(x @ w), W, X).casts == 5


def by_rule(w, x):
    @jax.custom_vjp
    def function(w, x):
        return x @ w

    def backward(residuals, cotangent):
        w, x = residuals
        with jls.keep_float32():
            of_w = x.T @ cotangent
        return of_w, jnp.matmul(cotangent, w.T, precision="highest")

    function.defvjp(lambda w, x: (function(w, x), (w, x)), backward)
    return jnp.sum(jnp.sin(function(w, x)))


def test_matmuls_of_a_custom_vjp_are_listed():
    report = autocast_report(by_rule, W, X, argnums=(0, 1))
    assert [(each.dtype, each.is_backward, each.reason.partition(" (")[0]) for each in report.matmuls] == [
        ("float32", True, "inside `keep_float32`"),
        ("float32", True, "marked with the precision"),
        ("float16", False, ""),
    ]


def kernel(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]


@jax.custom_jvp
def by_pallas(w, x):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 8), jnp.float32), interpret=True)(x, w)


by_pallas.defjvp(lambda primals, tangents: (by_pallas(*primals), tangents[1]))


def in_a_callback(w, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, shape, jax.lax.stop_gradient(x @ w))


def placed(w, x):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(jnp.matmul, in_shardings=(here, here))(x, w)


# Each entry contains a function, the start of the reason, and the opaque operation that is reported.
NOT_FOLLOWED = {
    "pallas": (by_pallas, "inside `pallas_call`, which `autocast` does not rewrite", "pallas_call"),
    "callback": (in_a_callback, None, "pure_callback"),
    "jit with shardings": (placed, None, None),
    "a solver": (
        lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: w @ v, x[0])[0],
        "inside `custom_linear_solve`",
        None,
    ),
}


@pytest.mark.parametrize(("function", "reason", "opaque"), NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_opaque_operations_are_reported(function, reason, opaque):
    report = autocast_report(lambda w, x: jnp.sum(function(w, x)) + jnp.sum(x), W, X, argnums=1)
    in_float32 = [each for each in report.matmuls if each.dtype == "float32" and not each.is_backward]
    assert bool(in_float32) == (reason is not None)
    assert all(each.reason.startswith(reason) for each in in_float32 if "differentiating" not in each.reason)
    assert [each.partition(" ")[0] for each in report.opaque_operations] == ([opaque] if opaque else [])
    assert ("Computed as written" in str(report)) == (opaque is not None)


def test_rule_of_a_policy_is_applied_and_given_as_reason():
    rules = [jls.PrecisionRule("float32", layer="encoder(2x2)"), jls.PrecisionRule("float32_result", layer="head")]
    report = autocast_report(network, W, X, policy=jls.PrecisionPolicy(rules))
    forward = {each.layer: each for each in report.matmuls if not each.is_backward}
    assert forward["encoder(2x2)"].reason == f"a rule of the policy: {rules[0]!r}"
    assert (forward["encoder(2x2)"].dtype, forward["encoder(2x2)"].result) == ("float32", "float32")
    assert forward["head"].reason == f"a rule of the policy: {rules[1]!r}"
    assert (forward["head"].dtype, forward["head"].result) == ("float16", "float32")
    assert "float16, result float32" in str(report)


def of_model(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize(
    ("fun", "params"),
    [
        (lambda params, x: plain(params["w"], x) * params["factor"], {"w": W, "factor": 2.0}),
        (lambda params, x: plain(params["w"], x) * (params["step"] > 0), {"w": W, "step": jnp.int32(3)}),
        (of_model, Classifier(nnx.Rngs(0))),
        (lambda model, x: of_model(jax.vmap(model), x), eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))),
    ],
    ids=["dictionary", "counter", "nnx", "equinox"],
)
def test_shapes_can_replace_arrays(fun, params):
    def shape_of(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf

    shapes = functools.partial(jax.tree.map, shape_of)
    expected = autocast_report(fun, params, X, dtype=jnp.bfloat16)
    assert autocast_report(fun, shapes(params), shapes(X), dtype=jnp.bfloat16) == expected
    assert autocast_report(fun, shapes(params), X, dtype=jnp.bfloat16) == expected
    assert autocast_report(fun, params, x=shapes(X), dtype=jnp.bfloat16) == expected


def test_nan_in_an_argument_is_reported_if_another_argument_is_a_shape():
    report = autocast_report(plain, W.at[0, 0].set(jnp.nan), jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert report.arguments == ("`w` contains 1 NaN, at [0, 0].",)


def test_types_of_arrays_can_be_returned():
    def loss(w, x):
        return plain(w, x), jax.typeof(x)

    assert jls.autocast(loss)(W, X)[1] == jax.typeof(X)
    assert str(autocast_report(loss, W, X, has_aux=True).summary).endswith("5 of 5 in float16.")


def test_function_with_manual_casts_is_supported():
    def by_hand(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32))

    assert "2 of 2 in float16" in str(autocast_report(by_hand, W, X).summary)
    other = autocast_report(by_hand, W, X, dtype=jnp.bfloat16)
    assert "0 of 2 in bfloat16" in str(other.summary)
    assert str(other.summary).endswith("float16 in the source.")


dense = jax.jit(jnp.matmul)


def called(w, x):
    return dense(x, w)


def test_jitted_function_has_a_separate_reason_for_each_call():
    class Block:
        def __call__(self, w, x):
            return dense(x, w)

    def loss_fn(w, x):
        with jls.keep_float32():
            x = dense(x, w)
        x = called(w, Block()(w, x))
        with jax.named_scope("head"):
            return jnp.sum(dense(x, w))

    block, function = jls.PrecisionRule("float32", layer="Block"), jls.PrecisionRule("float32", function="called")
    report = autocast_report(loss_fn, W, X, policy=jls.PrecisionPolicy([block, function]))
    assert {(operation.layer, operation.dtype, operation.reason) for operation in report.matmuls} == {
        ("keep_float32", "float32", "inside `keep_float32`"),
        ("Block", "float32", f"a rule of the policy: {block!r}"),
        ("", "float32", f"a rule of the policy: {function!r}"),
        ("head", "float16", ""),
    }
    lines = {operation.layer: int(operation.source.rpartition(":")[2]) for operation in report.matmuls}
    assert lines["Block"] == Block.__call__.__code__.co_firstlineno + 1
    assert lines[""] == called.__code__.co_firstlineno + 1


def residual(w, x):
    for _ in range(3):
        x = x + jax.nn.relu(x @ w) @ w
    return jnp.mean(x**2)


def test_half_residual_stream_is_suggested_if_it_saves_bytes():
    option = jls.PrecisionPolicy(half_residual_stream=True)
    report, with_option = (autocast_report(residual, W, X, policy=policy) for policy in (None, option))
    assert report.bytes_accessed_with_half_residual_stream == with_option.bytes_accessed < 0.95 * report.bytes_accessed
    saving = 1 - with_option.bytes_accessed / report.bytes_accessed
    assert f"the number of bytes read and written by an estimated {100 * saving:.2g}%." in str(report)
    assert with_option.bytes_accessed_with_half_residual_stream is None


def with_fallback(w, x):
    kernel = jls.in_half(lambda x, w: x @ w, fallback=jnp.matmul)
    with jls.keep_float32():
        y = kernel(x, w)
    return jnp.mean(kernel(y, w))


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit])
@pytest.mark.parametrize("fun", [network, residual, with_fallback])
def test_report_is_the_same_for_a_decorated_function(fun, transform):
    decorated = transform(jls.autocast(fun))
    found, expected = autocast_report(decorated, W, X), autocast_report(fun, W, X)
    assert str(found.summary) == str(expected.summary)
    # `jax.jit` changes the order of the operations.
    assert vars(found) | {"operations": ()} == vars(expected) | {"operations": ()}
    # The report does not change the programs that are traced afterward.
    assert "f16" in str(jax.make_jaxpr(decorated)(W, X))


def test_half_residual_stream_is_not_suggested_without_effect():
    report = autocast_report(plain, W, X)
    assert report.bytes_accessed_with_half_residual_stream == report.bytes_accessed
    assert all("half_residual_stream" not in str(autocast_report(f, W, X)) for f in (plain, network))
    in_float32 = autocast_report(residual, W, X, dtype=jnp.float32)
    assert in_float32.bytes_accessed_with_half_residual_stream is None


def test_accessed_bytes_are_those_of_segments_matmuls_and_iterations():
    w, x = 4 * W.size, 4 * X.size
    casts, matmul = 1.5 * x + 1.5 * w, x / 2 + w / 2 + x / 2
    segments = x / 2 + w + x / 2, x / 2 + 4  # the tanh with the second matmul, and the mean
    assert autocast_report(plain, W, X).bytes_accessed == casts + matmul + sum(segments)

    def scanned(w, x, length, transformed=lambda fun: fun):
        @transformed
        def repeated(x):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=length)[0]

        return jnp.mean(repeated(x))

    few, many, in_checkpoint = (
        autocast_report(functools.partial(scanned, **options), W, X).bytes_accessed
        for options in ({"length": 10}, {"length": 30}, {"length": 30, "transformed": jax.checkpoint})
    )
    assert many > 2.5 * few
    assert in_checkpoint == pytest.approx(many, rel=0.1)
