"""What is asked of gradients, in one pass: whether they are finite, and where not; agreed over devices.

Measuring happens here and nowhere else. Loss scales and the optax wrapper only combine what they are told.
"""

from jax_lossscale._measure.devices import AxisName, agree, axes_varied_over, vary
from jax_lossscale._measure.fault import first_fault, first_nonfinite
from jax_lossscale._measure.finite import all_finite

__all__ = ["AxisName", "agree", "all_finite", "axes_varied_over", "first_fault", "first_nonfinite", "vary"]
