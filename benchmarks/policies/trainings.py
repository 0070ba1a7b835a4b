"""Small trainings in which a loss scale must not prevent learning.

The trainings have NaN gradients, gradients that are mostly zero, losses of several sizes, or a rare kind of batches
that needs a lower loss scale than all other batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.workloads.data import digits

_SEEDS = 3
_QUICK_TRAININGS = 7  # With this number, three of the trainings with a rare kind of batches are omitted.
_WIDTH = 64
_ARMS = 64

# For each way to train, the dtype of matmuls and the loss scale.
WAYS: dict[str, tuple[Any, Any]] = {
    "float32": (jnp.float32, None),
    "auto": (jnp.float16, "auto"),
    "dynamic": (jnp.float16, "dynamic"),
}


class Training(NamedTuple):
    """A training that runs in a single jitted `jax.lax.scan`.

    Attributes:
      steps: the number of steps.
      init: a function that returns the initial parameters for a random key.
      loss: a function of the parameters, the random key of the step and the number of the step.
      result: a function that returns a loss of the final parameters, so lower is better.
      learning_rate: the learning rate of Adam, whose updates do not depend on the unit of the loss.
      is_rare: a function that returns, for the random key of a step, whether its batch is of the rare kind.
    """

    steps: int
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array]
    result: Callable[[Any], jax.Array]
    learning_rate: float = 1e-3
    is_rare: Callable[[jax.Array], jax.Array] = lambda key: jnp.array(False)


def _mlp(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return jax.random.normal(first, (64, _WIDTH)) / 8, jax.random.normal(second, (_WIDTH, 10)) / 8


def _logits(params: Any, images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params[0]) @ params[1]


def _of_digits(
    loss: Callable[..., jax.Array], logits: Callable[..., jax.Array] = _logits, steps: int = 4000
) -> Training:
    images, labels = map(jnp.asarray, digits())

    def entropy(params: Any, chosen: jax.Array) -> jax.Array:
        values = logits(params, images[chosen])
        return optax.softmax_cross_entropy_with_integer_labels(values, labels[chosen])

    def of_step(params: Any, key: jax.Array, step: jax.Array) -> jax.Array:
        return loss(partial(entropy, params), jax.random.randint(key, (32,), 0, len(labels)), params, step)

    return Training(steps, _mlp, of_step, lambda params: entropy(params, jnp.arange(len(labels))).mean())


def _one_zero_image(one_in: int) -> Training:
    """Return a training in which all gradients are NaN in one of ``one_in`` steps.

    The cause is the norm of a zero vector, which is not differentiable.
    """

    def loss(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
        first = jnp.where(step % one_in == one_in - 1, 0.0, 1.0) * params[0][0]
        return entropy(chosen).mean() + 1e-3 * jnp.linalg.norm(first)

    return _of_digits(loss)


def _masked(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
    """Return the loss of every tenth batch, and zero for all other batches."""
    return jnp.where(step % 10 == 9, entropy(chosen).mean(), 0.0)


def _curriculum(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
    """Return a loss whose unit changes during the training: 1, then 2^-20, then 2^12."""
    return jnp.array([1.0, 2.0**-20, 2.0**12])[step // 1334] * entropy(chosen).mean()


def _bandit() -> Training:
    """Return a training with REINFORCE, in which only one of 64 arms has a reward.

    The gradients of all other pulls are exactly zero.
    """

    def chances(params: jax.Array) -> jax.Array:
        return jax.nn.log_softmax((jnp.eye(_ARMS) @ params)[0])

    def loss(params: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        arm = jax.random.categorical(key, jax.lax.stop_gradient(chances(params)))
        return -chances(params)[arm] * jnp.where(arm == 7, 1.0, 0.0)

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (_ARMS, _ARMS)) / 8

    return Training(6000, init, loss, lambda params: 1 - jnp.exp(chances(params)[7]), learning_rate=1e-2)


def _rare_kind(one_in: int, log2_inputs: int, steps: int = 4000) -> Training:
    """Return a training in which one of ``one_in`` batches contains rotated digits, multiplied by ``2**log2_inputs``.

    The hidden layer is divided by its root mean square. In the rare batches, the derivative with respect to the hidden
    layer is therefore larger by a factor of ``2**-log2_inputs``, but the gradients of the parameters are not. The
    result is the loss on all rotated digits, which only the rare batches can lower.
    """
    images, labels = map(jnp.asarray, digits())
    rare_images = images[:, ::-1] * 2.0**log2_inputs

    def entropy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = images @ params[0]
        hidden = hidden / jnp.sqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-20)
        values = jax.nn.relu(hidden) @ params[1]
        return optax.softmax_cross_entropy_with_integer_labels(values, labels).mean()

    def is_rare(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, 1), 1 / one_in)

    def of_step(params: Any, key: jax.Array, step: jax.Array) -> jax.Array:
        chosen = jax.random.randint(key, (32,), 0, len(labels))
        batch = jnp.where(is_rare(key), rare_images[chosen], images[chosen])
        return entropy(params, batch, labels[chosen])

    return Training(steps, _mlp, of_step, lambda params: entropy(params, rare_images, labels), is_rare=is_rare)


def all_trainings() -> dict[str, Training]:
    """Return all trainings by a description of their difficulty."""
    return {
        **{f"digits, NaN every {one_in}th step": _one_zero_image(one_in) for one_in in (200, 50, 30)},
        "digits, 9 of 10 batches masked out": _of_digits(_masked),
        "digits, losses of three sizes in turn": _of_digits(_curriculum),
        "bandit, one reward in 64": _bandit(),
        **{
            f"digits, 1 batch in {one_in} rotated and 2^{size}": _rare_kind(one_in, size)
            for one_in, size in ((50, -14), (50, -12), (100, -14), (100, -12))
        },
    }


def trained(training: Training, way: str, seeds: int = _SEEDS) -> np.ndarray:
    """Train from several seeds.

    Returns:
      ``float[4, seeds]``: the results, and the numbers of skipped steps, of rare batches, and of skipped rare batches.
    """
    dtype, loss_scale = WAYS[way]
    if loss_scale is None:  # Non-finite steps are skipped in float32 as well.
        loss_scale = jls.FixedLossScale(1, skip_nonfinite=True)
    tx = jls.loss_scaled(optax.adam(training.learning_rate), loss_scale)

    def of_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
        start, key = jax.random.split(jax.random.key(seed))

        def step(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            loss, of_step = jls.autocast(training.loss, dtype), jax.random.fold_in(key, number)
            value, grads = jls.value_and_scaled_grad(loss, state)(params, of_step, number)
            params, state = tx.update_and_apply(grads, state, params, value=value)
            is_rare = training.is_rare(of_step)
            return (params, state), jnp.array([is_rare, is_rare & (state.consecutive_skips > 0)])

        params = training.init(start)
        (params, state), rare = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(training.steps))
        return training.result(params), state.skipped_steps, *jnp.sum(rare, axis=0)

    return np.array([jax.jit(of_seed)(seed) for seed in range(seeds)]).T


def trainings(quick: bool, progress: Progress) -> Table:
    """Return a table with the result of each training.

    The marks allow `AutoLossScale` to be worse than the other loss scales by the standard deviation over the seeds plus
    0.01.
    """
    rows: list[list[Cell]] = []
    marks = []
    every = dict(list(all_trainings().items())[: _QUICK_TRAININGS if quick else None])
    for number, (name, training) in enumerate(every.items()):
        progress(number / len(every), name)
        results = {way: trained(training, way, 1 if quick else _SEEDS) for way in WAYS}
        ends = {way: result.mean() for way, (result, *_) in results.items()}
        noise = max(result.std() for result, *_ in results.values()) + 0.01
        skipped, rare, skipped_rare = ([result[row].mean() for result in results.values()] for row in (1, 2, 3))
        rows.append([name, *ends.values(), *skipped, rare[0], *skipped_rare[1:]])
        beyond = float(ends["auto"] - max(ends["float32"], ends["dynamic"]))
        marks.append(Mark(f"auto, {name}: loss above float32 and dynamic, less noise", beyond - float(noise), 0.0))
        if rare[0]:
            more = float(skipped_rare[1] - skipped_rare[2])
            marks.append(Mark(f"auto, {name}: skipped rare batches, more than with dynamic", more, 2.0))
    heads = ["training", *(f"{way}: loss {{:.4f}}" for way in WAYS), *(f"{way}: skipped {{:.0f}}" for way in WAYS)]
    heads += ["rare {:.0f}", "auto: skipped rare {:.0f}", "dynamic: skipped rare {:.0f}"]
    seeds = "1 seed" if quick else f"{_SEEDS} seeds"
    note = (
        f"Means over {seeds}. The loss is the loss on all digits, or on all rotated digits. For the bandit, it is 1 "
        "minus the probability of the arm with the reward. The last three columns are the number of rare batches, and "
        "how many of them are skipped."
    )
    return Table("Trainings under the default loss scale", columns(" | ".join(heads)), rows, marks, (note,), quick)
