"""Reports on gradients accept models of common libraries, including leaves that are not parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workloads

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, compare_gradients, range_report
from jax_lossscale.diagnostics._loss_call import check_call

pytestmark = pytest.mark.ci

X = workloads.draw(6, 4)


@pytest.mark.parametrize("is_split", [False, True])
def test_only_the_parameters_of_an_nnx_model_are_differentiated(is_split):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.cache = nnx.Cache(jnp.ones((1, 8)))
            self.positions = nnx.data(jnp.ones((1, 8)))  # an array that is not in a variable
            self.last = nnx.LoRA(8, 2, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(self.first(x)) * self.cache[...] + self.positions)

    definition, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(params, x):
        model = nnx.merge(definition, params["model"]) if is_split else params["model"]
        return jnp.mean((params["scale"] * model(x)) ** 2)

    params = {"model": state if is_split else nnx.merge(definition, state), "scale": jnp.ones(())}
    call = check_call("compare_gradients", loss, (params, X), {}, 0, False)
    paths = call.args[0]
    for name in "kernel", "bias", "scale", "lora_a", "lora_b":
        assert any(name in path for path in paths)
    assert not [path for path in paths for name in ("mean", "var", "cache") if name in path]
    assert any("positions" in path for path in paths) == is_split
    assert jnp.isfinite(call.fun(*call.args)[0])


def test_variables_of_an_nnx_model_without_parameters_are_differentiated():
    from flax import nnx

    class Weights(nnx.Variable):
        """A variable that is not a parameter."""

    call = check_call("compare_gradients", jnp.sum, (Weights(jnp.ones(3)),), {}, 0, False)
    assert len(call.args[0]) == 1


def test_reports_accept_leaves_that_are_not_parameters():
    params = {"kernel": workloads.draw(4, 2), "step": 3, "count": np.arange(3), "gone": None, "key": workloads.KEY}

    def loss(params, x):
        return jnp.mean((x @ params["kernel"]) ** 2) * params["step"]

    precisions = []

    def reference(params, x):
        precisions.append(jax.config.jax_default_matmul_precision)
        return loss(params, x)

    under_autocast = jls.autocast(loss)
    report = compare_gradients(under_autocast, params, X, reference=reference, loss_scales=[2.0**8])
    assert {*precisions} == {"highest"}  # Otherwise, TPUs would round the operands of the reference to bfloat16.
    assert report.will_train
    assert report.summary.half_matmuls == report.summary.matmuls > 0
    (leaf,) = report
    exact = jax.grad(lambda kernel: loss({**params, "kernel": kernel}, X))(params["kernel"])
    assert leaf.path == "['kernel']"
    assert leaf.norm == pytest.approx(float(jnp.linalg.norm(exact)), rel=1e-4)
    assert range_report(under_autocast, params, X, loss_scale=2.0**8).summary == report.summary
    assert report.summary == autocast_report(loss, params, X).summary
