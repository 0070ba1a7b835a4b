"""`Trainer` of T5X with a tiny T5, and with two microbatches per step.

Each target is the input token or its successor, so the best possible loss is log(2). The reported loss is the sum over
the two microbatches.
"""

# /// trainer
# environment = "t5x"
# install = [
#     "seqio-nightly", "cached_property", "clu", "fiddle", "gin-config", "flax", "orbax-checkpoint",
#     "tensorflow-cpu", "tensorboard", "setuptools<81", "jaxtyping", "grain",
# ]
# without_dependencies = [
#     "t5x @ git+https://github.com/google-research/t5x",
#     "airio @ git+https://github.com/google/airio",
#     "jestimator @ git+https://github.com/google-research/jestimator",
# ]
# where = """
# `model.loss_fn = mp.loss(model.loss_fn)`, `OptaxWrapper(mp.optimizer)`; a partition rule for \
# `LossScaledState`, `import jax_lossscale.interop.flax`"""
# ///

import jax
import numpy as np
import optax
import seqio
from _mode import Half, report
from jax.sharding import PartitionSpec
from t5x import models, optimizers, partitioning, trainer, utils
from t5x.examples.t5 import network

import jax_lossscale as jls
import jax_lossscale.interop.flax  # registers the loss scales with `flax.serialization`

half = Half(optax.adam(1e-2))
rules = optimizers.OptaxStatePartitionRules
rules._RULES[jls.LossScaledState] = lambda state, axes: jax.tree.map(lambda _: PartitionSpec(), state)._replace(
    inner_state=rules.derive_optax_logical_axes(state.inner_state, axes)
)

config = network.T5Config(
    vocab_size=32,
    emb_dim=16,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=8,
    mlp_dim=32,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
)
vocabulary = seqio.PassThroughVocabulary(32)
model = models.EncoderDecoderModel(
    network.Transformer(config),
    vocabulary,
    vocabulary,
    optimizers.OptaxWrapper(half.optimizer),
    loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
)
model.loss_fn = half.loss(model.loss_fn)

rng = np.random.default_rng(0)


def batches():
    while True:
        tokens = np.tile(rng.integers(2, 31, (16, 1)), 8).astype(np.int32)
        targets = tokens + rng.integers(0, 2, (16, 8)).astype(np.int32)
        yield {
            "encoder_input_tokens": tokens,
            "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_loss_weights": np.ones(tokens.shape, np.int32),
        }


partitioner = partitioning.PjitPartitioner(num_partitions=1)
shapes = {name: value.shape for name, value in next(batches()).items()}
initializer = utils.TrainStateInitializer(model.optimizer_def, model.get_initial_variables, shapes, partitioner)
losses = []
with trainer.Trainer(
    model=model,
    train_state=initializer.from_scratch(jax.random.PRNGKey(0)),
    partitioner=partitioner,
    eval_names=[],
    summary_dir=None,
    train_state_axes=initializer.train_state_axes,
    rng=jax.random.PRNGKey(1),
    learning_rate_fn=utils.create_learning_rate_scheduler(factors="constant", base_learning_rate=1e-3),
    num_microbatches=2,
) as t5x_trainer:
    iterator = batches()
    for _ in range(30):
        metrics = t5x_trainer.train(iterator, 10).result()
        losses.append(float(metrics["loss"].value))
    report("t5x", losses, t5x_trainer.train_state._optimizer.state.param_states)
