"""`interop.keras.LossScaleOptimizer` in `Model.fit`, compared with float32. Skipped if Keras is not installed."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="keras is not installed", exc_type=ImportError)
interop = pytest.importorskip("jax_lossscale.interop.keras")
pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="the backend of Keras is not JAX"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def as_keras_computes():
    with jax.numpy_rank_promotion("allow"):
        yield


X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))


def model_with(optimizer, unit=1.0, is_half=True):
    """Return a compiled model whose loss is multiplied by `unit`."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
    if is_half:
        model.compute_loss_and_updates = jls.autocast(model.compute_loss_and_updates)
    model.compile(optimizer, loss=lambda y, predicted: unit * (y - predicted) ** 2)
    return model


def fitted(*args, epochs=40, **kwargs):
    model = model_with(*args, **kwargs)
    return model, model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0).history["loss"]


def sgd(unit=1.0):
    return keras.optimizers.SGD(0.1 / unit)


@pytest.mark.parametrize("loss_scale", [jls.AutoLossScale(2.0**30), jls.FixedLossScale(2.0**30)])
def test_gradients_that_underflow_in_float16(loss_scale):
    unit = 1e-9
    _, expected = fitted(sgd(unit), unit, is_half=False)
    _, lost = fitted(sgd(unit), unit)
    model, losses = fitted(interop.LossScaleOptimizer(sgd(unit), loss_scale), unit)
    assert lost[-1] == pytest.approx(lost[0], rel=0.1)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
    assert jls.metrics(model.optimizer.state)["applied_steps"] == 160


def test_an_overflow_skips_the_step():
    model, _ = fitted(interop.LossScaleOptimizer(keras.optimizers.Adam(1e-2), jls.DynamicLossScale(2.0**100)))
    metrics = jls.metrics(model.optimizer.state)
    assert metrics["skipped_steps"] > 40
    assert metrics["applied_steps"] == int(model.optimizer.iterations.value) == 160 - metrics["skipped_steps"]
    assert metrics["loss_scale"] < 2.0**60
    jls.raise_if_stuck(model.optimizer.state)


def test_metrics_before_the_first_step():
    optimizer = interop.LossScaleOptimizer(sgd(), 8.0)
    assert jls.metrics(optimizer.state)["loss_scale"] == 8
    assert jls.metrics(optimizer.state)["applied_steps"] == 0


def test_a_saved_model_continues(tmp_path):
    model, _ = fitted(interop.LossScaleOptimizer(keras.optimizers.Adam(1e-2)))
    model.compile(model.optimizer, loss="mse")
    del model.compute_loss_and_updates
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(restored.optimizer, interop.LossScaleOptimizer)
    jax.tree.map(np.testing.assert_array_equal, restored.optimizer.state, model.optimizer.state)
    restored.fit(X, Y, batch_size=16, verbose=0)
    assert jls.metrics(restored.optimizer.state)["applied_steps"] == 164


def test_apply_outside_of_fit():
    optimizer = interop.LossScaleOptimizer(keras.optimizers.SGD(1.0), jls.DynamicLossScale(4.0))
    variable = keras.Variable(jnp.array([2.0, 3.0]))
    optimizer.apply([jnp.array([4.0, 8.0])], [variable])
    np.testing.assert_array_equal(variable, [1.0, 1.0])
    optimizer.apply([jnp.array([4.0, jnp.inf])], [variable])
    np.testing.assert_array_equal(variable, [1.0, 1.0])
    assert jls.metrics(optimizer.state)["skipped_steps"] == 1
    assert jls.metrics(optimizer.state)["loss_scale"] == 2


def test_unknown_names_of_the_module():
    with pytest.raises(AttributeError, match="has no attribute 'LossScales'"):
        interop.LossScales  # noqa: B018 - the access is the test
