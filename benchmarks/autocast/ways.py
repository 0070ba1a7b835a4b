"""The ways to compute a loss that are compared. Each way is a function of the parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.autocast.models import Model
from benchmarks.optimizer.peers import Loss

FLOAT32 = "float32"
MANUAL_CASTS = "manual casts"
AUTOCAST = "autocast"
NO_RECOMPUTE = "autocast, nothing recomputed"
HALF_RESIDUAL_STREAM = "autocast, half residual stream"

# The ways by name. Except for `MANUAL_CASTS`, all ways start from the float32 program.
WAYS: dict[str, Callable[[Model], Loss]] = {
    FLOAT32: lambda model: model.loss(None),
    MANUAL_CASTS: lambda model: model.loss(jnp.float16),
    AUTOCAST: lambda model: jls.autocast(model.loss(None)),
    NO_RECOMPUTE: lambda model: jls.autocast(model.loss(None), policy=jls.PrecisionPolicy(recompute=False)),
    HALF_RESIDUAL_STREAM: lambda model: jls.autocast(
        model.loss(None), policy=jls.PrecisionPolicy(half_residual_stream=True)
    ),
}
