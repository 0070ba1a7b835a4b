"""The model and the data of the programs that run trainers of tunix."""

import jax
import numpy as np
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import hooks, utils

VOCABULARY = 32


def llama(seed):
    config = ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = Llama3(config, rngs=nnx.Rngs(seed))
    # tunix initializes the kernels of the MLPs with zeros, so their gradients would be zero.
    keys = iter(jax.random.split(jax.random.key(seed), 3 * config.num_layers))
    state = nnx.state(model, nnx.Param)
    nnx.update(
        model,
        jax.tree.map(
            lambda leaf: leaf if leaf.any() else jax.random.normal(next(keys), leaf.shape) / len(leaf) ** 0.5, state
        ),
    )
    return model


def sequences(rng, number, length=12):
    """Sequences of tokens that count from a random token in steps of 1 or 2. The tokens 0, 1 and 2 are special."""
    first, step = rng.integers(0, VOCABULARY, (number, 1)), rng.integers(1, 3, (number, 1))
    return 3 + (first + step * np.arange(length)) % (VOCABULARY - 3)


def inputs_of(batch):
    mask = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


class Losses(hooks.TrainingHooks):
    """The losses of all training steps."""

    def __init__(self):
        self.values = []

    def on_train_start(self, *args):
        pass

    on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = on_train_start

    def on_train_step_end(self, trainer, step, loss):
        self.values.append(jax.device_get(loss))


class Tokenizer:
    """A tokenizer whose tokens are written as numbers."""

    def encode(self, text, **kwargs):
        return [int(word) for word in text.split()]

    def decode(self, ids, **kwargs):
        return " ".join(str(int(token)) for token in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2
