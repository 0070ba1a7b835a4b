"""How far float16's gradients are from float32's, over the loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jax_lossscale.diagnostics import GradientComparison, LeafGradientError
from jax_lossscale.plotting._axes import (
    BLUE,
    GRAY,
    GREEN,
    VERMILLION,
    draw_grid,
    given_or_new_axes,
    require_matplotlib,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Errors below are drawn here: what is exact has no place on a logarithmic axis.
_SMALLEST_ERROR = 1e-6


def plot_gradient_error(comparison: GradientComparison, *, ax: Axes | None = None) -> Axes:
    """Draw the relative error of the gradients against the loss scale: a thin line for each leaf, a thick one for all.

    A line that falls shows underflow, which a larger scale cures. A line that is high and flat shows rounding, or a
    branch that gets no gradients, which no scale cures. Where a line ends, the gradients overflow from the next scale
    on; a cross marks the scales at which they do in any leaf.

    Args:
      comparison: what `jax_lossscale.diagnostics.compare_gradients` returned. Leaves whose true gradient is nothing but
        rounding are left out.
      ax: where to draw; by default a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes. Errors below 1e-6 are drawn at 1e-6.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if ``comparison`` is no `GradientComparison`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> from matplotlib.figure import Figure
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     return 1e-9 * jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> comparison = jls.diagnostics.compare_gradients(
      ...     loss_fn, jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> ax = jls.plotting.plot_gradient_error(comparison, ax=Figure().subplots())
      >>> [text.get_text() for text in ax.get_legend().get_texts()]
      ['all leaves', 'one leaf (1)', 'overflow', 'start here']
    """
    require_matplotlib("plot_gradient_error")
    if not isinstance(comparison, GradientComparison):
        raise ValueError(
            f"`plot_gradient_error(comparison=...)` must be what `jls.diagnostics.compare_gradients` returns, got "
            f"{type(comparison).__name__}."
        )
    scales = np.asarray(comparison.loss_scales)
    (ax,) = given_or_new_axes(ax, "plot_gradient_error(ax=...)")
    _draw(ax, scales, comparison.total, color=BLUE, linewidth=2.4, marker="o", zorder=3, label="all leaves")
    drawn = [leaf for leaf in comparison if not leaf.is_rounding]
    for n, leaf in enumerate(drawn):
        suffers = leaf.path in comparison.suffering
        style: Any = {"color": VERMILLION if suffers else GRAY, "linestyle": "--" if suffers else "-"}
        names = ["suffering leaf", "one leaf"]
        same = [other for other in drawn if (other.path in comparison.suffering) == suffers]
        label = f"{names[not suffers]} ({len(same)})" if same[0] is leaf else None
        _draw(ax, scales, leaf, linewidth=0.8, zorder=2 - n / len(drawn), label=label, **style)
    _mark_overflow(ax, scales, comparison.total)
    if comparison.loss_scale is not None:
        label = "start here" if comparison.will_train else "best for the others"
        ax.axvline(comparison.loss_scale, color=GREEN, linestyle=":", linewidth=1.8, zorder=1, label=label)
    _finish(ax, scales, [comparison.total, *drawn], comparison.dtype)
    return ax


def _draw(ax: Axes, scales: np.ndarray, leaf: LeafGradientError, **style: Any) -> None:
    """A line over the scales with finite gradients."""
    errors = np.asarray(leaf.relative_error)
    errors = np.where(np.asarray(leaf.nonfinite) > 0, np.nan, np.maximum(errors, _SMALLEST_ERROR))
    ax.plot(scales, np.where(np.isfinite(errors), errors, np.nan), **style)


def _mark_overflow(ax: Axes, scales: np.ndarray, total: LeafGradientError) -> None:
    over = scales[np.asarray(total.nonfinite) > 0]
    if len(over):
        style: Any = {"linestyle": "none", "marker": "x", "markersize": 7, "markeredgewidth": 1.8, "clip_on": False}
        height = np.full(len(over), 0.97)
        ax.plot(over, height, color=VERMILLION, transform=ax.get_xaxis_transform(), label="overflow", **style)


def _finish(ax: Axes, scales: np.ndarray, drawn: list[LeafGradientError], dtype: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    errors = [error for leaf in drawn for error in leaf.relative_error if np.isfinite(error)]
    ax.set_ylim(max(min([0.01, *errors]), _SMALLEST_ERROR) / 2, max([2.0, *(2 * error for error in errors)]))
    ax.set_xlim(scales[0] / 1.5, scales[-1] * 1.5)
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    draw_grid(ax)
    ax.set(xlabel="loss scale", ylabel=f"relative error of {dtype} gradients")
    ax.legend(fontsize="small", frameon=False)
