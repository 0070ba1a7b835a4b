"""Diagnostics for half-precision training: reports on gradients, skipped steps, loss scales and dtypes."""

from jax_lossscale.diagnostics._autocast_report import AutocastReport, autocast_report
from jax_lossscale.diagnostics._compare_gradients import GradientComparison, compare_gradients
from jax_lossscale.diagnostics._explain import Explanation, explain
from jax_lossscale.diagnostics._exponents import (
    ExponentHistogram,
    LossScaleSuggestion,
    Underflow,
    exponent_histogram,
    suggest_loss_scale,
    underflow_fraction,
)
from jax_lossscale.diagnostics._find_precision import PrecisionReport, find_precision
from jax_lossscale.diagnostics._in_precision import in_precision
from jax_lossscale.diagnostics._lost_updates import LostUpdates, lost_updates
from jax_lossscale.diagnostics._nonfinite import NonfiniteReport, nonfinite_report
from jax_lossscale.diagnostics._range_report import RangeReport, range_report
from jax_lossscale.diagnostics._simulate import Simulation, simulate

__all__ = [
    "AutocastReport",
    "Explanation",
    "ExponentHistogram",
    "GradientComparison",
    "LossScaleSuggestion",
    "LostUpdates",
    "NonfiniteReport",
    "PrecisionReport",
    "RangeReport",
    "Simulation",
    "Underflow",
    "autocast_report",
    "compare_gradients",
    "explain",
    "exponent_histogram",
    "find_precision",
    "in_precision",
    "lost_updates",
    "nonfinite_report",
    "range_report",
    "simulate",
    "suggest_loss_scale",
    "underflow_fraction",
]
