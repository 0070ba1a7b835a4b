"""Small programs, each with something that other rewritings of programs did not follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.autocast.models import Casts, Model, images_of, transformer
from benchmarks.peers import Loss
from benchmarks.workloads.layers import along_last, cross_entropy, dense, init_dense, init_mlp, mlp

_WIDTH = 32
_BATCH = 8


def programs() -> list[Model]:
    """All of them. By hand: what goes into products is cast, norms, softmax, sums and carries of cells are float32."""
    return [
        transformer(blocks=2, width=_WIDTH, heads=4, batch=2, context=8),
        _resnet(),
        _lstm(),
        _pinn(),
        _attention(),
        _remat(),
        _custom_vjp(),
    ]


def _resnet() -> Model:
    def params() -> Any:
        keys = jax.random.split(jax.random.key(0), 5)
        shapes = ((3, 3, 1, 8), (3, 3, 8, 8), (3, 3, 8, 8), (1, 1, 8, 8))
        kernels = [jax.random.normal(key, shape) * 0.2 for key, shape in zip(keys[:4], shapes, strict=True)]
        norms = [{"scale": jnp.ones(8), "bias": jnp.zeros(8)} for _ in range(3)]
        return {"kernels": kernels, "norms": norms, "head": init_dense(keys[4], 8, 10)}

    def norm(layer: Any, x: jax.Array, casts: Casts) -> jax.Array:
        wide = casts.wide(x)
        centered = wide - wide.mean((0, 1, 2), keepdims=True)
        normalized = centered * jax.lax.rsqrt(wide.var((0, 1, 2), keepdims=True) + 1e-5)
        scale, bias = (along_last(casts.wide(layer[name]), x) for name in ("scale", "bias"))
        return casts.narrow(normalized * scale + bias)

    def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions)

    def loss(casts: Casts) -> Loss:
        def cross_entropy_of(params: Any, examples: Any) -> jax.Array:
            images, labels = examples
            params, images = casts.narrow((params, images))
            stem, first, second, shortcut = params["kernels"]
            x = jax.nn.relu(norm(params["norms"][0], convolved(images, stem), casts))
            y = jax.nn.relu(norm(params["norms"][1], convolved(x, first, 2), casts))
            y = norm(params["norms"][2], convolved(y, second), casts)
            x = jax.nn.relu(y + convolved(x, shortcut, 2))
            return cross_entropy(casts.wide(dense(params["head"], casts.narrow(casts.wide(x).mean((1, 2))))), labels)

        return cross_entropy_of

    return Model("ResNet with batch norm", params, lambda number: images_of(number, _BATCH, 8), loss)


def _lstm() -> Model:
    def params() -> Any:
        keys = jax.random.split(jax.random.key(0))
        return {"gates": init_dense(keys[0], 2 * _WIDTH, 4 * _WIDTH), "head": init_dense(keys[1], _WIDTH, 1)}

    def loss(casts: Casts) -> Loss:
        def squared_error(params: Any, batch: Any) -> jax.Array:
            sequence, targets = batch
            params, sequence = casts.narrow((params, sequence))

            def step(carry: Any, x: jax.Array) -> Any:
                cell, hidden = carry
                gates = casts.wide(dense(params["gates"], jnp.concatenate([x, hidden], axis=-1)))
                forget, enter, leave, new = jnp.split(gates, 4, axis=-1)
                cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
                return (cell, casts.narrow(jax.nn.sigmoid(leave) * jnp.tanh(cell))), None

            start = jnp.zeros((_BATCH, _WIDTH))
            (_, hidden), _ = jax.lax.scan(step, (start, casts.narrow(start)), sequence)
            return ((casts.wide(dense(params["head"], hidden)) - targets) ** 2).mean()

        return squared_error

    return Model("LSTM by scan", params, _normal((12, _BATCH, _WIDTH), (_BATCH, 1)), loss)


def _pinn() -> Model:
    def loss(casts: Casts) -> Loss:
        def residual(params: Any, batch: Any) -> jax.Array:
            (points,) = batch
            params, points = casts.narrow((params, points))

            def solution(x: jax.Array) -> jax.Array:
                return mlp(params, x, jnp.tanh)[0]

            def laplacian(x: jax.Array) -> jax.Array:
                return casts.wide(jnp.trace(jax.jacfwd(jax.grad(solution))(x)))

            return ((jax.vmap(laplacian)(points) - jnp.sin(casts.wide(points)).sum(-1)) ** 2).mean()

        return residual

    sizes = (2, _WIDTH, _WIDTH, 1)
    params = lambda: init_mlp(jax.random.key(0), sizes)  # noqa: E731
    return Model("PINN, second derivatives", params, _normal((_BATCH, 2)), loss)


def _attention() -> Model:
    def loss(casts: Casts) -> Loss:
        def squared_error(params: Any, batch: Any) -> jax.Array:
            x, targets = batch
            params, x = casts.narrow((params, x))
            query, key, value = (dense(layer, x).reshape(2, _BATCH, 4, -1) for layer in params[:3])
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            return ((casts.wide(dense(params[3], attended.reshape(x.shape))) - targets) ** 2).mean()

        return squared_error

    batch = _normal((2, _BATCH, _WIDTH), (2, _BATCH, _WIDTH))
    return Model("`dot_product_attention`", _layers(4), batch, loss)


def _remat() -> Model:
    def loss(casts: Casts) -> Loss:
        @jax.checkpoint
        def block(layer: Any, x: jax.Array) -> jax.Array:
            return x + jax.nn.gelu(dense(layer, x))

        return _stacked(block, casts)

    return Model("`jax.checkpoint`", _layers(3), _normal((_BATCH, _WIDTH), (_BATCH, _WIDTH)), loss)


def _custom_vjp() -> Model:
    @jax.custom_vjp
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return x @ kernel

    product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(casts: Casts) -> Loss:
        return _stacked(lambda layer, x: x + jnp.tanh(product(x, layer["kernel"])), casts)

    return Model("`jax.custom_vjp`", _layers(3), _normal((_BATCH, _WIDTH), (_BATCH, _WIDTH)), loss)


def _stacked(block: Callable[[Any, jax.Array], jax.Array], casts: Casts) -> Loss:
    def squared_error(params: Any, batch: Any) -> jax.Array:
        x, targets = batch
        params, x = casts.narrow((params, x))
        return ((casts.wide(functools.reduce(lambda x, layer: block(layer, x), params, x)) - targets) ** 2).mean()

    return squared_error


def _layers(count: int) -> Callable[[], Any]:
    return lambda: [init_dense(key, _WIDTH, _WIDTH) for key in jax.random.split(jax.random.key(0), count)]


def _normal(*shapes: tuple[int, ...]) -> Callable[[int], Any]:
    def batch(number: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(number), len(shapes))
        return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    return batch
