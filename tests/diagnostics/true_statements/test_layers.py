"""Reports name the layer and the line of each operation, and every printed location matches as a rule of a policy."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import workloads
from kinds import slow_except

import jax_lossscale as jls
from jax_lossscale import autocast
from jax_lossscale._program.subjaxprs import nested_equations
from jax_lossscale.diagnostics import autocast_report, compare_gradients, find_precision, range_report

pytestmark = pytest.mark.ci

half = jnp.float16
X = workloads.draw(6, 4)


def test_reports_name_the_layer_and_the_line():
    """Linen modules have unique names."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4, dtype=half)(x)
            return jnp.log1p(y * y)

    model = nn.Sequential([Block() for _ in range(4)])
    params = model.init(workloads.KEY, X)
    # The squares of the third layer overflow.
    large = jax.tree.map(lambda leaf: leaf * 3000, params["params"]["layers_2"])
    args = {"params": {**params["params"], "layers_2": large}}, X

    def loss(params, x):
        return workloads.mean_square(model.apply(params, x))

    report = range_report(loss, *args, loss_scale=1.0)
    assert (report[0].operation, report[0].layer) == ("mul", "Sequential/layers_2")
    where = f"`mul` in Sequential/layers_2 ({report[0].source})"
    assert where in compare_gradients(loss, *args, loss_scales=[1.0]).verdict
    assert sum(each.operation == "mul" and not each.is_backward for each in report) > 3


def block(transform, depth, x):
    with jax.named_scope("Block"):
        return transform(partial(block, transform, depth - 1))(jnp.sin(x)) if depth else jnp.cos(x)


@pytest.mark.parametrize("transform", [lambda function: function, jax.checkpoint, jax.vmap])
def test_nested_scopes_with_the_same_name_are_different_layers(transform):
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(block(transform, 2, x))))(jnp.ones((2, 2)))
    layers = {each.location.layer for each in nested_equations(gradient.jaxpr)}
    assert layers - {""} == {"Block", "Block/Block", "Block/Block/Block"}


def test_scope_whose_name_contains_transpose_is_in_the_forward_pass():
    program = jax.make_jaxpr(jax.named_scope("conv_transpose(3x3)")(jnp.sin))(1.0)
    (eqn,) = nested_equations(program.jaxpr)
    assert (eqn.location.layer, eqn.location.is_backward) == ("conv_transpose(3x3)", False)


# Every printed location can be used in a rule of a policy.


class Layer:
    def __call__(self, kernel, x):
        return jnp.tanh(x @ kernel)


@jax.jit
def layer(kernel, x):
    return jnp.tanh(x @ kernel)


@jax.custom_vjp
def with_a_rule(kernel, x):
    return x @ kernel


def backward(residuals, cotangent):
    kernel, x = residuals
    with jax.named_scope("backward[0]"):
        return x.T @ cotangent, cotangent @ kernel.T


with_a_rule.defvjp(lambda kernel, x: (x @ kernel, (kernel, x)), backward)


def in_scopes(ws, x):
    for n, w in enumerate(ws):
        with jax.named_scope(f"blocks[{n}]"), jax.named_scope("a*b?"):
            x = layer(w, x)
    return x


def in_a_scan(ws, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (Layer()(w, x), None)), x, jnp.stack(ws))[0]


def with_rules(ws, x):
    for w in ws:
        x = with_a_rule(w, x)
    return x


def printed_places(loss, *args):
    """Return the layers and lines in the reports, each as an argument of a rule."""
    under_autocast = autocast(loss)
    ranges = range_report(under_autocast, *args, loss_scale=1.0)
    policy = find_precision(loss, *args).policy
    assert ranges.bad
    rows = [*ranges.bad, *autocast_report(loss, *args, policy=policy).matmuls, *policy.rules]
    places = {
        (name, getattr(row, name)) for row in rows for name in ("layer", "source", "function") if hasattr(row, name)
    }
    texts = [compare_gradients(under_autocast, *args).verdict, str(ranges.summary)]
    for match in re.finditer(r"`[\w-]+`(?: in (.+?))? \(([^;)]+:\d+)|`([^`]+)` \(([^;)]+:\d+)", " ".join(texts)):
        places |= {("layer", match[1] or match[3]), ("source", match[2] or match[4])}
    return {(name, place) for name, place in places if place and place != "*"}


@pytest.mark.filterwarnings("ignore:`find_precision`")
@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize("body", slow_except([in_scopes], [in_scopes, in_a_scan, with_rules]))
def test_every_printed_location_matches_as_a_rule(body):
    def loss(ws, x):
        with jls.keep_float32():
            x = x @ ws[0]
        y = body(ws, 1e-6 * x)
        with jax.named_scope("energy"):
            return jnp.mean(jnp.square(y @ (1e11 * ws[0])))

    args = [workloads.draw(4, 4, seed=n) for n in range(3)], X
    places = printed_places(loss, *args)
    assert {name for name, _ in places} >= {"layer", "source"}
    for name, place in places:
        policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", **{name: place})])
        jax.grad(autocast(loss, policy=policy))(*args)  # A rule without a match would warn.


def test_cast_of_a_carry_has_the_location_of_its_matmul():
    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (1e6 * Layer()(w, x), None), x, jnp.stack(ws))[0])

    worst = range_report(autocast(loss), [workloads.draw(4, 4, seed=n) for n in range(3)], X, loss_scale=1.0)[0]
    assert (worst.operation, worst.layer) == ("convert_element_type", "Layer")
    assert int(worst.source.rpartition(":")[2]) == Layer.__call__.__code__.co_firstlineno + 1


def norm_of_errors(kernel, x):
    errors = x @ kernel
    return jnp.mean(jnp.linalg.norm(errors, axis=1))


@pytest.mark.parametrize("transform", [lambda fun: fun, autocast, jax.jit, lambda fun: autocast(jax.jit(fun))])
def test_operations_of_a_jitted_function_of_jax_have_the_line_of_its_call(transform):
    report = range_report(transform(norm_of_errors), jnp.zeros((4, 4)), X, dtype=half)
    nonfinite = [each for each in report.operations if each.is_backward and not each.largest < float("inf")]
    line = norm_of_errors.__code__.co_firstlineno + 2
    assert nonfinite
    assert {each.source.rpartition("/")[2] for each in nonfinite} == {f"test_layers.py:{line}"}


def test_layers_of_a_jitted_library_model_match_as_rules():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    call = nnx.jit(nnx.Sequential.__call__)

    def loss(model, x):
        return jnp.mean(call(model, x) ** 2)

    layer = autocast_report(loss, model, X).matmuls[0].layer
    assert layer.endswith("Sequential/Linear")
    policy = jls.PrecisionPolicy(rules=[jls.PrecisionRule("float32", layer=layer)])
    assert autocast_report(loss, model, X, policy=policy).summary.half_matmuls == 0
