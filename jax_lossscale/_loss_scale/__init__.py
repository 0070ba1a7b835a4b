"""The loss scales: one kind a file, and what leads to them and back (`registry`)."""

from jax_lossscale._loss_scale.auto import AutoLossScale
from jax_lossscale._loss_scale.base import LossScale
from jax_lossscale._loss_scale.dynamic import DynamicLossScale
from jax_lossscale._loss_scale.finding import get_loss_scale
from jax_lossscale._loss_scale.fixed import FixedLossScale, NoOpLossScale
from jax_lossscale._loss_scale.registry import get, loss_scale_for, serialize

__all__ = [
    "AutoLossScale",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "NoOpLossScale",
    "get",
    "get_loss_scale",
    "loss_scale_for",
    "serialize",
]
