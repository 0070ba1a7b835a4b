"""The different ways to compute a loss, and the half-precision dtype of the benchmarks for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.autocast.models import Model
from benchmarks.optimizer.peers import Loss

HALF = jnp.float16
FLOAT32 = "float32"
MANUAL_CASTS = "manual casts"
AUTOCAST = "autocast"
HALF_RESIDUAL_STREAM = "autocast, half residual stream"

# A dictionary that maps each way to a function that takes a model and a half-precision dtype and returns a loss. Except
# for `MANUAL_CASTS`, all ways start from the float32 program.
WAYS: dict[str, Callable[[Model, DTypeLike], Loss]] = {
    FLOAT32: lambda model, _: model.loss(None),
    MANUAL_CASTS: lambda model, dtype: model.loss(dtype),
    AUTOCAST: lambda model, dtype: jls.autocast(model.loss(None), dtype),
    HALF_RESIDUAL_STREAM: lambda model, dtype: jls.autocast(
        model.loss(None), dtype, policy=jls.PrecisionPolicy(half_residual_stream=True)
    ),
}
