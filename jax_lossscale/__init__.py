"""Mixed-precision training for JAX and optax, with automatic float16 computation and loss scaling."""

import importlib as _importlib
import typing as _typing

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
    LossScaleLike,
    LossScaleOrState,
    NoOpLossScale,
    get,
    get_loss_scale,
    loss_scale_for,
    serialize,
)
from jax_lossscale._measure import all_finite
from jax_lossscale._optax import (
    BadStep,
    LossScaledState,
    LossScaledTransformation,
    loss_scaled,
    metrics,
    raise_if_stuck,
)
from jax_lossscale._sixteen_bit import (
    HalfPrecisionState,
    MasterWeightsState,
    StochasticRoundingState,
    float32_params,
    half_precision_state,
    master_weights,
    stochastic_rounding,
)
from jax_lossscale._tree import cast_floating, select_tree
from jax_lossscale._version import __version__

if _typing.TYPE_CHECKING:
    from jax_lossscale import diagnostics, plotting
    from jax_lossscale._autocast import PrecisionPolicy, PrecisionRule, autocast, in_half, keep_float32
    from jax_lossscale._trainers.mixed_precision import MixedPrecision
    from jax_lossscale._trainers.scaled_backward import scaled_backward

# The keys are the names that are imported when they are first used, and the values are their modules. These modules
# rewrite or read jaxprs, and a new version of JAX may lack functions that they need. The loss scales can be imported
# without these modules.
_LAZY = {
    **dict.fromkeys(("PrecisionPolicy", "PrecisionRule", "autocast", "in_half", "keep_float32"), "_autocast"),
    "MixedPrecision": "_trainers.mixed_precision",
    "diagnostics": "diagnostics",
    "plotting": "plotting",
    "scaled_backward": "_trainers.scaled_backward",
}

__all__ = [
    "AccumulatedGradients",
    "AutoLossScale",
    "BadStep",
    "DynamicLossScale",
    "FixedLossScale",
    "HalfPrecisionState",
    "LossScale",
    "LossScaleLike",
    "LossScaleOrState",
    "LossScaledState",
    "LossScaledTransformation",
    "MasterWeightsState",
    "MixedPrecision",
    "NoOpLossScale",
    "PrecisionPolicy",
    "PrecisionRule",
    "StochasticRoundingState",
    "__version__",
    "accumulate_gradients",
    "all_finite",
    "autocast",
    "cast_floating",
    "diagnostics",
    "float32_params",
    "get",
    "get_loss_scale",
    "half_precision_state",
    "in_half",
    "keep_float32",
    "loss_scale_for",
    "loss_scaled",
    "master_weights",
    "metrics",
    "plotting",
    "raise_if_stuck",
    "scale_gradient",
    "scaled_backward",
    "scaled_grad",
    "select_tree",
    "serialize",
    "stochastic_rounding",
    "unscale_gradient",
    "value_and_scaled_grad",
]


# A type checker that sees this function would not report misspelled names.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a name that is listed in ``_LAZY``, and store it in this module."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"{__name__}.{_LAZY[name]}")
        globals()[name] = module if name == _LAZY[name] else getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    """Return the public names, including those that have not been imported yet."""
    return sorted({*globals(), *__all__})
