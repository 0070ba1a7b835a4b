"""What came of the main job: a table and a sentence, JSON, a picture."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from os import PathLike
from typing import IO, Any

import numpy as np

import jax_lossscale as jls
from jax_lossscale.demo.job import Result

# Wong, Points of view: Color blindness, Nature Methods 2011; told apart by width and dashes as well.
_LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "#c4c4c4", "linewidth": 8.0, "solid_capstyle": "butt"},
    "float16": {"color": "#d55e00", "linewidth": 2.0},
    "float16_fixed": {"color": "#56b4e9", "linewidth": 3.2},
    "float16_dynamic": {"color": "black", "linewidth": 1.4, "linestyle": (0, (4, 2.5))},
    "float16_auto": {"color": "#009e73", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
}
# What `job.arms` computes with, in words.
_SETTINGS = {
    "float32": "float32",
    "float16": "float16, no loss scale",
    "float16_fixed": "float16, fixed: $2^{15}$",
    "float16_dynamic": "float16, dynamic: from $2^{32}$, doubled after 50 good steps",
    "float16_auto": "float16, automatic",
}
_SKIPPED = {"float16_dynamic": "x", "float16_auto": "o"}  # the markers of skipped steps


def print_table(results: dict[str, Result], file: IO[str] | None = None) -> None:
    """Print a line for each training, then the conclusion; by default, to standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("training", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("final\nloss", "PSNR", "zero\ngradients", "skipped\nsteps", "final\nscale", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.final_loss:.2e}",
            f"{psnr(result.final_loss):.1f} dB",
            _percent(result.zero_gradient_fraction),
            str(result.skipped_steps),
            f"2^{math.log2(result.final_loss_scale):g}" if result.final_loss_scale > 1 else "1",
            f"{result.seconds:.1f}",
        )
    console = Console(file=file, highlight=False)
    console.print(table)
    console.print("float16_dynamic begins far too high on purpose: DynamicLossScale(2.0**32, increment_period=50).")
    console.print(conclusion(results))


def psnr(loss: float) -> float:
    """The peak signal-to-noise ratio in dB, of a signal between 0 and 1 that has this mean squared error."""
    return -10 * float(np.log10(loss))


def conclusion(results: dict[str, Result]) -> str:
    """What the numbers say, in one sentence."""
    alone, dynamic, auto = (results[name] for name in ("float16", "float16_dynamic", "float16_auto"))
    return (
        f"Without loss scaling {_percent(alone.zero_gradient_fraction)} of the float16 gradient values were zero, and "
        f"training ended {_beside_float32(alone, results)}; with a dynamic loss scale "
        f"{_percent(dynamic.zero_gradient_fraction)} were, and it ended {_beside_float32(dynamic, results)}; with an "
        f"automatic one {_percent(auto.zero_gradient_fraction)} were, and it ended {_beside_float32(auto, results)}."
    )


def _beside_float32(result: Result, results: dict[str, Result]) -> str:
    reference = results["float32"].final_loss
    if not math.isfinite(result.final_loss + reference):
        return f"at a loss of {result.final_loss:.2e}, where float32 ended at {reference:.2e}"
    change = result.final_loss / reference - 1
    if abs(change) < 5e-5:
        return "at the loss of float32"
    return f"at a loss {_percent(abs(change))} {'above' if change > 0 else 'below'} that of float32"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2f} %"


def as_json(results: dict[str, Result], *, steps: int, seed: int) -> str:
    """The results, and the versions of the packages, as strict JSON, where a loss that is not finite is null."""
    fields = ("final_loss", "zero_gradient_fraction", "skipped_steps", "final_loss_scale", "seconds")
    arms = {name: {field: getattr(result, field) for field in fields} for name, result in results.items()}
    for arm in arms.values():
        if not math.isfinite(arm["final_loss"]):
            arm["final_loss"] = None
    versions = {"python": platform.python_version(), "jax_lossscale": jls.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy", "scikit-learn")}
    content = {"arms": arms, "steps": steps, "seed": seed, "versions": versions}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def draw(results: dict[str, Result], path: str | PathLike[str]) -> None:
    """Draw the losses, the gradients that vanished, and the loss scales that move, with the steps they skipped.

    The suffix of ``path`` gives the format of the file.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    style: Any = {"axes.grid": True, "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titleweight": "bold"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e6e6e6"}
    style |= {"legend.frameon": False, "lines.markeredgewidth": 1.6, "svg.hashsalt": "jax_lossscale"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 6.6), layout="constrained")  # a page's width: letters stay legible
        panels = figure.subplot_mosaic([["loss", "loss"], ["zeros", "scale"]], height_ratios=[1.3, 1])
        loss_axes, zeros_axes, scale_axes = panels["loss"], panels["zeros"], panels["scale"]

        steps = np.arange(1, len(results["float32"].trace.loss) + 1)
        for name, result in results.items():
            label = f"{_SETTINGS[name]} ({psnr(result.final_loss):.1f} dB)"
            loss_axes.plot(steps, result.trace.loss, label=label, **_LINES[name])
            zeros_axes.plot(steps, result.trace.zero_fraction, **_LINES[name])
        loss_axes.set(title="Training loss", ylabel="mean squared error", yscale="log")
        loss_axes.legend(title="products computed in, and loss scale (PSNR at the end)", alignment="left")
        zeros_axes.set(title="Gradient values that are zero", ylim=(-0.05, 1.05))
        zeros_axes.yaxis.set_major_formatter(PercentFormatter(1))

        for name, marker in _SKIPPED.items():
            trace = results[name].trace
            skipped = np.flatnonzero(np.diff(trace.skipped_steps, prepend=0)).tolist()
            style = _LINES[name] | {"linestyle": "-", "marker": marker, "markerfacecolor": "none"}
            label = f"{name.removeprefix('float16_')}: {len(skipped)} skipped"
            scales = np.append(trace.loss_scale, results[name].final_loss_scale)  # the last is the table's
            edges = np.append(steps, len(steps) + 1)
            scale_axes.plot(edges, scales, drawstyle="steps-mid", markevery=skipped, label=label, **style)
        scale_axes.set(title="Loss scale, and skipped steps")
        scale_axes.set_yscale("log", base=2)
        scale_axes.legend(loc="lower right")
        for axes in panels.values():
            axes.set(xlabel="step", xlim=(-0.015 * len(steps), 1.015 * len(steps)))
        figure.savefig(path, dpi=150)
