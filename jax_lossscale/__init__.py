"""Mixed-precision training for JAX and optax, with automatic float16 computation and loss scaling."""

from jax_lossscale import diagnostics, plotting
from jax_lossscale._autocast import PrecisionPolicy, PrecisionRule, autocast, in_half, keep_float32
from jax_lossscale._gradients import (
    AccumulatedGradients,
    accumulate_gradients,
    scale_gradient,
    scaled_grad,
    unscale_gradient,
    value_and_scaled_grad,
)
from jax_lossscale._loss_scale import (
    AutoLossScale,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    NoOpLossScale,
    get,
    get_loss_scale,
    loss_scale_for,
    serialize,
)
from jax_lossscale._measure import all_finite
from jax_lossscale._mixed_precision import MixedPrecision
from jax_lossscale._optax import (
    BadStep,
    LossScaledState,
    LossScaledTransformation,
    loss_scaled,
    metrics,
    raise_if_stuck,
)
from jax_lossscale._scaled_backward import scaled_backward
from jax_lossscale._tree import cast_floating, select_tree
from jax_lossscale._version import __version__

__all__ = [
    "AccumulatedGradients",
    "AutoLossScale",
    "BadStep",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaledState",
    "LossScaledTransformation",
    "MixedPrecision",
    "NoOpLossScale",
    "PrecisionPolicy",
    "PrecisionRule",
    "__version__",
    "accumulate_gradients",
    "all_finite",
    "autocast",
    "cast_floating",
    "diagnostics",
    "get",
    "get_loss_scale",
    "in_half",
    "keep_float32",
    "loss_scale_for",
    "loss_scaled",
    "metrics",
    "plotting",
    "raise_if_stuck",
    "scale_gradient",
    "scaled_backward",
    "scaled_grad",
    "select_tree",
    "serialize",
    "unscale_gradient",
    "value_and_scaled_grad",
]
