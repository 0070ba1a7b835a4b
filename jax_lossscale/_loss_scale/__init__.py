"""Loss scales, and functions to construct, serialize and find them."""

from jax_lossscale._loss_scale.auto import AutoLossScale as AutoLossScale
from jax_lossscale._loss_scale.base import LossScale as LossScale
from jax_lossscale._loss_scale.dynamic import DynamicLossScale as DynamicLossScale
from jax_lossscale._loss_scale.fixed import FixedLossScale as FixedLossScale
from jax_lossscale._loss_scale.fixed import NoOpLossScale as NoOpLossScale
from jax_lossscale._loss_scale.lookup import LossScaleOrState as LossScaleOrState
from jax_lossscale._loss_scale.lookup import get_loss_scale as get_loss_scale
from jax_lossscale._loss_scale.registry import LossScaleLike as LossScaleLike
from jax_lossscale._loss_scale.registry import get as get
from jax_lossscale._loss_scale.registry import loss_scale_for as loss_scale_for
from jax_lossscale._loss_scale.registry import serialize as serialize
