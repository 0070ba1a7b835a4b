"""The ways to compute a loss in half precision that are compared: functions of parameters and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.autocast.interpreter import interpreted, torch_rule
from benchmarks.autocast.models import Casts, Model
from benchmarks.peers import Loss

FLOAT32 = "float32"
BY_HAND = "by hand"
AUTOCAST = "autocast"
KEPT = "autocast, nothing recomputed"
TORCH = "torch's rule"
JMP = "jmp, the whole tree"
BF16_BF16_F32 = "BF16_BF16_F32"

NOTES = (
    "By hand: flax's `dtype=float16` for its transformer; elsewhere parameters and inputs cast, norms, softmax and "
    "losses in float32. torch's rule: products in float16, what torch lists in float32, all else in the widest dtype "
    "that meets, by an interpreter of this benchmark, which does not keep derivative rules of the program's own.",
    "jmp: parameters and batch of the float32 program cast by its policy. BF16_BF16_F32: "
    "`jax.default_matmul_precision`, which rounds operands inside of products, to bfloat16.",
)


def ways() -> dict[str, Callable[[Model], Loss]]:
    """All of them, by name. All but the one by hand are made of the program that is written for float32."""
    return {
        FLOAT32: _plain,
        BY_HAND: lambda model: model.loss(Casts(jnp.float16)),
        AUTOCAST: lambda model: jls.autocast(_plain(model)),
        KEPT: lambda model: jls.autocast(_plain(model), policy=jls.PrecisionPolicy(recompute=False)),
        TORCH: lambda model: interpreted(_plain(model), torch_rule),
        JMP: lambda model: _with_jmp(_plain(model)),
        BF16_BF16_F32: lambda model: _with_precision(_plain(model), BF16_BF16_F32),
    }


def _plain(model: Model) -> Loss:
    return model.loss(Casts())


def _with_jmp(loss: Loss) -> Loss:
    import jmp

    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)

    def cast(params: Any, batch: Any) -> jax.Array:
        return policy.cast_to_output(loss(policy.cast_to_compute(params), policy.cast_to_compute(batch)))

    return cast


def _with_precision(loss: Loss, precision: str) -> Loss:
    def marked(params: Any, batch: Any) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return loss(params, batch)

    return marked
