"""Mixed-precision training for JAX and optax, with automatic float16 computation and loss scaling."""

import importlib as _importlib
import typing as _typing

from jax_lossscale._gradients.accumulation import AccumulatedGradients as AccumulatedGradients
from jax_lossscale._gradients.accumulation import accumulate_gradients as accumulate_gradients
from jax_lossscale._gradients.cotangent import scale_gradient as scale_gradient
from jax_lossscale._gradients.cotangent import unscale_gradient as unscale_gradient
from jax_lossscale._gradients.scaled import scaled_grad as scaled_grad
from jax_lossscale._gradients.scaled import value_and_scaled_grad as value_and_scaled_grad
from jax_lossscale._loss_scale import AutoLossScale as AutoLossScale
from jax_lossscale._loss_scale import DynamicLossScale as DynamicLossScale
from jax_lossscale._loss_scale import FixedLossScale as FixedLossScale
from jax_lossscale._loss_scale import LossScale as LossScale
from jax_lossscale._loss_scale import LossScaleLike as LossScaleLike
from jax_lossscale._loss_scale import LossScaleOrState as LossScaleOrState
from jax_lossscale._loss_scale import NoOpLossScale as NoOpLossScale
from jax_lossscale._loss_scale import get as get
from jax_lossscale._loss_scale import get_loss_scale as get_loss_scale
from jax_lossscale._loss_scale import loss_scale_for as loss_scale_for
from jax_lossscale._loss_scale import serialize as serialize
from jax_lossscale._measure import all_finite as all_finite
from jax_lossscale._optax.monitoring import metrics as metrics
from jax_lossscale._optax.monitoring import raise_if_stuck as raise_if_stuck
from jax_lossscale._optax.state import BadStep as BadStep
from jax_lossscale._optax.state import LossScaledState as LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation as LossScaledTransformation
from jax_lossscale._optax.transform import loss_scaled as loss_scaled
from jax_lossscale._sixteen_bit.float32_weights import float32_params as float32_params
from jax_lossscale._sixteen_bit.optimizer_state import HalfPrecisionState as HalfPrecisionState
from jax_lossscale._sixteen_bit.optimizer_state import half_precision_state as half_precision_state
from jax_lossscale._sixteen_bit.parameters import MasterWeightsState as MasterWeightsState
from jax_lossscale._sixteen_bit.parameters import StochasticRoundingState as StochasticRoundingState
from jax_lossscale._sixteen_bit.parameters import master_weights as master_weights
from jax_lossscale._sixteen_bit.parameters import stochastic_rounding as stochastic_rounding
from jax_lossscale._tree import cast_floating as cast_floating
from jax_lossscale._tree import select_tree as select_tree
from jax_lossscale._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from jax_lossscale import diagnostics as diagnostics
    from jax_lossscale import plotting as plotting
    from jax_lossscale._autocast import PrecisionPolicy as PrecisionPolicy
    from jax_lossscale._autocast import PrecisionRule as PrecisionRule
    from jax_lossscale._autocast import autocast as autocast
    from jax_lossscale._autocast import in_half as in_half
    from jax_lossscale._autocast import keep_float32 as keep_float32
    from jax_lossscale._trainers.mixed_precision import MixedPrecision as MixedPrecision
    from jax_lossscale._trainers.scaled_backward import scaled_backward as scaled_backward

# A dictionary that maps each name that is imported on first use to its module. These modules rewrite or read jaxprs, so
# they use functions that a new version of JAX may lack. In this case, the loss scales can still be imported.
_LAZY = {
    **dict.fromkeys(("PrecisionPolicy", "PrecisionRule", "autocast", "in_half", "keep_float32"), "_autocast"),
    "MixedPrecision": "_trainers.mixed_precision",
    "diagnostics": "diagnostics",
    "plotting": "plotting",
    "scaled_backward": "_trainers.scaled_backward",
}

__all__ = [*sorted({name for name in (*globals(), *_LAZY) if not name.startswith("_")}), "__version__"]


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
