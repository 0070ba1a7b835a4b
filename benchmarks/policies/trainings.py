"""Trainings that a loss scale must not lose: NaN now and then, gradients that are mostly zero, losses of many sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls
from benchmarks.isolation import Progress
from benchmarks.report import Cell, Mark, Table, columns
from benchmarks.workloads.data import digits

_SEEDS = 3
_WIDTH = 64
_ARMS = 64

# By name: the dtype of the products, and the loss scale.
WAYS: dict[str, tuple[Any, Any]] = {
    "float32": (jnp.float32, None),
    "auto": (jnp.float16, "auto"),
    "dynamic": (jnp.float16, "dynamic"),
}


class Training(NamedTuple):
    """What is trained, in one jitted scan.

    Attributes:
      steps: how many.
      init: from a key, the parameters.
      loss: of parameters, the step's key and its number.
      result: of the parameters, what counts in the end: a loss, the less the better.
      learning_rate: Adam's, to which the size of a loss makes no difference.
    """

    steps: int
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array]
    result: Callable[[Any], jax.Array]
    learning_rate: float = 1e-3


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
    """The norm of a vector has no derivative at zero: in every so manyth step all gradients are NaN."""

    def loss(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
        first = jnp.where(step % one_in == one_in - 1, 0.0, 1.0) * params[0][0]
        return entropy(chosen).mean() + 1e-3 * jnp.linalg.norm(first)

    return _of_digits(loss)


def _masked(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
    return jnp.where(step % 10 == 9, entropy(chosen).mean(), 0.0)


def _curriculum(entropy: Any, chosen: jax.Array, params: Any, step: jax.Array) -> jax.Array:
    """Phases whose losses are of other units: 1, 2^-20, 2^12."""
    return jnp.array([1.0, 2.0**-20, 2.0**12])[step // 1334] * entropy(chosen).mean()


def _bandit() -> Training:
    """REINFORCE: one arm of 64 has a reward; every other pull has a gradient of exactly zero."""

    def chances(params: jax.Array) -> jax.Array:
        return jax.nn.log_softmax((jnp.eye(_ARMS) @ params)[0])

    def loss(params: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        arm = jax.random.categorical(key, jax.lax.stop_gradient(chances(params)))
        return -chances(params)[arm] * jnp.where(arm == 7, 1.0, 0.0)

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (_ARMS, _ARMS)) / 8

    return Training(6000, init, loss, lambda params: 1 - jnp.exp(chances(params)[7]), learning_rate=1e-2)


def all_trainings() -> dict[str, Training]:
    """By what is difficult in them."""
    return {
        **{f"digits, NaN every {one_in}th step": _one_zero_image(one_in) for one_in in (200, 50, 30)},
        "digits, 9 of 10 batches masked out": _of_digits(_masked),
        "digits, losses of three sizes in turn": _of_digits(_curriculum),
        "bandit, one reward in 64": _bandit(),
    }


def trained(training: Training, way: str, seeds: int = _SEEDS) -> np.ndarray:
    """The result and the number of skipped steps: ``float[2, seeds]``."""
    dtype, loss_scale = WAYS[way]
    if loss_scale is None:  # what is not finite is skipped in float32, too
        loss_scale = jls.FixedLossScale(1, skip_nonfinite=True)
    tx = jls.loss_scaled(optax.adam(training.learning_rate), loss_scale)

    def of_seed(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        start, key = jax.random.split(jax.random.key(seed))

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            loss = jls.autocast(training.loss, dtype)
            value, grads = jls.value_and_scaled_grad(loss, state)(params, jax.random.fold_in(key, number), number)
            return tx.update_and_apply(grads, state, params, value=value), None

        params = training.init(start)
        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(training.steps))
        return training.result(params), state.skipped_steps

    return np.array([jax.jit(of_seed)(seed) for seed in range(seeds)]).T


def trainings(quick: bool, progress: Progress) -> Table:
    """Where each training ends; `AutoLossScale` may be worse than the others by what seeds differ, and a hundredth."""
    rows: list[list[Cell]] = []
    marks = []
    every = all_trainings()
    for number, (name, training) in enumerate(every.items()):
        progress(number / len(every), name)
        results = {way: trained(training, way, 1 if quick else _SEEDS) for way in WAYS}
        ends = {way: result.mean() for way, (result, _) in results.items()}
        noise = max(result.std() for result, _ in results.values()) + 0.01
        rows.append([name, *ends.values(), *(skipped.mean() for _, skipped in results.values())])
        beyond = float(ends["auto"] - max(ends["float32"], ends["dynamic"]))
        marks.append(Mark(f"auto, {name}: loss above float32 and dynamic, less noise", beyond - float(noise), 0.0))
    heads = ["training", *(f"{way}: loss {{:.4f}}" for way in WAYS), *(f"{way}: skipped {{:.0f}}" for way in WAYS)]
    seeds = "1 seeds" if quick else f"{_SEEDS} seeds"
    note = f"The mean of {seeds}. The loss on all digits; of the bandit, 1 - the chance of the arm."
    return Table("Trainings under the default loss scale", columns(" | ".join(heads)), rows, marks, (note,), quick)
