"""`SpmdTrainer` of AXLearn with a small network that classifies noisy vectors."""

# /// trainer
# environment = "axlearn"
# python = "3.12"
# install = ["jax<0.11", "aqtp", "attrs", "chex", "flax", "tensorflow-cpu", "tensorstore"]
# without_dependencies = ["axlearn @ git+https://github.com/apple/axlearn"]
# where = """
# `Learner.Config.forward_fn_transformation` returns `mp.loss`, `optimizer` returns \
# `with_partition_fn(mp.optimizer, partition)`"""
# ///

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mode import Half, report
from axlearn.common.base_model import BaseModel
from axlearn.common.config import config_for_function
from axlearn.common.input_base import Input
from axlearn.common.layers import Linear
from axlearn.common.learner import Learner
from axlearn.common.optimizers import with_partition_fn
from axlearn.common.summary_writer import NoOpWriter
from axlearn.common.trainer import SpmdTrainer
from axlearn.common.utils import TensorSpec

half = Half(optax.adam(1e-3))


def partition(specs):
    """Return the shapes and shardings of the optimizer's state. Its moments are sharded like the parameters."""
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    return optax.tree.map_params(
        half.optimizer,
        lambda leaf, spec: TensorSpec(leaf.shape, leaf.dtype, spec.mesh_axes),
        jax.eval_shape(half.optimizer.init, shapes),
        specs,
        transform_non_params=lambda leaf: TensorSpec(leaf.shape, leaf.dtype),
    )


class Batches(Input):
    """Noisy vectors of four classes."""

    def dataset(self):
        rng = np.random.default_rng(0)
        classes = rng.normal(size=(4, 16))
        while True:
            label = rng.integers(0, 4, 32)
            image = classes[label] + 2 * rng.normal(size=(32, 16))
            yield {"inputs": image.astype(np.float32), "label": label.astype(np.int32)}


class Model(BaseModel):
    """A network with one hidden layer."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("hidden", Linear.default_config().set(input_dim=16, output_dim=32))
        self._add_child("logits", Linear.default_config().set(input_dim=32, output_dim=4))

    def forward(self, input_batch):
        logits = self.logits(jax.nn.relu(self.hidden(input_batch["inputs"])))
        return optax.softmax_cross_entropy_with_integer_labels(logits, input_batch["label"]).mean(), {}


class Losses(NoOpWriter):
    """Records the loss of each step."""

    def __call__(self, step, values):
        if "loss" in values:
            losses.append(values["loss"])


losses = []
with tempfile.TemporaryDirectory() as folder:
    config = SpmdTrainer.default_config().set(
        name="trainer",
        dir=folder,
        max_step=300,
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
        input=Batches.default_config(),
        model=Model.default_config().set(dtype=jnp.float32),
        learner=Learner.default_config().set(
            optimizer=config_for_function(lambda: with_partition_fn(half.optimizer, partition)),
            forward_fn_transformation=config_for_function(lambda: half.loss),
        ),
        summary_writer=Losses.default_config(),
    )
    config.checkpointer.save_policy = config_for_function(lambda: lambda **kwargs: False)
    trainer = config.instantiate(parent=None)
    trainer.run(jax.random.PRNGKey(0))
report("axlearn", losses, trainer.trainer_state.learner["optimizer"])
