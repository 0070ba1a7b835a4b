"""Reinforcement learning for a language model with tunix (GRPO): three lines add float16 and a loss scale.

A small Llama 3 with random parameters learns to count. A prompt consists of random digits. The reward is the fraction
of the digits in the completion that are one larger than the digit before, where 0 follows 9. For example, the
completion "78901234" of the prompt "2296" has the reward 1. The MLPs of the model do not learn, because tunix
initializes their kernels with zeros, so their gradients are zero.

tunix computes the gradients and applies the optimizer itself, so `jls.MixedPrecision` shares the loss scale between the
loss function and the optimizer. The model is also wrapped with `jls.autocast`, because tunix calls the model in three
places: in the loss function, in the sampler, which generates one token at a time with a cache, and in the computation
of the reference model's log-probabilities, which this program does not need. If only the loss function were wrapped,
the sampler would compute in float32, and its log-probabilities would differ from those of the trainer. This mismatch is
measured after training. With seed 0 and float16, it is 1.4e-7. Without the line that wraps the model, it is 6e-6.

Reference:
  Shao et al., DeepSeekMath, 2024, arXiv 2402.03300 (GRPO).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import jax_lossscale as jls

DIGITS = "0123456789"
PROMPT, COMPLETION = 4, 8  # number of digits
GROUPS, GROUP_SIZE = 8, 8  # number of prompts in a step, and of completions of each prompt
TESTS = 64  # number of prompts after training


class Tokenizer:
    """A tokenizer with one token for each digit, and three special tokens."""

    special = ("<pad>", "<bos>", "<eos>")
    tokens = (*special, *DIGITS)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the tokens of a text that consists of digits."""
        return [self.tokens.index(character) for character in text]

    def decode(self, ids: Any, **_: Any) -> str:
        """Return the text, with the names of the special tokens."""
        return "".join(self.tokens[token] for token in ids)

    def pad_id(self) -> int:
        """Return the token that fills up short sequences."""
        return 0

    def bos_id(self) -> int:
        """Return the first token of each prompt."""
        return 1

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return 2


def counted(prompt: str, completion: str) -> float:
    """Return the fraction of the requested digits that are one larger than the digit before."""
    text = prompt[-1] + completion
    return sum(last + digit in "01234567890" for last, digit in itertools.pairwise(text)) / COMPLETION


def random_prompts(random: np.random.Generator, number: int) -> np.ndarray:
    """Return an array of prompts."""
    return np.array(["".join(random.choice(list(DIGITS), PROMPT)) for _ in range(number)])


def batches(rollout_config: RolloutConfig, steps: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the prompts of each step, and set the random key of its completions."""
    random = np.random.default_rng(seed)
    for key in jax.random.split(jax.random.key(seed), steps):
        rollout_config.seed = key  # Otherwise, tunix would use the same random numbers in each step.
        yield {"prompts": random_prompts(random, GROUPS)}


def train(dtype: str, steps: int, seed: int) -> tuple[RLCluster, jls.MixedPrecision, list[dict[str, Any]]]:
    """Train the model, and return the objects of the run, and the reward and the metrics of each step."""
    # This is the first of the three lines that add float16.
    Llama3.__call__ = jls.autocast(Llama3.__call__, dtype)  # in the sampler and in the loss function
    model_config = ModelConfig(
        num_layers=2,
        vocab_size=len(Tokenizer.tokens),
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    rollout_config = RolloutConfig(
        max_tokens_to_generate=COMPLETION, max_prompt_length=8, kv_cache_size=16, temperature=1.0, return_logprobs=True
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    # To store the moments of Adam in bfloat16, use `jls.half_precision_state(optimizer)` instead of `optimizer`.
    # The second line, `mp = jls.MixedPrecision(optimizer)`. Only float16 needs a loss scale.
    mp = jls.MixedPrecision(optimizer, jls.loss_scale_for(dtype), dtype=dtype)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cluster = RLCluster(
        actor=Llama3(model_config, rngs=nnx.Rngs(seed)),
        tokenizer=Tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            training_config=RLTrainingConfig(
                actor_optimizer=mp.optimizer, max_steps=steps, eval_every_n_steps=steps + 1
            ),
            rollout_config=rollout_config,
        ),
    )
    trainer, history = cluster.actor_trainer, []

    def reward_fn(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards = list(map(counted, prompts, completions))
        history.append({"reward": np.mean(rewards), **jax.device_get(jls.metrics(trainer.optimizer.opt_state))})
        return rewards

    # With `beta=0`, no reference model is needed.
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=GROUP_SIZE, beta=0.0), reward_fn)
    trainer.with_loss_fn(mp.loss(trainer.loss_fn), has_aux=True)  # the third line, after the learner is created
    prompts = batches(rollout_config, steps, seed)
    learner.train(track(prompts, f"matmuls in {dtype}", total=steps, console=Console(stderr=True)))
    return cluster, mp, history


def mismatch(cluster: RLCluster, mp: jls.MixedPrecision) -> float:
    """Return the mean difference between the log-probabilities of the sampler and those of the trainer."""
    cluster.cluster_config.rollout_config.seed = jax.random.key(0)  # The sampler donated the previous key.
    sampled = cluster.generate(list(random_prompts(np.random.default_rng(0), TESTS)))
    # Short completions are filled up with the token <pad>, which is 0.
    tokens = np.zeros((TESTS, COMPLETION), np.int32)
    of_sampler = np.zeros(tokens.shape)
    for row, (completion, log_probs) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        tokens[row, : len(completion)], of_sampler[row, : len(completion)] = completion, log_probs

    def log_probs_fn(prompts: jax.Array, completions: jax.Array) -> jax.Array:
        graph, state = nnx.split(cluster.actor_trainer.model)
        return compute_per_token_logps(graph, state, prompts, completions, pad_id=0, eos_id=2, temperature=1.0)

    of_trainer = mp.loss(log_probs_fn)(jnp.array(sampled.left_padded_prompt_tokens), jnp.array(tokens))
    return np.abs(of_trainer - of_sampler)[tokens > 0].mean()


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    options = command_line.make_parser(__doc__, steps=300, figure="reward and loss scale").parse_args(arguments)
    cluster, mp, history = train(options.dtype, options.steps, options.seed)
    metrics = jls.metrics(cluster.actor_trainer.optimizer.opt_state)

    if options.figure:
        save_figure(options.figure, history)
    print(f"reward: {np.mean([step['reward'] for step in history[-max(1, options.steps // 10) :]]):.4f}")
    print(f"mismatch of log-probabilities: {mismatch(cluster, mp):.2e}")
    print(f"loss scale: {metrics['loss_scale']:.0f}")
    print(f"skipped steps: {metrics['skipped_steps']} of {options.steps}")


def save_figure(path: Path, history: list[dict[str, Any]]) -> None:
    """Draw the reward and the loss scale."""
    figure = Figure(layout="constrained")
    reward, loss_scale = figure.subplots(2, sharex=True)
    reward.plot([step["reward"] for step in history])
    reward.set_title("reward", loc="left")
    skipped = [step["consecutive_skips"] > 0 for step in history]
    jls.plotting.plot_loss_scale([step["loss_scale"] for step in history], skipped, ax=loss_scale)
    figure.savefig(path)


if __name__ == "__main__":
    main()
