"""Plots of gradient exponents, gradient errors, and the loss scale during training.

Matplotlib is imported when a plotting function is called for the first time. All plots are legible in grayscale and for
color-blind readers, because lines of different colors also differ in line style, line width or marker.
"""

from jax_lossscale.plotting._error import plot_gradient_error
from jax_lossscale.plotting._exponents import plot_exponents
from jax_lossscale.plotting._history import plot_loss_scale, plot_run

__all__ = ["plot_exponents", "plot_gradient_error", "plot_loss_scale", "plot_run"]
