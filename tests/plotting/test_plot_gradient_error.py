"""Contents of the Axes that `plot_gradient_error` draws."""

import dataclasses
import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from jax_lossscale.diagnostics import GradientComparison
from jax_lossscale.diagnostics._gradient_errors import LeafGradientError
from jax_lossscale.plotting import plot_gradient_error

pytestmark = pytest.mark.ci

INF = math.inf


def leaf(path, errors, nonfinite=(0.0, 0.0, 0.0), rounding=0.0):
    return LeafGradientError(
        path=path,
        shape=(4,),
        norm=2.0,
        largest=1.0,
        smallest=1.0,
        nonzero=4,
        relative_error=tuple(errors),
        lost=(0.0, 0.0, 0.0),
        nonfinite=tuple(nonfinite),
        rounding=rounding,
    )


def comparison(leaves, total, **changes):
    made = GradientComparison(
        verdict="It will train; start from 2^4.",
        cause="none",
        will_train=True,
        loss_scale=16.0,
        inaccurate_leaves=(),
        dtype="float16",
        loss_scales=(1.0, 16.0, 256.0),
        leaves=tuple(leaves),
        total=total,
        value=1.0,
        reference_value=1.0,
        opaque_operations=(),
    )
    return dataclasses.replace(made, **changes)


FALLING = comparison(
    [leaf("a", [1.0, 0.01, INF], [0, 0, 0.5]), leaf("b", [1.0, 0.0, 0.02])],
    leaf("all leaves", [1.0, 0.005, INF], [0, 0, 0.25]),
)


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_each_leaf_has_a_line_and_the_total_has_a_thick_line(ax):
    assert plot_gradient_error(FALLING, ax=ax) is ax
    assert legend(ax) == ["all leaves", "one leaf (2)", "overflow", "start here"]
    total, first, second, *_ = ax.lines
    np.testing.assert_array_equal(total.get_xdata(), [1, 16, 256])
    np.testing.assert_array_equal(total.get_ydata(), [1, 0.005, np.nan])
    np.testing.assert_array_equal(first.get_ydata(), [1, 0.01, np.nan])
    assert total.get_linewidth() > 2 * first.get_linewidth()
    # Zero is drawn at 1e-6, because the axis is logarithmic.
    np.testing.assert_array_equal(second.get_ydata(), [1, 1e-6, 0.02])


def test_overflow_and_the_recommended_scale_are_marked(ax):
    found = lines(plot_gradient_error(FALLING, ax=ax))
    assert found["overflow"].get_xdata().tolist() == [256]
    assert found["start here"].get_xdata() == [16, 16]


def test_axis_labels_and_ticks(ax):
    plot_gradient_error(FALLING, ax=ax)
    ax.figure.draw_without_rendering()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loss scale", "relative error of float16 gradients")
    low, high = ax.get_ylim()
    shown = [tick.label1.get_text() for tick in ax.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert {"1 %", "100 %"} <= set(shown)
