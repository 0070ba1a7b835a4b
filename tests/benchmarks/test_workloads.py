"""The small trainings of `benchmarks.workloads`, the traces of their gradients, and what is made of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls
from benchmarks import BENCHMARKS, __main__, accuracy, accuracy_docs, traces
from benchmarks.isolation import Progress
from benchmarks.traces import record
from benchmarks.workloads import WORKLOADS, training

pytestmark = pytest.mark.slow  # ten trainings, compiled

pytest.importorskip("sklearn")

# Sizes that compile and train fast, and steps that suffice to learn something.
SMALL = {
    "transformer": {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch": 8, "steps": 40},
    "convnet": {"widths": (4, 4), "batch": 32, "steps": 60},
    "gru": {"width": 16, "context": 8, "batch": 8, "steps": 40},
    "pinn": {"width": 16, "depth": 2, "points": 64, "steps": 40},
    "wgan_gp": {"width": 32, "batch": 64, "steps": 200},
    "diffusion": {"width": 64, "batch": 64, "steps": 150},
    "embeddings": {"vocabulary": 100, "width": 8, "batch": 64, "steps": 200},
    "many_outputs": {"width": 16, "batch": 32, "steps": 40},
    "tiny_loss": {"width": 16, "batch": 32, "steps": 40},
    "two_branches": {"width": 16, "batch": 32, "steps": 40},
}
# The statistics that batch norm starts with are wrong, and so is what the first steps make of them.
LEARNT = {"convnet": 0.98}


def small(name, **sizes):
    return WORKLOADS[name](**SMALL[name] | sizes)


def no_loss_scale(gradients):
    return jls.NoOpLossScale()


def begun_and_batch(workload):
    params, statistics = training.begin(workload, 0)
    return params, statistics, training.batch_of(workload, 0, 0)


def test_every_workload_is_tested():
    assert SMALL.keys() == WORKLOADS.keys()


@pytest.mark.parametrize("name", WORKLOADS)
def test_float32_learns(name):
    workload = small(name)
    outcome = training.compile_training(workload, jnp.float32, no_loss_scale)(seed=0)
    begun = float(jax.jit(workload.evaluate)(*training.begin(workload, 0)))
    assert outcome.losses.shape == (workload.steps,)
    assert 0 < outcome.final_loss < LEARNT.get(name, 0.9) * begun
    assert (outcome.skipped_steps, outcome.final_loss_scale) == (0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_networks_compute_in_the_dtype_and_losses_in_float32(name, dtype):
    workload = small(name)
    params, statistics, batch = begun_and_batch(workload)

    def value_and_grad(params, statistics, batch):
        return jax.value_and_grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.dtype(dtype))

    program = jax.make_jaxpr(value_and_grad)(params, statistics, batch)
    products = re.findall(r":(\w+)\[[^]]*\] = (?:dot_general|conv_general_dilated)\[", str(program))
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    assert set(products) == {short}
    (loss, _), grads = jax.eval_shape(value_and_grad, params, statistics, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, statistics, loss, grads))} == {"float32"}


# Of so few steps, those in which the automatic scale arrives are many: gradients in a small unit are lost in them.
ABOVE_FLOAT32 = {"tiny_loss": 0.01, "two_branches": 0.06}


@pytest.mark.parametrize("name", WORKLOADS)
def test_float16_under_the_found_policy_ends_where_float32_does(name):
    workload = small(name)
    exact = training.compile_training(workload, jnp.float32, no_loss_scale)(seed=0)
    arm = next(arm for arm in accuracy.arms() if arm.name == "autocast, found policy")
    found = training.compile_training(arm.rewritten(workload), arm.dtype, arm.loss_scale)(seed=0)
    assert found.final_loss == pytest.approx(float(exact.final_loss), rel=ABOVE_FLOAT32.get(name, 1e-3))
    assert found.skipped_steps <= 1
    assert found.final_loss_scale > 1


def test_a_skipped_step_changes_neither_parameters_nor_statistics():
    workload = small("convnet", steps=2)

    def far_too_high(gradients):
        return jls.FixedLossScale(2.0**100, skip_nonfinite=True)

    outcome = training.compile_training(workload, jnp.float16, far_too_high)(seed=0)
    assert outcome.skipped_steps == 2
    assert outcome.final_loss == jax.jit(workload.evaluate)(*training.begin(workload, 0))
    applied = training.compile_training(workload, jnp.float16, no_loss_scale)(seed=0)
    assert applied.final_loss != outcome.final_loss


def test_the_gradients_of_the_first_step_reach_what_makes_the_loss_scale():
    workload = small("tiny_loss", steps=2)
    suggested = jls.diagnostics.suggest_loss_scale
    outcome = training.compile_training(
        workload, jnp.float16, lambda gradients: jls.FixedLossScale(suggested(gradients()).loss_scale)
    )(seed=0)
    params, statistics, batch = begun_and_batch(workload)
    grads, _ = jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)
    assert outcome.final_loss_scale == suggested(grads).loss_scale
    assert outcome.zero_fraction < 0.01


@pytest.mark.parametrize("rounding", [training.AS_DRAWN, 0, 1, 2])
def test_rounded_weights(rounding):
    weights = np.array([0.0, 1.0, 1.0001, -0.3, 3e-5] * 20, np.float32)
    rounded = training.round_params([weights], jax.random.key(3), rounding)[0]
    nearest = weights.astype(np.float16).astype(np.float32)
    spacing = np.spacing(np.abs(weights).astype(np.float16)).astype(np.float32)
    if rounding == training.AS_DRAWN:
        np.testing.assert_array_equal(rounded, weights)
    elif rounding == 0:
        np.testing.assert_array_equal(rounded, nearest)
    else:
        assert (rounded == rounded.astype(np.float16)).all()
        assert (np.abs(rounded - weights) <= spacing).all()
        assert 20 < (rounded != nearest).sum() < 50  # of 60 that float16 does not hold
        assert (rounded == weights)[weights == nearest].all()


# Traces.


@pytest.fixture(scope="module")
def recorded_here():
    workload = small("two_branches", steps=5)
    return workload, record.record(workload)


def test_a_trace_says_what_is_largest_and_where_float16_overflows(recorded_here):
    workload, trace = recorded_here
    params, statistics, batch = begun_and_batch(workload)
    grads, _ = jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)
    assert trace.largest[0] == pytest.approx(
        max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)), rel=1e-6
    )

    @jax.jit
    def overflows(scale):
        grads, _ = jls.scaled_grad(workload.loss, scale, has_aux=True)(params, statistics, batch, jnp.float16)
        return ~jls.all_finite(grads)

    scales = 2.0 ** np.arange(0, 40)
    assert [bool(overflows(scale)) for scale in scales] == list(trace.inside[0] * scales >= 65520)
    assert not overflows(1.0)
    assert overflows(scales[-1])


def test_a_trace_has_an_entry_for_each_step(recorded_here):
    workload, trace = recorded_here
    assert trace.log2_largest.shape == trace.log2_inside.shape == (workload.steps,)
    assert (trace.log2_inside >= trace.log2_largest - 0.25).all()
    assert len(set(trace.log2_largest)) == workload.steps  # each step has its own


def test_traces_keep_their_values_in_a_file(tmp_path):
    trace = traces.Trace(np.array([-33.1, 0.0, 12.5, -np.inf]), np.array([-30.875, 3.125, 16.0, -np.inf]))
    traces.save(tmp_path / "here.npz", trace)
    loaded = traces.load(tmp_path / "here.npz")
    for field in traces.Trace._fields:
        np.testing.assert_allclose(getattr(loaded, field), getattr(trace, field), atol=1 / 512)
    np.testing.assert_array_equal(loaded.log2_inside, trace.log2_inside)
    assert loaded.largest[-1] == 0


def test_the_recorded_traces():
    recorded = traces.recorded()
    assert len(recorded) >= 6
    assert recorded.keys() <= WORKLOADS.keys()
    for name, trace in recorded.items():
        assert trace.log2_largest.shape == trace.log2_inside.shape == (WORKLOADS[name]().steps,)
        # Float16's own rounding may make the gradients smaller than they are, in single steps.
        assert (trace.log2_inside >= trace.log2_largest - 1.5).all()
        assert np.median(trace.log2_inside - trace.log2_largest) >= -0.125
    assert sum(path.stat().st_size for path in traces.FOLDER.glob("*.npz")) < 200_000


# The table. No network is trained for it here: what a training would give is known.

FINAL = {"float32": 1.0, "bfloat16": 1.5}
FINAL_BY_SCALE = {"NoOpLossScale": 2.0, "FixedLossScale": 1.002, "DynamicLossScale": 0.99, "AutoLossScale": np.nan}


@pytest.fixture
def trains_in_no_time(monkeypatch):
    def compile_training(workload, dtype, make_loss_scale):
        loss_scale = make_loss_scale(lambda: {"kernel": jnp.ones(3)})
        final = FINAL.get(jnp.dtype(dtype).name, FINAL_BY_SCALE[type(loss_scale).__name__])

        def train(seed, rounding=training.AS_DRAWN):
            rounded = 1 + 0.01 * (rounding + 1) * (-1) ** rounding if rounding >= 0 else 1.0
            return training.Outcome(final * rounded, 0.25, 3, float(loss_scale()), np.ones(2))

        return train

    monkeypatch.setattr(accuracy, "compile_training", compile_training)


@pytest.fixture
def tables(trains_in_no_time):
    seen = []
    progress = Progress(lambda fraction, what: seen.append((fraction, what)))
    result = accuracy.run(quick=False, progress=progress, workloads=("pinn", "tiny_loss"))
    assert seen[-1][0] == 1
    return result


def test_the_tables_hold_every_workload_and_arm(tables):
    summary, details = tables
    arms = [arm.name for arm in accuracy.arms()]
    assert [row[0] for row in summary.rows] == ["pinn", "tiny_loss"]
    assert [heading for heading, _ in summary.columns[2:]] == arms[2:]
    assert [row[:2] for row in details.rows] == [[name, arm] for name in ("pinn", "tiny_loss") for arm in arms]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_what_lies_within_the_noise_floor_is_called_so(tables):
    summary, details = tables
    # Three roundings lead 1, 2 and 3 % away.
    assert summary.rows[0][1] == pytest.approx(3)
    cells = dict(zip([heading for heading, _ in summary.columns], summary.rows[0], strict=True))
    assert cells["bfloat16"] == "+50.0 %"
    assert cells["float16"] == "+100 %"
    assert cells["float16, fixed"] == "noise (+0.20 %)"
    assert cells["float16, dynamic"] == "noise (-1.0 %)"
    headings = [heading for heading, _ in details.columns]
    rows = {row[1]: dict(zip(headings, row, strict=True)) for row in details.rows}
    assert rows["float16, fixed"][""] == "noise"
    assert rows["float16"][""] == ""
    assert [rows["float32, weights rounded"][f"seed {seed}"] for seed in range(3)] == pytest.approx([3, 3, 3])
    assert (rows["float16, dynamic"]["skipped"], rows["float16, dynamic"]["final scale"]) == (3, "2^15")
    assert rows["float16"]["zero gradients"] == 0.25


def test_a_training_that_ends_as_nan_is_no_number_and_no_noise():
    outcome = training.Outcome(np.nan, np.nan, 0, 1.0, np.ones(1))
    percent = accuracy._percent(outcome, training.Outcome(1.0, 0, 0, 1.0, np.ones(1)))
    one = accuracy.Compared("pinn", "float16", (percent,) * 3, 5.0, (outcome,) * 3)
    assert not one.within_floor
    assert accuracy._beside_noise(one) == "NaN"
    assert accuracy._row(one, 3, 4)[2:7] == [None] * 4 + [""]  # no fourth seed


def test_where_chance_decides_most_there_is_one_seed_more(trains_in_no_time):
    progress = Progress(lambda fraction, what: None)
    _, details = accuracy.run(quick=False, progress=progress, workloads=("pinn", "wgan_gp"))
    headings = [heading for heading, _ in details.columns]
    shown = {row[0]: row[headings.index("seed 3")] for row in details.rows if row[1] == "bfloat16"}
    assert shown == {"pinn": "", "wgan_gp": pytest.approx(50)}
    numbers = accuracy_docs._percents(details)
    assert (len(numbers["pinn", "bfloat16"]), len(numbers["wgan_gp", "bfloat16"])) == (3, 4)


def test_the_tables_and_the_figure_go_into_docs(tables, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(accuracy_docs, "_FOLDER", tmp_path)
    page = tmp_path / "accuracy.md"
    page.write_text(f"before\n{accuracy_docs._BEGIN}\nold\n{accuracy_docs._END}\nafter\n")
    accuracy_docs.write(*tables)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| pinn | 3.00 % | +50.0 % |" in re.sub(" +", " ", text)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    accuracy_docs.write(*tables)
    assert page.read_text() == text

    page.write_text("nowhere to write")
    with pytest.raises(ValueError, match="must hold the lines"):
        accuracy_docs.write(*tables)


# The command line.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("accuracy --workload nothing", "there is no workload 'nothing'"),
        ("--workload pinn", "belong to the benchmark accuracy"),
        ("finite --docs", "belong to the benchmark accuracy"),
        ("accuracy --docs --quick", "--docs needs every workload in full"),
        ("accuracy --docs --workload pinn", "--docs needs every workload in full"),
        ("accurate", "there is no benchmark 'accurate'"),
    ],
)
def test_options_that_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit_:
        __main__._parse(arguments.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_accuracy_runs_only_where_it_is_named():
    assert __main__._parse([]).benchmarks == list(BENCHMARKS)
    assert "accuracy" not in BENCHMARKS
    options = __main__._parse("accuracy --workload pinn --workload gru --workload pinn".split())
    assert options.benchmarks == ["accuracy"]
    assert options.for_accuracy == {"workloads": ("pinn", "gru"), "docs": False}
