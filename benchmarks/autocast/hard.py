"""Losses that are difficult in float16, and whose gradients show which code rounds well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.autocast.gradients import SCALES
from benchmarks.autocast.models import Model
from benchmarks.optimizer.peers import Loss

_Cast = Callable[[Any], Any]
_TOO_FAR = 17, 0  # 2^-25 is e^-17.3: what is less is zero in float16, and `autocast` says so


def cases() -> dict[str, Model]:
    """Return all cases by name.

    With manual casts, each case casts the operands of matmuls, and computes everything else in float32.
    """
    leads = [(lead, mean) for lead in (0, 4, 8, 12) for mean in (0, 3, 10)] + [_TOO_FAR]
    return {
        **{_attends(lead, mean): attention(lead, mean) for lead, mean in leads},
        "attention to 100,000 keys": attention(0, 0, queries=4, keys=100_000),
        "attention, causal: one key in the first row": attention(0, 3, is_causal=True),
        "relu of 1e-3, and past it": _model(_relu, {"w": (64, 64), "v": (64, 64)}, {"x": (32, 64)}, 1e-3),
        "relu of 1e-7, and past it": _model(_relu, {"w": (64, 64), "v": (64, 64)}, {"x": (32, 64)}, 1e-7),
        "a stream of 1e4, updates of 1e-3": _model(_stream, {"w": (64, 64), "v": (64, 64)}, {"x": (32, 64)}, 1.0),
        "a bias over 50,000 rows": _model(_bias, {"w": (32, 32), "bias": (32,)}, {"x": (50_000, 32)}, 1.0),
    }


def is_said(name: str) -> bool:
    """Return whether `docs/guide/autocast.md` states that this case is worse than manual casts."""
    return name == _attends(*_TOO_FAR)


def _attends(lead: float, mean: float) -> str:
    return f"attention: a logit leads by {lead}, values around {mean}"


def errors(model: Model, ways: Mapping[str, Callable[[Model], Loss]]) -> tuple[str, dict[str, float]]:
    """Return the parameter with the worst gradient relative to the first way, and its error for each way.

    The errors are relative to float64: the norm of the difference, divided by the norm, at the best loss scale in
    `SCALES`.
    """
    params, batch = model.params(), model.batch(0)
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(model.loss(None)))(*jax.tree.map(lambda x: np.asarray(x, np.float64), (params, batch)))
        exact = jax.tree.map(np.asarray, exact)

    def of(loss: Loss) -> dict[str, float]:
        grad = jax.jit(jax.grad(lambda params, batch, scale: loss(params, batch) * scale))
        found = [(scale, jax.tree.map(np.asarray, grad(params, batch, scale))) for scale in SCALES]
        return {
            name: min((_distance(grads[name] / scale, exact[name]) for scale, grads in found), default=np.inf)
            for name in exact
        }

    found = {way: of(make(model)) for way, make in ways.items()}
    first, second, *_ = found
    worst = max(exact, key=lambda name: found[second][name] / found[first][name])
    return worst, {way: each[worst] for way, each in found.items()}


def attention(lead: float, mean: float, queries: int = 64, keys: int = 64, *, is_causal: bool = False) -> Model:
    """Return a model with attention in which one logit of each query is increased by ``lead``.

    The mean of the values is ``mean``.
    """

    def function(cast: _Cast, params: Any, batch: Any) -> jax.Array:
        q, k, v = (cast(params[name]) for name in "qkv")
        logits = _f32(q @ k.T) / q.shape[1] ** 0.5 + lead * jnp.eye(queries, keys)
        if is_causal:
            logits = jnp.where(jnp.tril(jnp.ones((queries, keys), bool)), logits, -1e9)
        return (_f32(cast(jax.nn.softmax(logits)) @ v) * batch["weights"]).sum()

    model = _model(function, {"q": (queries, 64), "k": (keys, 64), "v": (keys, 64)}, {"weights": (queries, 64)}, 1.0)
    return model._replace(params=lambda: model.params() | {"v": model.params()["v"] + mean})


def _relu(cast: _Cast, params: Any, batch: Any) -> jax.Array:
    x = jax.nn.relu(batch["x"] + _f32(cast(batch["x"]) @ cast(params["w"] / 8)))
    return (x + _f32(cast(x) @ cast(params["v"] / 8))).sum()


def _stream(cast: _Cast, params: Any, batch: Any) -> jax.Array:
    x = 1e4 + batch["x"]
    for _ in range(4):
        centered = x - x.mean(-1, keepdims=True)
        x = x + 1e-3 * _f32(cast(jnp.tanh(_f32(cast(centered) @ cast(params["w"] / 8)))) @ cast(params["v"] / 8))
    return jnp.sin(x - 1e4).sum()


def _bias(cast: _Cast, params: Any, batch: Any) -> jax.Array:
    return jnp.sin(_f32(cast(batch["x"]) @ cast(params["w"] / 8)) + params["bias"]).sum()


def _f32(x: Any) -> Any:
    """Convert a float16 array to float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _model(function: Callable[[_Cast, Any, Any], jax.Array], params: Any, batch: Any, size: float) -> Model:
    """Return a model with normally distributed parameters and batches of the given shapes.

    The standard deviation of the batches is ``size``.
    """

    def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
        numbers = np.random.default_rng(seed)
        return {name: np.float32(numbers.normal(size=shape)) for name, shape in shapes.items()}

    def loss(dtype: DTypeLike | None) -> Loss:
        def cast(x: Any) -> Any:
            return x if dtype is None else x.astype(dtype)

        return lambda params, batch: function(cast, params, batch)

    def begin(number: int) -> Any:
        return {name: np.float32(size) * x for name, x in drawn(batch, number + 1).items()}

    return Model(lambda: drawn(params, 0), begin, loss)


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    difference = float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))
    return difference if np.isfinite(difference) else np.inf
