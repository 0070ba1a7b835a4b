"""What is compared: our kinds in several settings, and the rules of other libraries."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import jax_lossscale as jls
from benchmarks.policies.comparators import HistogramLossScale, LogMaxLossScale, ToleranceLossScale
from benchmarks.policies.traces import Trace

AUTO = "auto"


def contenders() -> dict[str, Callable[[Trace], jls.LossScale]]:
    """What makes each loss scale, by name; it is given the trace, of which it may look at the first step."""
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
        "fairseq, tolerance 0.25": lambda trace: ToleranceLossScale(),
        "OpenSeq2Seq log-max, to 2^14": lambda trace: LogMaxLossScale(2.0**14),
        "OpenSeq2Seq log-max, to 2^24": lambda trace: LogMaxLossScale(2.0**24),
        "Graphcore histogram": lambda trace: HistogramLossScale(),
    }


def _suggested(trace: Trace) -> jls.FixedLossScale:
    largest = jnp.asarray([np.exp2(trace.log2_largest[0])], jnp.float32)
    suggestion = jls.diagnostics.suggest_loss_scale(largest)
    return jls.FixedLossScale(float(suggestion.loss_scale), skip_nonfinite=True)
