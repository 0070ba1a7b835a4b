"""A function written for float32 is rewritten here, so that its products are computed in half precision."""

from jax_lossscale._autocast.in_half import in_half
from jax_lossscale._autocast.policy import PrecisionPolicy, PrecisionRule, keep_float32
from jax_lossscale._autocast.transform import autocast

__all__ = ["PrecisionPolicy", "PrecisionRule", "autocast", "in_half", "keep_float32"]
