"""Reports on gradients accept models of common libraries, including leaves that are not parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workloads

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, compare_gradients, range_report

pytestmark = pytest.mark.ci

X = workloads.draw(6, 4)


def equinox_module():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 2, key=workloads.KEY)  # The activation function is a leaf.
    return model, lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), ".layers[0].weight"


def nnx_module():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)  # A dropout layer contains a random key and a counter.
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dropout(jnp.tanh(self.first(x))))

    return Model(nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - jnp.roll(x, 1, 0)[:, :1]) ** 2), "first"


def tree_with_none_and_counters():
    params = {"kernel": workloads.draw(4, 2), "step": 3, "count": np.arange(3), "gone": None, "key": workloads.KEY}
    return params, lambda params, x: jnp.mean((x @ params["kernel"]) ** 2) * params["step"], "['kernel']"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(equinox_module, marks=pytest.mark.slow),
        pytest.param(nnx_module, marks=pytest.mark.slow),
        tree_with_none_and_counters,
    ],
)
def test_reports_accept_whole_models(model):
    params, loss, path = model()
    under_autocast = jls.autocast(loss)
    report = compare_gradients(under_autocast, params, X, loss_scales=[2.0**8])
    assert report.will_train
    assert report.summary.half_matmuls == report.summary.matmuls > 0
    assert any(path in leaf.path for leaf in report)
    assert range_report(under_autocast, params, X, loss_scale=2.0**8).summary == report.summary
    assert report.summary == autocast_report(loss, params, X).summary


def test_only_gradients_of_parameters_are_compared():
    params, loss, _ = tree_with_none_and_counters()
    report = compare_gradients(jls.autocast(loss), params, X, reference=loss, loss_scales=[2.0**8])
    (leaf,) = report
    exact = jax.grad(lambda kernel: loss({**params, "kernel": kernel}, X))(params["kernel"])
    assert leaf.path == "['kernel']"
    assert leaf.norm == pytest.approx(float(jnp.linalg.norm(exact)), rel=1e-4)


def test_argnums_may_be_negative():
    report = compare_gradients(
        jls.autocast(lambda x, params: jnp.mean((x @ params["w"]) ** 2)), X, {"w": jnp.ones((4, 2))}, argnums=-1
    )
    assert [leaf.path for leaf in report] == ["['w']"]
