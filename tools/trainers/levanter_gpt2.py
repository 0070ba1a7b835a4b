"""`Trainer` of levanter with a tiny GPT-2 that learns to count, and with two microbatches per step."""

# /// trainer
# environment = "levanter"
# install = [
#     "haliax>=1.4.dev453", "equinox", "jaxtyping", "draccus", "braceexpand", "jmp", "tensorstore", "pyarrow",
#     "pytimeparse", "humanfriendly", "safetensors", "tblib", "dataclasses-json", "async-lru", "tqdm-loggable",
#     "deepdiff", "lenses", "jinja2", "transformers<5", "wandb", "datasets<5", "zstandard", "matplotlib",
#     "pydantic<3", "gcsfs", "ray", "gitpython",
# ]
# without_dependencies = ["levanter @ git+https://github.com/marin-community/levanter"]
# where = "`Trainer(config, mp.optimizer, mp.loss(loss_fn))`"
# ///

import tempfile
from datetime import timedelta
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from _mode import Half, report
from levanter.checkpoint import CheckpointerConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample, compute_next_token_loss
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

half = Half(optax.adamw(1e-3))
folder = tempfile.mkdtemp()
config = TrainerConfig(
    id="test",
    tracker=NoopConfig(),
    log_dir=Path(folder),
    log_jaxprs=False,
    log_xla_hlo=False,
    train_batch_size=16,
    per_device_parallelism=8,
    num_train_steps=200,
    load_checkpoint=False,
    checkpointer=CheckpointerConfig(base_path=folder, save_interval=timedelta(days=1)),
)
model_config = Gpt2Config(seq_len=12, hidden_dim=32, num_layers=2, num_heads=4, attn_pdrop=0.0, embed_pdrop=0.0)
vocabulary = hax.Axis("vocab", 32)
batch_axis = hax.Axis("batch", 16)


def examples():
    rng = np.random.default_rng(0)
    while True:
        first, step = rng.integers(0, 32, (16, 1)), rng.integers(1, 3, (16, 1))
        tokens = np.asarray((first + step * np.arange(12)) % 32, np.int32)
        named = hax.named(jax.numpy.asarray(tokens), (batch_axis, model_config.Pos))
        yield hax.vmap(LmExample.causal, batch_axis)(named)


def loss_fn(model, example, *, key=None):
    # The trainer computes the mean, because jax 0.10 requires a boolean mask in `jnp.mean(where=...)`.
    return compute_next_token_loss(model, example, key=key, reduction=None)


losses = []
trainer = Trainer(config, half.optimizer, half.loss(loss_fn), add_default_hooks=False)
with trainer:
    state = trainer.initial_state(
        jax.random.PRNGKey(0), model_init=eqx.Partial(model_config.build, vocabulary, key=jax.random.PRNGKey(1))
    )
    for info in trainer.training_steps(state, examples()):
        losses.append(float(info.loss))
report("levanter", losses, info.state.opt_state)
