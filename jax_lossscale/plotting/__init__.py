"""Figures of gradients in the range of a dtype, of their errors, and of what a loss scale did over a run.

Matplotlib is imported on the first call, not here. Every figure is legible in gray and to the colour-blind: what
differs in colour differs in line or marker, too.
"""

from jax_lossscale.plotting._error import plot_gradient_error
from jax_lossscale.plotting._exponents import plot_exponents
from jax_lossscale.plotting._history import plot_loss_scale, plot_run

__all__ = ["plot_exponents", "plot_gradient_error", "plot_loss_scale", "plot_run"]
