"""Diagnostics for half-precision training: reports on gradients, skipped steps, loss scales and dtypes."""

from jax_lossscale.diagnostics._autocast_report import AutocastReport as AutocastReport
from jax_lossscale.diagnostics._autocast_report import autocast_report as autocast_report
from jax_lossscale.diagnostics._compare_gradients import GradientComparison as GradientComparison
from jax_lossscale.diagnostics._compare_gradients import compare_gradients as compare_gradients
from jax_lossscale.diagnostics._explain import Explanation as Explanation
from jax_lossscale.diagnostics._explain import explain as explain
from jax_lossscale.diagnostics._exponents import ExponentHistogram as ExponentHistogram
from jax_lossscale.diagnostics._exponents import LossScaleSuggestion as LossScaleSuggestion
from jax_lossscale.diagnostics._exponents import Underflow as Underflow
from jax_lossscale.diagnostics._exponents import exponent_histogram as exponent_histogram
from jax_lossscale.diagnostics._exponents import suggest_loss_scale as suggest_loss_scale
from jax_lossscale.diagnostics._exponents import underflow_fraction as underflow_fraction
from jax_lossscale.diagnostics._find_precision import PrecisionReport as PrecisionReport
from jax_lossscale.diagnostics._find_precision import find_precision as find_precision
from jax_lossscale.diagnostics._in_precision import in_precision as in_precision
from jax_lossscale.diagnostics._lost_updates import LostUpdates as LostUpdates
from jax_lossscale.diagnostics._lost_updates import lost_updates as lost_updates
from jax_lossscale.diagnostics._nonfinite import NonfiniteReport as NonfiniteReport
from jax_lossscale.diagnostics._nonfinite import nonfinite_report as nonfinite_report
from jax_lossscale.diagnostics._range_report import RangeReport as RangeReport
from jax_lossscale.diagnostics._range_report import range_report as range_report
from jax_lossscale.diagnostics._simulate import Simulation as Simulation
from jax_lossscale.diagnostics._simulate import simulate as simulate

__all__ = sorted(name for name in globals() if not name.startswith("_"))
