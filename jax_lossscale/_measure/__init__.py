"""What is asked of gradients, in one pass: whether they are finite, where not, how large; agreed over devices.

Measuring happens here and nowhere else. Loss scales and the optax wrapper only combine what they are told.
"""

from jax_lossscale._measure.devices import AxisName, agree, agree_on_largest, axes_varied_over, vary
from jax_lossscale._measure.fault import first_fault, first_nonfinite
from jax_lossscale._measure.finite import all_finite, finite_and_largest

__all__ = [
    "AxisName",
    "agree",
    "agree_on_largest",
    "all_finite",
    "axes_varied_over",
    "finite_and_largest",
    "first_fault",
    "first_nonfinite",
    "vary",
]
