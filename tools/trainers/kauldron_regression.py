"""`Trainer` of kauldron with a small network that learns a function of its inputs.

The weight of the loss is so small that all gradients are rounded to zero in float16. With `autocast` alone, the loss
therefore remains at its initial value.
"""

# /// trainer
# environment = "kauldron"
# install = [
#     "chex", "clu", "einops", "etils[edc,enp,epath,epy,etree]", "flax", "grain", "immutabledict", "jaxtyping", "lark",
#     "mediapy", "ml-collections", "orbax-checkpoint", "pandas", "tensorboard", "tensorflow-cpu", "tensorflow-datasets",
#     "tqdm", "typeguard", "setuptools<81",
# ]
# without_dependencies = ["kauldron"]
# needs_loss_scale = true
# where = "`Trainer(optimizer=mp.optimizer)`, `train_step.forward_with_loss = mp.loss(train_step.forward_with_loss)`"
# ///

import tempfile

import numpy as np
import optax
from _mode import Half, report
from flax import linen as nn
from kauldron import kd
from kauldron.train import train_step

half = Half(optax.adam(3e-3, eps=1e-15))
train_step.forward_with_loss = half.loss(train_step.forward_with_loss)


class Model(nn.Module):
    """A network with one hidden layer."""

    inputs: kd.kontext.Key = "batch.inputs"

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(inputs)))


class Losses(kd.train.metric_writer.NoopWriter):
    """Records the loss of each step."""

    def write_step_metrics(self, *, aux, **kwargs):
        losses.append(float(aux.compute().loss_values["losses/loss"]))


def examples():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1024, 4)).astype(np.float32)
    return {"inputs": inputs, "targets": np.sin(inputs).sum(axis=1, keepdims=True)}


losses = []
trainer = kd.train.Trainer(
    workdir=tempfile.mkdtemp(),
    train_ds=kd.data.InMemoryPipeline(loader=examples, shuffle=True, batch_size=64, seed=0),
    model=Model(),
    optimizer=half.optimizer,
    train_losses={"loss": kd.losses.L2(preds="preds", targets="batch.targets", weight=1e-9)},
    num_train_steps=300,
    log_metrics_every=1,
    writer=Losses(),
)
state, _ = trainer.train()
report("kauldron", losses, state.opt_state)
