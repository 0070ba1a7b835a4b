"""`classification_trainer.train` of scenic, which compiles its steps with `jax.pmap`.

The trainer defines the loss function inside its training step. The model's `apply` is wrapped instead.
"""

# /// trainer
# environment = "scenic"
# install = [
#     "clu", "ml-collections", "tensorflow-cpu", "tensorflow-datasets", "flax", "immutabledict", "tensorboard",
#     "setuptools<81",
# ]
# without_dependencies = ["scenic @ git+https://github.com/google-research/scenic"]
# where = """
# `mp.loss(flax_model.apply)`, used if `train=True`, `mp.optimizer` is returned by \
# `optimizers.get_optimizer`; `classification_trainer.train_step = mp.step(...)`"""
# ///

import tempfile

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from _mode import Half, report
from clu import metric_writers
from scenic.dataset_lib.dataset_utils import Dataset
from scenic.projects.baselines.fully_connected import FullyConnectedClassificationModel
from scenic.train_lib import classification_trainer, optimizers

half = Half(optax.adam(1e-3))


class Model(FullyConnectedClassificationModel):
    """A classifier that is trained in float16."""

    def build_flax_model(self):
        model = super().build_flax_model()
        evaluate, train_apply = model.apply, half.loss(model.apply)

        def apply(*args, train, **kwargs):
            return (train_apply if train else evaluate)(*args, train=train, **kwargs)

        object.__setattr__(model, "apply", apply)
        return model


optimizers.get_optimizer = lambda *args, **kwargs: half.optimizer
classification_trainer.train_step = half.step(classification_trainer.train_step)

rng = np.random.default_rng(0)
classes = rng.normal(size=(4, 8, 8, 1))


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        label = rng.integers(0, 4, (1, 32))
        inputs = classes[label] + 2 * rng.normal(size=(1, 32, 8, 8, 1))
        yield {
            "inputs": np.asarray(inputs, np.float32),
            "label": np.eye(4, dtype=np.float32)[label],
            "batch_mask": np.ones((1, 32), np.float32),
        }


meta_data = {
    "num_classes": 4,
    "input_shape": (-1, 8, 8, 1),
    "input_dtype": jnp.float32,
    "num_train_examples": 320,
    "num_eval_examples": 320,
    "target_is_onehot": True,
}
config = ml_collections.ConfigDict(
    {
        "batch_size": 32,
        "rng_seed": 0,
        "num_training_steps": 200,
        "log_eval_steps": 100,
        "hid_sizes": (32, 32),
        "data_dtype_str": "float32",
        "max_grad_norm": 1.0,
        "checkpoint": False,
        "debug_train": False,
        "debug_eval": False,
        "lr_configs": {"learning_rate_schedule": "compound", "factors": "constant", "base_learning_rate": 1e-3},
        "optimizer": "adam",
        "optimizer_configs": {},
    }
)
with tempfile.TemporaryDirectory() as folder:
    state, train_summary, eval_summary = classification_trainer.train(
        rng=jax.random.PRNGKey(0),
        config=config,
        model_cls=Model,
        dataset=Dataset(train_iter=batches(0), valid_iter=batches(1), meta_data=meta_data),
        workdir=folder,
        writer=metric_writers.LoggingWriter(),
    )
report("scenic", [train_summary["loss"]], state.opt_state)
