"""Regressions: a differential equation, word embeddings, photographs, and losses in small units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.workloads import data
from benchmarks.workloads.layers import init_mlp, mean_square, mlp
from benchmarks.workloads.workload import Workload, adam, evaluation_key, loss_on, without_statistics

_NEGATIVES = 4  # the number of negative samples for each neighbor
_WINDOW = 4  # the largest distance between neighbors in words
_PATCH, _COARSE = 16, 4  # pixels
_EPSILON = 1e-8  # The epsilon of Adam for a loss in the usual unit.


def pinn(*, width: int = 48, depth: int = 3, points: int = 128, steps: int = 2500) -> Workload:
    """Return a workload with a physics-informed network for Poisson's equation on a square.

    The equation is ``-laplace(u) = f``, where ``f`` is chosen such that ``u = sin(pi x) sin(pi y)``. The loss contains
    second derivatives of the network. The network is multiplied by a polynomial that is 0 at the boundary, because
    ``u`` is 0 there. The residual is divided by the largest value of ``f``.
    """
    largest_source = 2 * jnp.pi**2

    def draw_many(key: jax.Array, count: int) -> jax.Array:
        return jax.random.uniform(key, (count, 2))

    def loss(params: Any, places: jax.Array, dtype: DTypeLike) -> jax.Array:
        params = jls.cast_floating(params, dtype)

        def solution(places: jax.Array) -> jax.Array:
            return mlp(params, 2 * places - 1, jnp.tanh) * (4 * places * (1 - places)).prod(1, keepdims=True)

        laplacian = _laplacian(solution, places.astype(dtype)).astype(jnp.float32)
        return mean_square(laplacian / largest_source + jnp.sin(jnp.pi * places).prod(1, keepdims=True))

    init = partial(init_mlp, sizes=(2, *[width] * depth, 1))
    draw, evaluate = partial(draw_many, count=points), loss_on(loss, lambda: draw_many(evaluation_key(), 4096))
    return without_statistics(steps, adam(5e-3, steps), init, draw, loss, evaluate)


def embeddings(*, vocabulary: int = 2000, width: int = 64, batch: int = 1024, steps: int = 400) -> Workload:
    """Return a workload with word embeddings of Python source text: skip-gram with negative samples."""
    words = jnp.asarray(data.words(1_000_000, vocabulary))

    def init(key: jax.Array) -> Any:
        here, there = jax.random.split(key)
        return {
            "words": 0.1 * jax.random.normal(here, (vocabulary, width)),
            "neighbours": 0.1 * jax.random.normal(there, (vocabulary, width)),
        }

    def draw_many(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        where, distance, negatives = jax.random.split(key, 3)
        place = jax.random.randint(where, (count, 1), 0, len(words) - _WINDOW)
        neighbour = words[place + jax.random.randint(distance, (count, 1), 1, _WINDOW + 1)]
        others = words[jax.random.randint(negatives, (count, _NEGATIVES), 0, len(words))]
        return words[place[:, 0]], jnp.concatenate([neighbour, others], axis=1)

    def loss(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
        word, candidates = batch
        params = jls.cast_floating(params, dtype)
        logits = jnp.einsum("bw,bcw->bc", params["words"][word], params["neighbours"][candidates])
        signs = jnp.where(jnp.arange(1 + _NEGATIVES) == 0, 1.0, -1.0)[None]
        return -jax.nn.log_sigmoid(signs * logits.astype(jnp.float32)).sum(-1).mean()

    draw, evaluate = partial(draw_many, count=batch), loss_on(loss, lambda: draw_many(evaluation_key(), 16384))
    return without_statistics(steps, adam(1e-2, steps), init, draw, loss, evaluate)


def many_outputs(*, width: int = 192, batch: int = 128, steps: int = 400) -> Workload:
    """Return a workload that enlarges patches of photographs from 4 x 4 to 16 x 16 pixels.

    The network has 768 outputs, and the loss is the mean over all of them.
    """
    patches = jnp.asarray(data.photograph_patches(_PATCH))
    blocks = patches.reshape(-1, _COARSE, _PATCH // _COARSE, _COARSE, _PATCH // _COARSE, 3)
    coarse = blocks.mean((2, 4), keepdims=True)
    inputs = coarse.reshape(len(patches), -1)
    targets = (blocks - coarse).reshape(len(patches), -1)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = jax.random.randint(key, (batch,), 0, len(patches))
        return inputs[chosen], targets[chosen]

    init = partial(init_mlp, sizes=(inputs.shape[1], width, width, targets.shape[1]))
    loss, evaluate = _square_error, loss_on(_square_error, lambda: (inputs, targets))
    return without_statistics(steps, adam(3e-3, steps), init, draw, loss, evaluate)


def tiny_loss(*, width: int = 64, batch: int = 128, steps: int = 600, log2_unit: int = -33) -> Workload:
    """Return a workload that predicts the upper half of a digit from its lower half.

    The loss is in a small unit, such as the unit of a physical quantity.
    """
    draw, everything, init = _halves(width, batch)
    unit = 2.0**log2_unit

    def loss(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
        return _square_error(params, batch, dtype) * unit

    optimizer = adam(3e-3, steps, eps=_EPSILON * unit)  # Adam's epsilon has the unit of the gradients.
    return without_statistics(steps, optimizer, init, draw, loss, loss_on(_square_error, lambda: everything))


def two_branches(*, width: int = 64, batch: int = 128, steps: int = 600, log2_unit: int = -26) -> Workload:
    """Return a workload whose loss is the sum of the losses of two networks.

    The loss of the second network is in a small unit. The result is the error of the second network.
    """
    draw, everything, init = _halves(width, batch)
    unit = 2.0**log2_unit

    def init_both(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {"first": init(first), "second": init(second)}

    def loss(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
        first, second = (_square_error(params[name], batch, dtype) for name in ("first", "second"))
        return first + second * unit

    def evaluate(params: Any) -> jax.Array:
        return _square_error(params["second"], everything, jnp.float32)

    optimizer = adam(3e-3, steps, eps=_EPSILON * unit)
    return without_statistics(steps, optimizer, init_both, draw, loss, evaluate)


def _halves(width: int, batch: int) -> tuple[Callable[[jax.Array], Any], Any, Callable[[jax.Array], Any]]:
    """Return a function that draws a batch, the whole data set, and a function that initializes a network.

    The inputs are the lower halves of digits, and the targets are the upper halves.
    """
    lower, upper = jnp.split(jnp.asarray(data.digits()[0]), 2, axis=1)[::-1]

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = jax.random.randint(key, (batch,), 0, len(lower))
        return lower[chosen], upper[chosen]

    sizes = (lower.shape[1], width, width, upper.shape[1])
    return draw, (lower, upper), partial(init_mlp, sizes=sizes)


def _square_error(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
    inputs, targets = batch
    outputs = mlp(jls.cast_floating(params, dtype), inputs.astype(dtype), jax.nn.silu)
    return mean_square(outputs.astype(jnp.float32) - targets)


def _laplacian(function: Callable[[jax.Array], jax.Array], places: jax.Array) -> jax.Array:
    """Return the Laplacian of ``function`` at each row of ``places``, by forward-over-forward differentiation."""

    def second_derivative(direction: jax.Array) -> jax.Array:
        along = jnp.broadcast_to(direction, places.shape)

        def first(places: jax.Array) -> jax.Array:
            return jax.jvp(function, (places,), (along,))[1]

        return jax.jvp(first, (places,), (along,))[1]

    return jax.vmap(second_derivative)(jnp.eye(places.shape[1], dtype=places.dtype)[:, None]).sum(0)
