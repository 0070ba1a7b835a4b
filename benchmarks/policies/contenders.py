"""The loss scales that are compared: those of this library with various settings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_lossscale as jls
from benchmarks.policies.judge import best_fixed
from benchmarks.policies.traces import Trace

AUTO = "auto"
BEST_FIXED = "fixed, best in hindsight"


def contenders() -> dict[str, Callable[[Trace], jls.LossScale]]:
    """Return, by name, functions that create a loss scale for a trace.

    The functions may use only the first step of the trace. The exception is the best fixed scale, which uses the whole
    trace, and is therefore a bound instead of a usable policy.
    """
    return {
        AUTO: lambda trace: jls.AutoLossScale(),
        **{
            f"dynamic 2^{start}, {period}": lambda trace, start=start, period=period: jls.DynamicLossScale(
                2.0**start, period
            )
            for start in (15, 24)
            for period in (100, 2000, 10000)
        },
        "fixed, suggested at step 0": _suggested,
        BEST_FIXED: _best,
    }


def _suggested(trace: Trace) -> jls.FixedLossScale:
    largest = jnp.asarray([np.exp2(trace.log2_largest[0])], jnp.float32)
    suggestion = jls.diagnostics.suggest_loss_scale(largest)
    return jls.FixedLossScale(float(suggestion.loss_scale), skip_nonfinite=True)


def _best(trace: Trace) -> jls.FixedLossScale:
    # If the gradients are very large, the best scale is below 1, which the constructor rejects.
    return jax.tree.map(lambda _: jnp.float32(best_fixed(trace)), jls.FixedLossScale(1, skip_nonfinite=True))
