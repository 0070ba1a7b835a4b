"""Contents of the Axes that the functions of `jax_lossscale.plotting` draw."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from programs.starting import run_python

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, exponent_histogram, underflow_fraction
from jax_lossscale.plotting import plot_exponents, plot_gradient_error, plot_loss_scale, plot_run

pytestmark = pytest.mark.ci

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


@pytest.fixture
def four_axes():
    return Figure(layout="constrained").subplots(4, sharex=True)


def numbers():
    """Return log-normal gradients of both signs, some of which are zero. No value lies at a limit of float16."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(np.log(2e-7), 2.4, 4000)) * rng.choice([-1, 1], 4000)
    values[:1000] = 0
    return values.astype(np.float32)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def legend_title(ax):
    return ax.get_legend().get_title().get_text()


def histograms(ax):
    """Return heights and edges of the outlines, in the order of the legend, and of the hatched areas."""
    patches = [patch for patch in ax.patches if isinstance(patch, StepPatch)]
    outlines = [patch.get_data()[:2] for patch in patches if not patch.get_hatch()]
    return outlines, [patch.get_data()[:2] for patch in patches if patch.get_hatch()]


def drawn(ax):
    """Draw the figure, which must not cause a warning, and return the tick labels of both axes."""
    ax.figure.draw_without_rendering()
    visible = []
    for axis in ax.xaxis, ax.yaxis:
        low, high = axis.get_view_interval()
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        visible.append([tick.label1.get_text() for tick in ticks])
    return visible


def points(line):
    x, y = line.get_data()
    return np.asarray(x).tolist(), np.asarray(y).tolist()


# --- Histogram of exponents ---


@pytest.mark.parametrize("log2_scale", [0, 15, -30, 60])
def test_bars_are_percentages_per_power_of_two_and_the_scale_shifts_them(ax, log2_scale):
    plot_exponents({"kernel": numbers()}, 2.0**log2_scale, ax=ax)
    values = numbers()[1000:]
    exponents = np.floor(np.log2(np.abs(values.astype(np.float64)))).astype(int)
    edges = np.arange(exponents.min(), exponents.max() + 2)
    shares = 100 * np.bincount(exponents - exponents.min()) / len(values)
    outlines, _ = histograms(ax)
    assert len(outlines) == (1 if log2_scale == 0 else 2)
    for (heights, where), moved in zip(outlines, (0, log2_scale), strict=False):
        np.testing.assert_allclose(heights, shares)
        np.testing.assert_array_equal(where, edges + moved)
    assert ax.get_ylim()[1] > shares.max()
    left, right = ax.get_xlim()
    assert left < min(-25, edges[0] + min(0, log2_scale))
    assert right > max(16, edges[-1] + max(0, log2_scale))


@pytest.mark.parametrize("log2_scale", [0, 4, 15, 31, -3])
def test_legend_states_the_effect_of_a_cast_to_float16(ax, log2_scale):
    plot_exponents({"kernel": numbers()}, 2.0**log2_scale, ax=ax)
    values = numbers()[1000:]

    def tick_labels(scale):
        with np.errstate(over="ignore"):
            cast = (values * np.float32(scale)).astype(np.float16)
        lost, over = 100 * np.mean(cast == 0), 100 * np.mean(np.isinf(cast))
        return lost, f"{lost:.3g} % become zero" + (f", {over:.3g} % overflow" if over else "")

    before, words = tick_labels(1)
    after, scaled_words = tick_labels(2.0**log2_scale)
    rescued = f" ({before - after:.3g} % rescued)" if after < before else ""
    expected = [f"gradients: {words}", f"times $2^{{{log2_scale}}}$: {scaled_words}{rescued}"]
    assert legend(ax) == expected[: 1 if log2_scale == 0 else 2]
    assert legend_title(ax) == "not drawn: 25 % exactly zero"
    assert ("overflow" in scaled_words) == (log2_scale == 31)  # Only one of the scales causes an overflow.
    assert before == pytest.approx(100 * float(underflow_fraction(numbers()).zero), rel=1e-5)


def test_only_underflow_and_overflow_are_hatched(ax):
    values = np.array([2.0**-27, 2.0**-26, 1.5 * 2.0**-25, 1.0, 2.0**5, 2.0**6], np.float32)
    plot_exponents(values, 2.0**10, ax=ax)
    _, hatched = histograms(ax)
    bars = [list(zip(edges[:-1], edges[1:], heights, strict=True)) for heights, edges in hatched]
    areas = [[(left, right, height) for left, right, height in row if left < right and height] for row in bars]
    sixth = pytest.approx(100 / 6)
    assert areas == [[(-27, -26, sixth), (-26, -25, sixth)], [(16, 17, sixth)]]


SITUATIONS = {
    # Each entry contains the pytree, the loss scale, the legend and the title of the legend.
    "a loss scale": ([1.0], jls.DynamicLossScale(8.0), [..., "times $2^{3}$: 0 % become zero"], ""),
    "very small percentage": ([1e-9] + [1.0] * 20000, 1, ["gradients: < 0.01 % become zero"], ""),
    "NaN and zeros": ([NAN, 0.0, 0.0, 1e-9], 1, [...], "not drawn: 50 % exactly zero, 25 % not finite"),
    "fractional power of two": ([2.0**-26] * 4, 2.0**0.5, [..., "times 1.41421: 50 % become zero (50 % rescued)"], ""),
    "subnormal numbers of float32": (
        np.array([1e-40, 1.0], np.float32), 2.0**15,
        ["gradients: 50 % become zero", "times $2^{15}$: 50 % become zero"],
        "not drawn: 50 % subnormal in their own dtype",
    ),
    "histogram of subnormal numbers": (
        exponent_histogram(np.array([2.0**-20, 1.0], np.float16)), 1,
        ["gradients: 0 % become zero"],
        "not drawn: 50 % subnormal in their own dtype",
    ),
    "other types of leaves": ({"step": 3, "none": None, "kernel": jnp.ones(2)}, 1, ["gradients: 0 % become zero"], ""),
}  # fmt: skip


@pytest.mark.parametrize("yscale", ["linear", "log"])
@pytest.mark.parametrize(("tree", "loss_scale", "labels", "title"), SITUATIONS.values(), ids=SITUATIONS)
def test_legends_of_special_inputs(ax, tree, loss_scale, labels, title, yscale):
    if isinstance(tree, list):
        tree = np.array(tree, np.float32)
    assert plot_exponents(tree, loss_scale, yscale=yscale, ax=ax) is ax
    drawn(ax)
    assert ax.get_yscale() == yscale
    assert [label if expected is not ... else ... for label, expected in zip(legend(ax), labels, strict=True)] == labels
    assert legend_title(ax) == title


# --- Curves over the training steps ---

# steps:  1     2     3     4     5     6     7    8
SCALES = [16.0, 16.0, 8.0, 8.0, 16.0, 16.0, NAN, 4.0]
SKIPPED = [False, True, True, False, False, False, False, True]


def test_plot_loss_scale_draws_curve_skips_and_growths(ax):
    assert plot_loss_scale(SCALES, SKIPPED, ax=ax) is ax
    curve, skips, growths = ax.lines
    np.testing.assert_array_equal(curve.get_data(), [range(1, 9), SCALES])
    assert curve.get_drawstyle() == "steps-mid"
    assert points(skips) == ([2, 3, 8], [16.0, 8.0, 4.0])
    assert points(growths) == ([5], [16.0])
    assert legend(ax) == ["skipped step (3)", "growth (1)"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale (power of two)")
    assert drawn(ax)[1] == ["$\\mathdefault{2^{2}}$", "$\\mathdefault{2^{3}}$", "$\\mathdefault{2^{4}}$"]
    low, high = ax.get_ylim()
    assert low < 4
    assert high > 16


HISTORY = {
    "loss": [4.0, NAN, 2.0, 1.5, INF, 1.0, 0.5, 0.25],
    "loss_scale": [16.0, 8.0, 8.0, 8.0, 4.0, 4.0, 8.0, 8.0],
    "skipped": [False, True, False, False, True, False, False, False],
    "underflow": [0.5, 0.25, NAN, 0.125, NAN, NAN, 0.25, 0.5],
}
TITLES = ["loss", "loss scale (power of two)", "skipped steps (total)", "underflow (% of gradients)"]


def test_plot_run_draws_all_panels(four_axes):
    axes = plot_run(HISTORY, axes=four_axes)
    assert axes == tuple(four_axes)
    assert [ax.get_title("left") for ax in axes] == TITLES
    assert [ax.get_xlabel() for ax in axes] == ["", "", "", "step"]
    loss, scale, total, underflow = (ax.lines[0] for ax in axes)
    for line, expected in [
        (loss, [4.0, NAN, 2.0, 1.5, NAN, 1.0, 0.5, 0.25]),
        (scale, HISTORY["loss_scale"]),
        (total, [0, 1, 1, 1, 2, 2, 2, 2]),
        (underflow, [50, 25, NAN, 12.5, NAN, NAN, 25, 50]),
    ]:
        np.testing.assert_array_equal(line.get_data(), [range(1, 9), expected])
    assert [ax.get_yscale() for ax in axes] == ["log", "log", "linear", "linear"]
    gaps = axes[0].lines[1]
    assert gaps.get_xdata().tolist() == [2, 5]
    assert gaps.get_transform() == axes[0].get_xaxis_transform()  # The markers are at the bottom of the Axes.
    assert legend(axes[0]) == ["not finite (2)"]
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert drawn(axes[3])[0] == [*"12345678"]
    assert drawn(axes[2])[1] == [*"012"]


def test_plot_run_accepts_a_list_of_metrics(four_axes):
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(8.0, increment_period=2))
    params = jnp.ones(2)
    state = tx.init(params)
    step = jax.jit(tx.update_and_apply)
    history = []
    for loss, grads in (3.0, 1.0), (2.0, jnp.inf), (1.5, 1.0), (NAN, 1.0), (1.0, 1.0):
        params, state = step(jnp.full(2, grads), state, params, value=loss)
        history.append({"loss": loss, **jls.metrics(state)})
    loss, scale, total = plot_run(history, axes=four_axes[:3])
    np.testing.assert_array_equal(loss.lines[0].get_ydata(), [3.0, 2.0, 1.5, NAN, 1.0])
    assert scale.lines[0].get_ydata().tolist() == [8.0, 4.0, 4.0, 4.0, 8.0]
    # The fourth step is skipped because its loss is NaN, although its gradients are finite.
    assert points(scale.lines[1]) == ([2, 4], [4.0, 4.0])
    assert points(scale.lines[2]) == ([5], [8.0])
    assert total.lines[0].get_ydata().tolist() == [0, 1, 1, 2, 2]


# --- Gradient errors ---


def test_plot_gradient_error_draws_a_line_for_each_leaf_and_a_thick_line_for_the_total(ax):
    x = {"exact": jnp.ones(1), "overflows": jnp.full(1, 20.01), "underflows": jnp.full(1, 2e-8)}

    def loss(params):
        params = jls.cast_floating(jls.cast_floating(params, jnp.float16), jnp.float32)
        return sum(jnp.sum(params[name] * x[name]) for name in x)

    report = compare_gradients(loss, jax.tree.map(jnp.ones_like, x), loss_scales=[1.0, 2.0**8, 2.0**12])
    assert plot_gradient_error(report, ax=ax) is ax
    assert legend(ax) == ["all leaves", "one leaf (3)", "overflow", "start here"]
    total, *leaves, overflow, start = ax.lines
    underflows, overflows, _ = report
    for line, expected in [
        (total, [*report.total.relative_error[:2], NAN]),
        (leaves[0], underflows.relative_error),
        (leaves[1], [*overflows.relative_error[:2], NAN]),
        (leaves[2], [1e-6] * 3),  # Zero is drawn at 1e-6, because the axis is logarithmic.
    ]:
        np.testing.assert_array_equal(line.get_data(), [report.loss_scales, expected])
    assert total.get_linewidth() > 2 * leaves[0].get_linewidth()
    assert overflow.get_xdata().tolist() == [2.0**12]
    assert start.get_xdata() == [2.0**8, 2.0**8]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loss scale", "relative error of float16 gradients")
    assert {"1 %", "100 %"} <= {*drawn(ax)[1]}


# --- Imports of matplotlib ---

WITHOUT_PYPLOT = """
import jax_lossscale.plotting, sys
print("matplotlib" in sys.modules)
import numpy as np
from matplotlib.figure import Figure
from jax_lossscale.plotting import *
axes = Figure().subplots()
plot_exponents(np.ones(2, np.float32), 8.0, ax=axes)
plot_loss_scale([8.0, 4.0], ax=axes)
plot_run({"loss": [8.0, 4.0]}, axes=axes)
print("matplotlib.pyplot" in sys.modules)
"""


@pytest.mark.slow
def test_matplotlib_and_pyplot_are_only_imported_when_needed():
    assert run_python("-c", WITHOUT_PYPLOT).split() == ["False", "False"]


CALLS = {
    "plot_exponents": lambda: plot_exponents(np.ones(2, np.float32)),
    "plot_loss_scale": lambda: plot_loss_scale([8.0, 4.0]),
    "plot_run": lambda: plot_run({"loss": [8.0, 4.0]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_matplotlib_the_error_names_the_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=rf"`{name}`.*the extra `plot`.*`pip install matplotlib`"):
        CALLS[name]()
