"""`Model.fit` of Keras 3 with the JAX backend, following the guide "Training with the built-in methods"."""

# /// trainer
# environment = "keras"
# install = ["keras>=3.11", "jax"]
# where = "`model.compute_loss_and_updates`, and `model.compile(optimizer)` with `interop.keras.LossScaleOptimizer`"
# ///

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from _mode import MODE, report

import jax_lossscale as jls

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(64, activation="gelu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(64, activation="gelu"),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam(1e-3, clipnorm=1.0)
if MODE != "float32":
    model.compute_loss_and_updates = jls.autocast(model.compute_loss_and_updates)
if MODE == "float16":
    from jax_lossscale.interop.keras import LossScaleOptimizer

    optimizer = LossScaleOptimizer(optimizer)
model.compile(optimizer, loss="mse")
history = model.fit(x, y, batch_size=64, epochs=20, verbose=0)
report("keras", history.history["loss"], model.optimizer.state if MODE == "float16" else None)
