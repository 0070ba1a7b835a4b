"""`train_loop` of MaxText with a tiny Llama that memorizes one batch of random tokens."""

# /// trainer
# environment = "maxtext"
# python = "3.12"
# install = [
#     "jax<0.11", "maxtext==0.2.4", "aqtp", "datasets", "drjax", "flax", "grain", "jinja2", "ml-collections",
#     "ml-goodput-measurement", "omegaconf", "pathwaysutils", "pillow", "qwix", "sentencepiece", "sympy",
#     "tensorboardx", "tiktoken", "tokamax", "transformers",
# ]
# where = "`train.loss_fn = mp.loss(train.loss_fn)`, `optimizers.get_optimizer` returns `mp.optimizer`"
# ///

import json
import tempfile
from pathlib import Path

import maxtext
import optax
from _mode import Half, report
from flax import nnx
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

half = Half(optax.adamw(1e-3))
train.loss_fn = half.loss(train.loss_fn)
optimizers.get_optimizer = lambda *args: half.optimizer


def setup_train_loop(*args, setup=train.train_utils.setup_train_loop):
    results = setup(*args)
    states.append(results[-1])
    return results


states = []
train.train_utils.setup_train_loop = setup_train_loop  # records the module into which the final state is merged

with tempfile.TemporaryDirectory() as folder:
    settings = {
        "run_name": "test",
        "base_output_directory": folder,
        "metrics_file": f"{folder}/metrics",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "dataset_type": "synthetic",
        "attention": "dot_product",
        "dtype": "float32",
        "steps": 100,
        "per_device_batch_size": 4,
        "max_target_length": 16,
        "vocab_size": 64,
        "base_emb_dim": 32,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 2,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "head_dim": 16,
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config, recorder = train.initialize(["", str(base), *(f"{name}={value}" for name, value in settings.items())])
    state = train.train_loop(config, recorder)
    lines = Path(settings["metrics_file"]).read_text().splitlines()
losses = [json.loads(line)["learning/loss"] for line in lines]
nnx.update(states[0], state)
report("maxtext", losses, states[0].optimizer)
