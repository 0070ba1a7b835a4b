"""Functions that output the results of the demonstration as a table with a conclusion, and as a plot."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import numpy as np

from jax_lossscale.demo.job import TrainingRun

# The colors are from Wong, Points of view: Color blindness, Nature Methods 2011. The lines in the plot also differ in
# line style.
_LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "#c4c4c4", "linewidth": 8.0, "solid_capstyle": "butt"},
    "float16": {"color": "#d55e00", "linewidth": 2.0},
    "float16_fixed": {"color": "#56b4e9", "linewidth": 3.2},
    "float16_dynamic": {"color": "black", "linewidth": 1.4, "linestyle": (0, (4, 2.5))},
    "float16_auto": {"color": "#009e73", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
}
# Text for the legend that describes the settings in `job.arms`.
_SETTINGS = {
    "float32": "float32",
    "float16": "float16, no loss scale",
    "float16_fixed": "float16, fixed: 2^15",
    "float16_dynamic": "float16, dynamic: from 2^32, doubled after 50 finite steps",
    "float16_auto": "float16, automatic",
}
_SKIPPED = {"float16_dynamic": "x", "float16_auto": "o"}  # The markers for skipped steps.


def print_table(results: dict[str, TrainingRun]) -> None:
    """Print a table with one row per training run and then the conclusion."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("training", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("final\nloss", "PSNR", "zero\ngradients", "skipped\nsteps", "final\nscale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        losses = f"{result.final_loss:.2e}", f"{psnr(result.final_loss):.1f} dB"
        gradients = _percent(result.zero_gradient_fraction), str(result.skipped_steps)
        scale = f"2^{math.log2(result.final_loss_scale):g}" if result.final_loss_scale > 1 else "1"
        table.add_row(name, *losses, *gradients, scale)
    console = Console(highlight=False)
    console.print(table)
    console.print("float16_dynamic starts at a loss scale that is far too high. Each skipped step halves this scale.")
    for name in ("float16", "float16_dynamic", "float16_auto"):
        zeros, loss = _percent(results[name].zero_gradient_fraction), _beside_float32(name, results)
        console.print(f"{name}: {zeros} of the gradient values were zero, and the final loss was {loss}.")


def psnr(loss: float) -> float:
    """Return the peak signal-to-noise ratio in dB for a mean squared error ``loss`` and a peak signal of 1."""
    return -10 * float(np.log10(loss))


def _beside_float32(name: str, results: dict[str, TrainingRun]) -> str:
    """Return a phrase that compares the final loss of a training run with the final loss in float32."""
    loss, reference = results[name].final_loss, results["float32"].final_loss
    change = loss / reference - 1
    if abs(change) < 5e-5:
        return "the same as in float32"
    return f"{_percent(abs(change))} {'higher' if change > 0 else 'lower'} than in float32"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2f}%"


def draw(results: dict[str, TrainingRun], path: str | PathLike[str]) -> None:
    """Plot the losses and zero-gradient fractions of all training runs, and the dynamic and automatic loss scales.

    Markers show the skipped steps. The suffix of ``path`` determines the format of the file.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    style: Any = {"axes.grid": True, "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titleweight": "bold"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e6e6e6"}
    style |= {"legend.frameon": False, "lines.markeredgewidth": 1.6, "svg.hashsalt": "jax_lossscale"}
    with matplotlib.rc_context(style):
        # At this figure size, the text is legible if the plot is as wide as a page.
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        panels = figure.subplot_mosaic([["loss", "zeros"], ["loss", "scale"]], width_ratios=[1.8, 1])
        for name, result in results.items():
            trace, steps = result.trace, np.arange(1, len(result.trace.loss) + 1)
            label = f"{_SETTINGS[name]} ({psnr(result.final_loss):.1f} dB)"
            panels["loss"].plot(steps, trace.loss, label=label, **_LINES[name])
            panels["zeros"].plot(steps, trace.zero_fraction, **_LINES[name])
            if name in _SKIPPED:
                skipped = np.flatnonzero(np.diff(trace.skipped_steps, prepend=0)).tolist()
                line = _LINES[name] | {"linestyle": "-", "marker": _SKIPPED[name], "markerfacecolor": "none"}
                label = f"{name.removeprefix('float16_')}: {len(skipped)} skipped"
                line |= {"drawstyle": "steps-mid", "markevery": skipped, "label": label}
                panels["scale"].plot(steps, trace.loss_scale, **line)
        panels["loss"].set(title="Training loss", ylabel="mean squared error", yscale="log")
        panels["loss"].legend(title="matmul dtype and loss scale (final PSNR)", alignment="left")
        panels["zeros"].set(title="Gradient values that are zero", ylim=(-0.05, 1.05))
        panels["zeros"].yaxis.set_major_formatter(PercentFormatter(1))
        panels["scale"].set(title="Loss scale after each step")
        panels["scale"].set_yscale("log", base=2)
        panels["scale"].legend(loc="lower right")
        for axes in panels.values():
            axes.set(xlabel="step", xlim=(-0.015 * len(steps), 1.015 * len(steps)))
        figure.savefig(path, dpi=150)
