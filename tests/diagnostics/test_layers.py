"""Which of several layers of one class, or passes through one line, an operation belongs to."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
import workloads

from jax_lossscale.diagnostics import compare_gradients, range_report

pytestmark = pytest.mark.ci

half = jnp.float16
X = workloads.draw(6, 4)
SCALES = (1.0, 1.0, 3000.0, 1.0)  # of the kernels: the squares of the third overflow


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def squared(kernel, x):
    y = x @ kernel.astype(half)
    return jnp.log1p(y * y)


def kernels(sizes=(4, 4, 4, 4, 4)):
    return [workloads.draw(a, b, seed=n, scale=SCALES[n]) for n, (a, b) in enumerate(itertools.pairwise(sizes))]


def functions_in_a_loop():
    def loss(weights, x):
        return mean_square(functools.reduce(lambda x, kernel: squared(kernel, x), weights, x.astype(half)))

    return loss, kernels(), "weights[2]"


def functions_of_a_dictionary():
    def loss(params, x):
        x = x.astype(half)
        for name in sorted(params):
            x = squared(params[name]["kernel"], x)
        return mean_square(x)

    return loss, {f"layer{n}": {"kernel": k} for n, k in enumerate(kernels())}, "params['layer2']['kernel']"


def jitted_functions():
    def loss(weights, x):
        return mean_square(functools.reduce(lambda x, kernel: jax.jit(squared)(kernel, x), weights, x.astype(half)))

    return loss, kernels(), "weights[2]"


def equinox_modules():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            y = jax.vmap(self.linear)(x)
            return jnp.log1p(y * y)

    def loss(blocks, x):
        return mean_square(functools.reduce(lambda x, block: block(x), blocks, x.astype(half)))

    blocks = [Block(eqx.nn.Linear(4, 4, key=workloads.KEY, dtype=half)) for _ in SCALES]
    large = eqx.tree_at(lambda blocks: blocks[2].linear.weight, blocks, replace_fn=lambda weight: weight * 3000)
    return loss, large, "Block, blocks[2].linear.bias"


def nnx_modules():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, scale):
            self.linear = nnx.Linear(4, 4, dtype=half, rngs=nnx.Rngs(0))
            self.linear.kernel[...] *= scale

        def __call__(self, x):
            y = self.linear(x)
            return jnp.log1p(y * y)

    def loss(model, x):
        return mean_square(model(x))

    return loss, nnx.Sequential(*map(Block, SCALES)), "Sequential/Block, model.layers[2].linear.bias.value"


def linen_modules():
    """Which have names of their own."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4, dtype=half)(x)
            return jnp.log1p(y * y)

    model = nn.Sequential([Block() for _ in SCALES])
    params = model.init(workloads.KEY, X)
    large = jax.tree.map(lambda leaf: leaf * 3000, params["params"]["layers_2"])
    params = {"params": {**params["params"], "layers_2": large}}
    return lambda params, x: mean_square(model.apply(params, x)), params, "Sequential/layers_2"


def passes_through_a_line():
    def loss(w, x):
        y = w.astype(half) * x.astype(half) + 2
        for _ in range(5):
            y = y * y  # 4, 16, 256, 65536
        return jnp.mean(jnp.log(y.astype(jnp.float32)))

    return loss, jnp.zeros((1, 4)), "run 4 of 5"


def called_from_two_lines():
    def grown(y):
        return y * y

    def loss(w, x):
        y = w.astype(half) * x.astype(half) + 2
        for _ in range(2):
            y = grown(y)
        y = grown(y)
        y = grown(y)
        return jnp.mean(jnp.log(y.astype(jnp.float32)))

    return loss, jnp.zeros((1, 4)), "run 4 of 4"


@pytest.mark.parametrize(
    "program",
    [
        functions_in_a_loop,
        functions_of_a_dictionary,
        jitted_functions,
        equinox_modules,
        nnx_modules,
        linen_modules,
        passes_through_a_line,
        called_from_two_lines,
    ],
)
def test_the_layer_is_told_from_others_of_its_class(program):
    loss, params, layer = program()
    report = range_report(loss, params, X, loss_scale=1.0)
    assert (report[0].operation, report[0].layer) == ("mul", layer)
    assert f"`mul` in {layer} (" in compare_gradients(loss, params, X, loss_scales=[1.0]).verdict
    assert len({operation.layer for operation in report if operation.operation == "mul"}) > 3


@pytest.mark.slow
def test_products_of_the_backward_pass_belong_to_their_own_layer():
    sizes = (4, 5, 6, 7, 8)  # no two products are of one shape
    loss, *_ = functions_in_a_loop()
    report = range_report(loss, kernels(sizes), X, loss_scale=1.0)
    products = [o for o in report if o.operation == "dot_general" and o.is_backward]
    of_kernels = {(b, a): f"weights[{n}]" for n, (a, b) in enumerate(itertools.pairwise(sizes))}
    of_inputs = {(6, a): f"weights[{n}]" for n, a in enumerate(sizes[:-1]) if n}
    assert {o.shape: o.layer for o in products} == of_kernels | of_inputs


def test_where_names_tell_layers_apart_nothing_is_added():
    fun, *args = workloads.healthy()
    layers = {operation.layer for operation in range_report(fun, *args)}
    assert {layer for layer in layers if layer.startswith("layer")} == {"layer0", "layer1"}


def test_what_a_line_of_jax_makes_of_one_pass_has_no_numbers():
    report = range_report(lambda w: jnp.sum(jax.nn.gelu(w.astype(half)).astype(jnp.float32)), X)
    assert not any(re.search(r"run \d+ of \d", operation.layer) for operation in report)
