"""Reinforcement learning as for language models (GRPO), in float16, and the reason for float16.

A small transformer reads digits and writes them in sorted order. Its reward is the fraction of correct positions. As
in the training of language models, two programs compute the same policy:

- The sampler generates one token at a time, with a cache of the keys and values of earlier tokens. Like fast kernels,
  its attention divides by the sum of the softmax at the end.
- The trainer processes complete sequences, and its attention divides by this sum first.

Both are written in float32, and `jls.autocast` computes their matrix multiplications in ``--dtype``. Because of
rounding, their policies differ: the trainer optimizes a policy that is slightly different from the policy that
sampled. Each sample is used for training once, so without rounding the probabilities of its tokens would be equal.
The difference of their logarithms is measured at every step. No importance weights correct this mismatch.

``--compare --seeds 4`` trains in all three dtypes, which takes several minutes on two CPU cores. The error of the
log-probability of a token is 4e-8 in float32, 1.2e-3 in bfloat16 and 1.5e-4 in float16. Float16 has three bits more
than bfloat16, so its error is 8 times smaller.

In this example, the reward is not affected: the final reward is 0.995 to 0.998 in each dtype, for each of four seeds.
An answer has four tokens, so the error of the probability of a complete answer is less than 1 % in bfloat16. The
errors of all tokens add up, and an answer of a language model has thousands of tokens.

References:
  Shao et al., DeepSeekMath, 2024, arXiv 2402.03300 (GRPO).
  Qi et al., Defeating the Training-Inference Mismatch via FP16, 2025, arXiv 2510.26788.
"""

from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls

DIGITS, PROMPT = 8, 4  # The digits are 0 to 7. A prompt and an answer have four digits each.
LENGTH = 2 * PROMPT
GROUPS, GROUP_SIZE = 8, 16  # number of prompts in a step, and of answers to each prompt
WIDTH, HEADS, LAYERS = 32, 4, 2


def init_params(key: jax.Array) -> Any:
    """Return the float32 parameters of the policy."""
    head = WIDTH // HEADS
    shapes = {"query": (WIDTH, HEADS, head), "key": (WIDTH, HEADS, head), "value": (WIDTH, HEADS, head)}
    shapes |= {"output": (HEADS, head, WIDTH), "expand": (WIDTH, 4 * WIDTH), "contract": (4 * WIDTH, WIDTH)}
    tree = {
        "tokens": (DIGITS, WIDTH),
        "places": (LENGTH, WIDTH),
        "readout": (WIDTH, DIGITS),
        "layers": [shapes] * LAYERS,
    }
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    draws = [jax.random.normal(key, shape) / WIDTH**0.5 for key, shape in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, draws)


def empty_cache(batch: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return an empty cache of keys and values for each layer."""
    nothing = jnp.zeros((batch, LENGTH, HEADS, WIDTH // HEADS))
    return [(nothing, nothing)] * LAYERS


def norm(x: jax.Array) -> jax.Array:
    """Return ``x`` divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attend_as_trainer(scores: jax.Array, values: jax.Array) -> jax.Array:
    """Return the attention output. The weights are divided by their sum before they are multiplied by the values."""
    return jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), values)


def attend_as_sampler(scores: jax.Array, values: jax.Array) -> jax.Array:
    """Return the attention output. The sum of the weighted values is divided by the sum of the weights."""
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.einsum("bhnm,bmhd->bnhd", weights, values) / total


def policy(params: Any, tokens: jax.Array, cache: Any, start: Any, attend: Any) -> tuple[jax.Array, Any]:
    """Return the log-probabilities ``[batch, n, digits]`` of the next tokens, and the updated cache.

    Args:
      params: the parameters of the policy.
      tokens: ``int32[batch, n]``, the tokens at the positions from ``start`` on.
      cache: the keys and values of the tokens before ``start``.
      start: the position of the first token.
      attend: the function that computes the attention output.
    """
    places = start + jnp.arange(tokens.shape[1])
    is_visible = jnp.arange(LENGTH)[None, :] <= places[:, None]
    x = params["tokens"][tokens] + params["places"][places][None]
    new_cache = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        query, key, value = (jnp.einsum("bnw,whd->bnhd", norm(x), layer[name]) for name in ("query", "key", "value"))
        keys = jax.lax.dynamic_update_slice(keys, key, (0, start, 0, 0))
        values = jax.lax.dynamic_update_slice(values, value, (0, start, 0, 0))
        scores = jnp.einsum("bnhd,bmhd->bhnm", query / query.shape[-1] ** 0.5, keys)
        attended = attend(jnp.where(is_visible[None, None], scores, -jnp.inf), values)
        x = x + jnp.einsum("bnhd,hdw->bnw", attended, layer["output"])
        x = x + jax.nn.silu(norm(x) @ layer["expand"]) @ layer["contract"]
        new_cache.append((keys, values))
    return jax.nn.log_softmax(norm(x) @ params["readout"]), new_cache


def of_tokens(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probabilities ``[batch, n]`` of the given tokens."""
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def sample(params: Any, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return answers ``int32[batch, PROMPT]``, generated one token at a time, and their log-probabilities."""

    def write(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        log_probs, cache, place = carry
        tokens = jax.random.categorical(key, log_probs)
        next_log_probs, cache = policy(params, tokens[:, None], cache, place, attend_as_sampler)
        return (next_log_probs[:, -1], cache, place + 1), (tokens, of_tokens(log_probs, tokens))

    log_probs, cache = policy(params, prompts, empty_cache(len(prompts)), 0, attend_as_sampler)
    _, written = jax.lax.scan(write, (log_probs[:, -1], cache, PROMPT), jax.random.split(key, PROMPT))
    return written[0].T, written[1].T


def loss_fn(params: Any, prompts: jax.Array, sampled: Any, advantages: jax.Array) -> Any:
    """Return the loss of the policy gradient with the advantages of GRPO, and the log-probabilities of the trainer.

    Each sample is used once, and the trainer assumes that its policy has generated the sample. Therefore, the ratio of
    the probabilities is 1, and no importance weight corrects the mismatch.
    """
    tokens = jnp.concatenate([prompts, sampled[0]], axis=1)
    log_probs, _ = policy(params, tokens, empty_cache(len(tokens)), 0, attend_as_trainer)
    log_probs = of_tokens(log_probs[:, PROMPT - 1 : -1], sampled[0])
    return -jnp.mean(log_probs * advantages), log_probs


def train(dtype: Any, seeds: jax.Array, steps: int) -> dict[str, np.ndarray]:
    """Train with several seeds in parallel, and return measurements of shape ``[steps, seeds]``."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(3e-3, 0.0, steps)))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @jax.jit
    @jax.vmap
    def begin(seed: jax.Array) -> Any:
        params = init_params(jax.random.key(seed))
        return params, tx.init(params), jax.random.split(jax.random.key(seed + 1), steps)

    @jax.jit
    @jax.vmap
    def sample_step(params: Any, key: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        prompt_key, answer_key = jax.random.split(key)
        prompts = jax.random.randint(prompt_key, (GROUPS, PROMPT), 0, DIGITS).repeat(GROUP_SIZE, axis=0)
        sampled = jls.autocast(sample, dtype)(params, prompts, answer_key)
        return prompts, sampled, jnp.mean(sampled[0] == jnp.sort(prompts), axis=1)

    @jax.jit
    @jax.vmap
    def train_step(params: Any, opt_state: Any, prompts: jax.Array, sampled: Any, rewards: jax.Array) -> Any:
        grouped = rewards.reshape(GROUPS, GROUP_SIZE)
        advantages = grouped - grouped.mean(axis=1, keepdims=True)
        advantages = (advantages / (grouped.std(axis=1, keepdims=True) + 1e-3)).reshape(-1, 1)
        grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state, has_aux=True)
        (loss, log_probs), grads = grad_fn(
            params, prompts, sampled, advantages
        )  # the true loss, and gradients of S * loss
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        differences = log_probs - sampled[1]
        weights = jnp.exp(jnp.sum(differences, axis=1))  # importance weights, which are only measured
        measured = {"mismatch": jnp.mean(jnp.abs(differences)), "weights": jnp.sqrt(jnp.mean((weights - 1) ** 2))}
        return params, opt_state, {"reward": rewards.mean(), **measured, **jls.metrics(opt_state)}

    params, opt_state, keys = begin(seeds)
    history = []
    for step in track(range(steps), jnp.dtype(dtype).name, console=Console(stderr=True)):
        prompts, sampled, rewards = sample_step(params, keys[:, step])
        params, opt_state, metrics = train_step(params, opt_state, prompts, sampled, rewards)
        history.append(metrics)
    return {name: np.stack([metrics[name] for metrics in history]) for name in history[0]}


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=800, figure="reward, mismatch and loss scale")
    parser.add_argument(
        "--seeds", type=command_line.at_least(1), default=1, metavar="N", help="number of seeds (default: 1)"
    )
    parser.add_argument("--compare", action="store_true", help="train in all three dtypes")
    options = parser.parse_args(arguments)

    seeds = options.seed + jnp.arange(options.seeds)
    dtypes = command_line.DTYPES if options.compare else [options.dtype]
    histories = {dtype: train(dtype, seeds, options.steps) for dtype in dtypes}
    if options.figure:
        save_figure(options.figure, histories)
    last = slice(-max(1, options.steps // 10), None)
    for dtype, history in histories.items():
        if options.compare:
            print(f"\nmatrix multiplications in {dtype}")
        rewards = history["reward"][last].mean(axis=0)
        print(f"reward: {rewards.mean():.4f}")
        if options.seeds > 1:
            print(f"reward of the worst seed: {rewards.min():.4f}")
            print(f"reward of the best seed: {rewards.max():.4f}")
        print(f"mismatch of log-probabilities: {history['mismatch'].mean():.2e}")
        print(f"error of the probability of an answer: {history['weights'].mean():.2e}")
        print(f"loss scale: {history['loss_scale'][-1, 0]:.0f}")
        print(f"skipped steps: {history['skipped_steps'][-1].sum()} of {options.steps * options.seeds}")


def save_figure(path: Path, histories: dict[str, dict[str, np.ndarray]]) -> None:
    """Draw the mean and the range of reward and mismatch over the seeds, and the loss scale of the last run."""
    figure = Figure(figsize=(6.4, 5), layout="constrained")
    reward, mismatch, loss_scale = figure.subplots(3, sharex=True)
    for dtype, history in histories.items():
        steps = np.arange(len(history["reward"]))
        for axes, name in (reward, "reward"), (mismatch, "mismatch"):
            axes.plot(steps, history[name].mean(axis=1), label=dtype)
            axes.fill_between(steps, *(f(history[name], axis=1) for f in (np.min, np.max)), alpha=0.2, lw=0)
    reward.set_title("reward", loc="left")
    reward.legend(loc="lower right")
    mismatch.set_title("mismatch of log-probabilities", loc="left")
    mismatch.set_yscale("log")
    skipped = history["consecutive_skips"][:, 0] > 0
    jls.plotting.plot_loss_scale(history["loss_scale"][:, 0], skipped, ax=loss_scale)
    figure.savefig(path)


if __name__ == "__main__":
    main()
