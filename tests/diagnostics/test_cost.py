"""The cost of reports in program runs, memory and reductions, and the progress that they print."""

import bisect
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workloads
from reading import primitives_of

import jax_lossscale as jls
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics import (
    _finding,
    _gradient_errors,
    _precision_probes,
    _report,
    _shadow,
    compare_gradients,
    find_precision,
    range_report,
)
from jax_lossscale.diagnostics._bits import reduced
from jax_lossscale.diagnostics._loss_call import check_call
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(("name", "reports"), [("healthy", 0), ("rounded_away", 1), ("square_too_large", 1)])
def test_comparison_computes_the_range_report_only_if_necessary(name, reports, monkeypatch):
    calls, ranges_at = [], _finding.ranges_at
    monkeypatch.setattr(_finding, "ranges_at", lambda *args: calls.append(args) or ranges_at(*args))
    fun, *args = getattr(workloads, name)()
    compare_gradients(fun, *args, loss_scales=[2.0**4])
    assert len(calls) == reports  # Each report computes each operation twice.


def deep(params, x):
    """Compute a loss with many layers, so that most of the memory is used by residuals."""
    x = x.astype(jnp.float16)
    for kernel in params:
        x = jax.nn.silu(x @ kernel.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def large(params, x):
    """Compute a loss with a large kernel, so that most of the memory is used by parameters."""
    return jnp.mean((x.astype(jnp.float16) @ params[0].astype(jnp.float16)).astype(jnp.float32) ** 2)


@pytest.fixture
def bytes_after_runs(monkeypatch):
    """Return a list to which each run of a function compiled by `jax.jit` appends the number of bytes in memory."""
    jit, sizes = jax.jit, []

    def measured(function, **options):
        compiled = jit(function, **options)

        def run(*args):
            results = jax.block_until_ready(compiled(*args))
            sizes.append(bytes_in_memory())
            return results

        return run

    monkeypatch.setattr(jax, "jit", measured)
    return sizes


def bytes_in_memory():
    # Other tests may keep arrays on a mesh in memory. Such arrays have no single pointer.
    arrays = [array for array in jax.live_arrays() if len(array.devices()) == 1]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())


def test_gradients_of_a_large_model_are_compared_within_three_times_its_memory(bytes_after_runs):
    before = bytes_in_memory()
    params, x = [jax.random.normal(jax.random.key(0), (512, 512))], jnp.ones((2, 512))
    report = compare_gradients(large, params, x)
    assert report.will_train
    # Two of the runs compute float32 gradients.
    assert len(bytes_after_runs) == len(report.loss_scales) + 2
    assert max(bytes_after_runs) - before <= 3.1 * params[0].nbytes


@pytest.mark.parametrize("name", ["healthy", "tiny_loss", "sum_for_a_mean", "square_too_large"])
def test_range_report_uses_the_recommended_scale_after_a_few_program_runs(name, monkeypatch):
    fun, *args = getattr(workloads, name)()
    gradients = TracedGradients(check_call("range_report", fun, args, {}, 0, False), jnp.dtype(jnp.float16))
    errors = _gradient_errors.errors_by_scale(gradients, None, iter)
    runs, bisect_left = [], bisect.bisect_left

    def counted(values, value, key):
        return bisect_left(values, value, key=lambda scale: runs.append(scale) or key(scale))

    monkeypatch.setattr(bisect, "bisect_left", counted)
    assert range_report(fun, *args).loss_scale == errors.start()
    assert 3 <= len(runs) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "params", "x"),
    [
        (deep, [jnp.full((32, 32), 0.1)] * 8, jnp.ones((4096, 32))),
        (large, [jnp.full((512, 512), 0.1)], jnp.ones((2, 512))),
    ],
)
def test_range_report_uses_at_most_four_times_the_memory_of_a_gradient(fun, params, x, monkeypatch):
    gradient = jax.jit(lambda *args: jls.value_and_scaled_grad(fun, 1.0)(*args))
    needed = gradient.lower(params, x).compile().memory_analysis()
    bytes_of_one = needed.argument_size_in_bytes + needed.output_size_in_bytes + needed.temp_size_in_bytes
    before = bytes_in_memory() - sum(array.nbytes for array in [*params, x])
    held = []
    equation = _shadow.ShadowEvaluator.equation

    def observed(self, eqn, inputs):
        results = equation(self, eqn, inputs)
        held.append(bytes_in_memory() - before)
        return results

    monkeypatch.setattr(_shadow.ShadowEvaluator, "equation", observed)
    range_report(fun, params, x)
    assert bytes_of_one / 4 < max(held) <= 4 * bytes_of_one


X = jnp.linspace(-2, 2, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("measured", "number"),
    [
        (lambda x: _shadow._measured(x.astype(jnp.float16), x, limits_of(jnp.dtype(jnp.float16)), True), 4),
        (lambda x: _precision_probes._statistics(x, x, jnp.float16, True), 2),
    ],
)
def test_measurement_of_an_array_takes_few_reductions(measured, number):
    """Each reduction is compiled separately for each operation or shape, which is the main cost of a report."""
    assert sum(name.startswith("reduce") for name in primitives_of(measured, X)) == number


def test_leaves_with_the_same_shape_share_a_program(monkeypatch):
    traced, tree = [], _gradient_errors._tree
    unscale = tree.unscale
    monkeypatch.setattr(tree, "unscale", lambda *args: traced.append(args[0][0].shape) or unscale(*args))
    shapes = [(7, 11)] * 4 + [(13,)] * 2  # No other test uses these shapes.
    leaves = {n: jnp.ones(shape) for n, shape in enumerate(shapes)}
    _gradient_errors.measure(leaves, leaves, 1.0)
    assert traced == [(7, 11), (13,)]


def test_combined_reductions_equal_those_of_numpy():
    x = np.asarray(X)
    expected = [np.abs(x).max(), np.abs(x).max(), (x > 0).sum(), np.square(x).sum()]
    assert list(map(float, reduced(largest=[X, -X], sums=[X > 0, jnp.square(X)]))) == pytest.approx(expected)
    assert [float(each) for each in reduced(largest=[jnp.zeros((0, 2))], sums=[jnp.zeros((0, 2)) > 0])] == [0, 0]
    assert all(map(jnp.isnan, reduced(largest=[X.at[0, 0].set(jnp.nan)], sums=[X.at[0, 0].set(jnp.nan)])))


@pytest.mark.parametrize("shape", [(8, 8), (64, 64), (5000,), (300, 300)])
@pytest.mark.parametrize("number", [0, -1, slice(None)])
def test_maximum_of_values_with_nan_is_nan(shape, number):
    """On a CPU, XLA ignores NaN in the maximum of 4096 or more floats."""
    x = jnp.ones(shape).ravel().at[number].set(jnp.nan).reshape(shape)
    assert jnp.isnan(jax.jit(lambda x: reduced(largest=[x])[0])(x))
    (measured,) = _gradient_errors.measure({"": x}, {"": x}, 1.0)
    assert np.isnan(measured.largest)


@pytest.mark.slow
def test_counts_above_2_to_the_24_are_exact():
    flags, twos = jnp.ones((2, 2**23 + 3), bool), jnp.full((2**12, 2**13), 2.0)
    assert int(reduced(sums=[flags])[0]) == 2**24 + 6
    assert int(reduced(sums=[twos])[0]) == 2**26
    (measured,) = _gradient_errors.measure({"": twos.ravel()}, {"": twos.ravel()}, 1.0)
    assert (measured.norm, measured.nonzero) == (2 * math.sqrt(2**25), 2**25)


REPORTS = [compare_gradients, range_report, find_precision]


def report_on_healthy(report, **options):
    _, *args = workloads.healthy()
    return report(jls.autocast(in_float32) if report is not find_precision else in_float32, *args, **options)


def in_float32(params, x):
    return jnp.mean((x @ params["layer0"]["kernel"]) ** 2)


@pytest.fixture
def bars(monkeypatch):
    """Replace `tqdm` by a function that only appends its options to a list, and return the list."""
    made = []
    stand_in = types.SimpleNamespace(tqdm=lambda sequence, **options: made.append(options) or sequence)
    monkeypatch.setitem(sys.modules, "tqdm.auto", stand_in)
    return made


@pytest.mark.parametrize(
    ("progress", "options"),
    [(None, {"disable": None, "delay": 5.0}), (True, {"disable": False}), (False, {"disable": True})],
)
def test_bar_is_shown_if_requested_or_after_five_seconds(progress, options, bars):
    """If `disable` is None, tqdm shows the bar only in terminals and notebooks."""
    assert list(_report.progress_bar("report", progress)([1, 2])) == [1, 2]
    assert bars == [{"desc": "report", "leave": False, **options}]


def test_warning_of_tqdm_about_a_missing_widget_is_not_shown(monkeypatch, tmp_path):
    pytest.importorskip("tqdm.auto")  # `monkeypatch` restores only modules that have been imported before.
    (tmp_path / "tqdm").mkdir()
    (tmp_path / "tqdm" / "__init__.py").touch()
    warning = "import warnings; warnings.warn('IProgress not found')"
    (tmp_path / "tqdm" / "auto.py").write_text(f"{warning}\ndef tqdm(sequence, **options): return sequence\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        monkeypatch.delitem(sys.modules, name)
    assert list(_report.progress_bar("report", True)([1, 2])) == [1, 2]


def test_bar_of_tqdm(capsys):
    pytest.importorskip("tqdm")
    assert list(_report.progress_bar("report", True)([1, 2])) == [1, 2]
    out, err = capsys.readouterr()
    assert (out, "report:   0%" in err) == ("", True)
    assert list(_report.progress_bar("report", None)([1, 2])) == [1, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("report", REPORTS)
def test_missing_tqdm_raises_an_error_only_if_a_bar_is_requested(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=f"{report.__name__}.*needs tqdm. Install the extra `progress`"):
        report_on_healthy(report, progress=True)
    assert list(_report.progress_bar(report.__name__, None)([1, 2])) == [1, 2]


@pytest.mark.parametrize("report", REPORTS)
def test_progress_function_wraps_the_steps_of_a_report(report):
    sizes, steps, closed = [], [], []

    def progress(sequence):
        sizes.append(len(sequence))
        try:
            for step in sequence:
                steps.append(step)
                yield step
        finally:
            closed.append(True)

    report_on_healthy(report, progress=progress)
    if report is find_precision:
        assert sizes == [30]
        assert steps == [*range(len(steps))]
    else:
        assert sizes == [len(steps)]
    assert len(steps) > 3
    assert closed  # The bar disappears as soon as the report is complete.


@pytest.mark.parametrize("report", REPORTS)
def test_invalid_progress_raises_an_error(report):
    with pytest.raises(ValueError, match=r"progress=...\)` must be a function, got 'yes'. True, False and None"):
        report(*workloads.healthy(), progress="yes")
