"""Plot of the exponents of gradients relative to the range of a dtype."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import chex
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale._check import checked_floating_dtype, positive_normal_number
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._tree import instances, widen
from jax_lossscale.diagnostics import ExponentHistogram, exponent_histogram
from jax_lossscale.plotting._axes import BLUE, GRAY, PALE, PALER, VERMILLION, given_or_new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_exponents(
    tree_or_histogram: chex.ArrayTree | ExponentHistogram,
    loss_scale: ArrayLike | LossScale = 1.0,
    *,
    dtype: DTypeLike = jnp.float16,
    yscale: Literal["linear", "log"] = "linear",
    ax: Axes | None = None,
) -> Axes:
    """Plot a histogram of gradient exponents in the range of a dtype, before and after scaling by a loss scale.

    A loss scale moves the histogram to the right by ``log2(loss_scale)``. A good scale moves all gradients out of the
    range in which they become zero (below half of the smallest subnormal number), and moves no gradient into the range
    in which gradients overflow. The legend shows the percentage of gradients that become zero and the percentage that
    overflow, relative to all finite nonzero gradients, as in `jax_lossscale.diagnostics.underflow_fraction`. If the
    loss scale is not a power of two, the percentages in the legend are accurate to within one bar.

    Args:
      tree_or_histogram: *unscaled* gradients, preferably computed in float32; or an `ExponentHistogram` of gradients.
        An `ExponentHistogram` does not contain the exponents of subnormal numbers, so subnormal numbers are not drawn
        and do not count as numbers that become zero.
      loss_scale: a positive number, or a `LossScale`, whose current scale is used. With a scale of 1, only the
        unscaled gradients are drawn.
      dtype: the floating dtype whose range is shown. The range of bfloat16 is marked as well. If ``dtype`` is bfloat16,
        the range of float16 is marked instead.
      yscale: the scale of the vertical axis. A ``"log"`` scale also shows rare exponents.
      ax: the Axes to draw in; by default, the Axes of a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes. The x coordinate of a bar is the exponent of its gradients: 0 means a magnitude of 1.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if there are no gradients, if there is more than one histogram, if ``loss_scale`` is not a positive
        finite number, if ``dtype`` is not a real floating dtype, or if ``yscale`` is neither ``"linear"`` nor
        ``"log"``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> from matplotlib.figure import Figure
      >>> grads = {"kernel": jnp.array([1e-9, 1e-6, 1e-4, 1e-2])}
      >>> ax = jls.plotting.plot_exponents(grads, 2.0**15, ax=Figure().subplots())
      >>> print(*(text.get_text() for text in ax.get_legend().get_texts()), sep=chr(10))
      gradients: 25 % become zero
      times $2^{15}$: 0 % become zero (25 % rescued)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    dtype = checked_floating_dtype(dtype, "plot_exponents(dtype=...)")
    if yscale not in ("linear", "log"):
        raise ValueError(f"`plot_exponents(yscale=...)` must be 'linear' or 'log', got {yscale!r}.")
    loss_scale = loss_scale() if isinstance(loss_scale, LossScale) else loss_scale
    scale = positive_normal_number(loss_scale, "plot_exponents(loss_scale=...)")
    histogram = _one_histogram(tree_or_histogram)
    counts, subnormals = np.asarray(histogram.counts, np.int64), int(histogram.subnormals)
    undrawn = {"exactly zero": int(histogram.zeros), "not finite": int(histogram.nonfinite)}
    undrawn["subnormal in their own dtype"] = subnormals
    everything = int(counts.sum()) + sum(undrawn.values())
    if everything == 0:
        raise ValueError(
            "`plot_exponents(tree_or_histogram=...)` must contain floating-point or complex numbers, got "
            f"{tree_or_histogram!r}."
        )
    numbers = max(int(counts.sum()) + subnormals, 1)
    edges = np.append(histogram.exponents, histogram.exponents[-1] + 1).astype(float)
    heights, bars = _between_the_first_and_the_last(100 * counts / numbers, edges)
    shift = float(np.log2(scale))
    gray: Any = {"facecolor": "#c4c4c4", "edgecolor": "#4a4a4a", "linewidth": 1.2, "fill": scale != 1}
    outlines: list[tuple[float, str, Any]] = [(0.0, "gradients", gray)]
    if scale != 1:
        times = f"times $2^{{{shift:g}}}$" if shift % 1 == 0 else f"times {scale:g}"
        outlines.append((shift, times, {"color": BLUE, "linewidth": 2.2}))

    (ax,) = given_or_new_axes(ax, "plot_exponents")
    bottom, _, top = _range_of(dtype)
    faint = 0 if isinstance(tree_or_histogram, ExponentHistogram) else subnormals
    lost_before = 0.0
    for moved, name, style in outlines:
        lost, over = (number / numbers for number in _lost_and_over(counts, edges + moved, faint, dtype))
        words = f"{_percent(lost)} become zero" + (f", {_percent(over)} overflow" if over else "")
        words += f" ({_percent(lost_before - lost)} rescued)" if lost < lost_before else ""
        lost_before = lost
        ax.stairs(heights, bars + moved, label=f"{name}: {words}", **style)
        # Hatch the parts of the bars below the range of the dtype, and then the parts above the range. Clipping the
        # edges of the bars at the limit of the range reduces the width of all other parts to zero.
        hatched: Any = {"facecolor": VERMILLION + "40", "edgecolor": VERMILLION, "hatch": "////", "linewidth": 0.0}
        for beyond in np.clip(bars + moved, None, bottom), np.clip(bars + moved, top, None):
            if np.any(np.diff(beyond) * heights):
                ax.stairs(heights, beyond, fill=True, zorder=1.1, **hatched)

    # Bars that are too low to be visible do not extend the horizontal axis.
    lowest = 0.0 if yscale == "log" else 0.002 * heights.max()
    _, seen = _between_the_first_and_the_last(np.where(heights > lowest, heights, 0), bars)
    left, right = min(bottom, seen[0] + min(shift, 0) - 1), max(top, seen[-1] + max(shift, 0) + 1)
    margin = 0.12 * (right - left)  # space for the labels of the regions outside of the range
    ax.set_xlim(min(left, bottom - margin), max(right, top + margin))
    _set_share_axis(ax, heights, yscale)
    _draw_ranges(ax, dtype)
    ax.locator_params(axis="x", nbins=10, steps=[1, 2, 4, 8, 10], integer=True)
    ax.xaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
    ax.set(xlabel="magnitude of a gradient", ylabel="share of non-zero gradients (%)")
    left_out = ", ".join(f"{_percent(number / everything)} {name}" for name, number in undrawn.items() if number)
    below_the_ranges: Any = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.82), "alignment": "left"}
    title = f"not drawn: {left_out}" if left_out else None
    ax.legend(title=title, fontsize="small", title_fontsize="small", **below_the_ranges)
    return ax


def _one_histogram(tree: Any) -> ExponentHistogram:
    """Return the histogram of a tree of gradients. If the tree is already a histogram, return it unchanged."""
    if isinstance(tree, ExponentHistogram) and tree.counts.ndim == 1:
        return tree
    if instances(tree, ExponentHistogram):
        raise ValueError("`plot_exponents(tree_or_histogram=...)` contains several histograms. Plot one at a time.")
    # In float32, the subnormal numbers of float16 are normal, so the histogram contains their exponents. A bfloat16
    # tree is not cast, because bfloat16 has the same exponent range as float32.
    return exponent_histogram(widen(tree, keep=(jnp.bfloat16,)))


def _range_of(dtype: DTypeLike) -> tuple[int, int, int]:
    """Return the exponents below which numbers become zero or subnormal, and the exponent at which numbers overflow."""
    info = jnp.finfo(dtype)
    return info.minexp - info.nmant - 1, info.minexp, info.maxexp


def _lost_and_over(counts: np.ndarray, edges: np.ndarray, faint: int, dtype: Any) -> tuple[float, float]:
    """Return the number of values that become zero, and the number of values that overflow.

    Args:
      counts: the number of values in each bar.
      edges: the exponents at the edges of the bars.
      faint: the number of further values, which have unknown magnitudes below the first edge.
      dtype: the dtype in which values become zero or overflow.
    """
    bottom, _, top = _range_of(dtype)
    cumulative = np.append(0, counts.cumsum())
    below, up_to_top = np.interp([bottom, top], edges, cumulative)
    return float(below) + (faint if edges[0] <= bottom else 0), float(cumulative[-1] - up_to_top)


def _between_the_first_and_the_last(heights: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bars and their edges without the empty bars at both ends. At least one bar remains."""
    drawn = np.flatnonzero(heights) if heights.any() else [np.searchsorted(edges, 0)]
    return heights[drawn[0] : drawn[-1] + 1], edges[drawn[0] : drawn[-1] + 2]


def _set_share_axis(ax: Axes, heights: np.ndarray, yscale: str) -> None:
    """Set the limits of the vertical axis, with space above the highest bar for the dtype ranges and the legend."""
    tallest = float(heights.max()) or 1.0
    lowest = heights[heights > 0].min(initial=tallest) / 2 if yscale == "log" else 0.0
    ax.set_ylim(lowest, tallest * ((tallest / lowest) ** 0.7 if lowest else 1 / 0.6))
    ax.set_yscale(yscale)  # The axis limits are set first, because matplotlib cannot choose limits without bars.
    ax.yaxis.set_major_formatter("{x:g}")


def _draw_ranges(ax: Axes, dtype: Any) -> None:
    """Draw and label the ranges of a dtype, and draw the normal range of another dtype as a horizontal line.

    The ranges in which gradients become zero or overflow have a gray background.
    """
    bottom, normal, top = _range_of(dtype)
    left, right = ax.get_xlim()
    names = {"to zero": PALE, "subnormal": PALER, f"normal {dtype.name}": "white", "overflow": PALE}
    borders = left, bottom, normal, top, right
    place: Any = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": "small"}
    for (name, color), (start, end) in zip(names.items(), itertools.pairwise(borders), strict=True):
        rotation = 90 if end - start < 0.085 * (right - left) else 0  # The label of a narrow range is vertical.
        box = {"facecolor": color, "edgecolor": "none", "pad": 1.0}
        ax.axvspan(start, end, facecolor=color, edgecolor="none", zorder=0)
        ax.text((start + end) / 2, 0.985, name, rotation=rotation, bbox=box, **place)
    for border in borders[1:-1]:
        ax.axvline(border, color=GRAY, linewidth=0.8, linestyle=":", zorder=0.5)

    other = jnp.dtype(jnp.float16 if dtype == jnp.bfloat16 else jnp.bfloat16)
    _, normal, top = _range_of(other)
    line: Any = {"color": GRAY, "clip_on": False, "transform": ax.get_xaxis_transform()}
    ends = max(left, normal), min(right, top)
    ax.plot(ends, (0.91, 0.91), linewidth=1.2, **line)
    for end, marker in zip(ends, ("<" if left > normal else "|", ">" if right < top else "|"), strict=True):
        ax.plot(end, 0.91, marker, markersize=6, **line)
    ax.text((normal + top) / 2, 0.9, f"normal {other.name}: $2^{{{normal}}}$ to $2^{{{top}}}$", **place)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share == 0 or share >= 1e-4 else "< 0.01 %"
