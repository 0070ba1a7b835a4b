"""Plot of the relative error of half-precision gradients against the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_lossscale.diagnostics import GradientComparison
from jax_lossscale.diagnostics._gradient_errors import LeafGradientError
from jax_lossscale.plotting._axes import BLUE, GRAY, GREEN, VERMILLION, draw_grid, given_or_new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Errors below this value are drawn at this value, because an error of zero cannot be drawn on a logarithmic axis.
_SMALLEST_ERROR = 1e-6


def plot_gradient_error(comparison: GradientComparison, *, ax: Axes | None = None) -> Axes:
    """Plot the relative error of the gradients against the loss scale.

    Thin lines show the error of each leaf, and a thick line shows the error of the whole gradient. The shape of a line
    shows the cause of the error:

    - If a line falls, small gradients underflow, and a larger scale reduces the error.
    - If a line is high and flat, the cause is rounding, or a branch without gradients, and no loss scale reduces the
      error.
    - If a line ends, the gradients of this leaf overflow at all larger scales.

    A cross marks each scale at which the gradients of at least one leaf overflow.

    Args:
      comparison: the result of `jax_lossscale.diagnostics.compare_gradients`. Leaves whose float32 gradient consists
        only of rounding errors are not drawn.
      ax: the Axes to draw in; by default, the Axes of a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes. Errors below 1e-6 are drawn at 1e-6.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if ``comparison`` is not a `GradientComparison`.

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
    if not isinstance(comparison, GradientComparison):
        raise ValueError(
            f"`plot_gradient_error(comparison=...)` must be the result of `jls.diagnostics.compare_gradients`, got "
            f"{type(comparison).__name__}."
        )
    scales = np.asarray(comparison.loss_scales)
    (ax,) = given_or_new_axes(ax, "plot_gradient_error")
    drawn = [leaf for leaf in comparison if not leaf.is_rounding]
    inaccurate = [leaf for leaf in drawn if leaf.path in comparison.inaccurate_leaves]
    others = [leaf for leaf in drawn if leaf.path not in comparison.inaccurate_leaves]
    thin, thick = {"linewidth": 0.8}, {"linewidth": 2.4}
    lines: list[tuple[Sequence[LeafGradientError], str, dict[str, Any]]] = [
        ([comparison.total], "all leaves", thick | {"color": BLUE, "marker": "o", "zorder": 3}),
        (others, f"one leaf ({len(others)})", thin | {"color": GRAY}),
        (inaccurate, f"inaccurate leaf ({len(inaccurate)})", thin | {"color": VERMILLION, "linestyle": "--"}),
    ]
    for leaves, name, style in lines:
        for n, leaf in enumerate(leaves):
            ax.plot(scales, _drawable_errors(leaf), label=None if n else name, **style)
    over = scales[np.asarray(comparison.total.nonfinite) > 0]
    if len(over):
        cross: Any = {"color": VERMILLION, "markersize": 7, "markeredgewidth": 1.8, "clip_on": False}
        ax.plot(over, np.full(len(over), 0.97), "x", transform=ax.get_xaxis_transform(), label="overflow", **cross)
    if comparison.loss_scale is not None:
        label = "start here" if comparison.will_train else "best for other leaves"
        ax.axvline(comparison.loss_scale, color=GREEN, linestyle=":", linewidth=1.8, zorder=1, label=label)

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.update_datalim([(scales[0], 0.01), (scales[-1], 1.0)])  # Errors from 1% to 100% are always visible.
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    draw_grid(ax)
    ax.set(xlabel="loss scale", ylabel=f"relative error of {comparison.dtype} gradients")
    ax.legend(fontsize="small", frameon=False)
    return ax


def _drawable_errors(leaf: LeafGradientError) -> np.ndarray:
    """Return the error at each loss scale, or NaN (a gap in the line) if the gradients are not finite."""
    errors = np.asarray(leaf.relative_error)
    has_error = np.isfinite(errors) & (np.asarray(leaf.nonfinite) == 0)
    return np.where(has_error, np.maximum(errors, _SMALLEST_ERROR), np.nan)
