"""Measurements of gradients: whether all elements are finite, which leaf is not finite, and the largest magnitude.

The measurements can be combined over all devices of a mesh axis.
"""

from jax_lossscale._measure.devices import AxisName as AxisName
from jax_lossscale._measure.devices import agree as agree
from jax_lossscale._measure.devices import axes_varied_over as axes_varied_over
from jax_lossscale._measure.devices import vary as vary
from jax_lossscale._measure.finite import all_finite as all_finite
from jax_lossscale._measure.finite import finite_and_largest as finite_and_largest
from jax_lossscale._measure.finite import first_fault as first_fault
