"""The small trainings of `benchmarks.workloads`, and the traces that are recorded of their gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls
from benchmarks import __main__, accuracy, traces
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
# Of so few steps, those in which the automatic scale arrives are many: gradients in a small unit are lost in them.
ABOVE_FLOAT32 = {"tiny_loss": 0.01, "two_branches": 0.06}


def small(name, **sizes):
    return WORKLOADS[name](**SMALL[name] | sizes)


def no_loss_scale(gradients):
    return jls.NoOpLossScale()


@pytest.mark.parametrize("name", WORKLOADS)
def test_float32_learns_and_float16_under_the_found_policy_ends_where_it_does(name):
    workload = small(name)
    exact = training.compile_training(workload, jnp.float32, no_loss_scale)(seed=0)
    begun = float(jax.jit(workload.evaluate)(*training.begin(workload, 0)))
    assert 0 < exact.final_loss < LEARNT.get(name, 0.9) * begun
    assert (exact.skipped_steps, exact.final_loss_scale) == (0, 1)
    arm = next(arm for arm in accuracy.arms() if arm.name == "autocast, found policy")
    found = training.compile_training(arm.rewritten(workload), arm.dtype, arm.loss_scale)(seed=0)
    assert found.final_loss == pytest.approx(float(exact.final_loss), rel=ABOVE_FLOAT32.get(name, 1e-3))
    assert found.skipped_steps <= 1
    assert found.final_loss_scale > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_networks_compute_in_the_dtype_and_losses_in_float32(name, dtype):
    workload = small(name)
    params, statistics = training.begin(workload, 0)
    batch = training.batch_of(workload, 0, 0)

    def value_and_grad(params, statistics, batch):
        return jax.value_and_grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.dtype(dtype))

    program = jax.make_jaxpr(value_and_grad)(params, statistics, batch)
    products = re.findall(r":(\w+)\[[^]]*\] = (?:dot_general|conv_general_dilated)\[", str(program))
    assert set(products) == {{"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]}
    (loss, _), grads = jax.eval_shape(value_and_grad, params, statistics, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, statistics, loss, grads))} == {"float32"}


def test_a_skipped_step_changes_neither_parameters_nor_statistics():
    workload = small("convnet", steps=2)
    outcome = training.compile_training(
        workload, jnp.float16, lambda gradients: jls.FixedLossScale(2.0**100, skip_nonfinite=True)
    )(seed=0)
    assert outcome.skipped_steps == 2
    # The program that draws the parameters must be the training's own: another one, or none, rounds some otherwise.
    begin = jax.jit(training._begin, static_argnums=0)(workload, np.int32(0), np.int32(training.AS_DRAWN))
    assert outcome.final_loss == jax.jit(workload.evaluate)(*begin)
    applied = training.compile_training(workload, jnp.float16, no_loss_scale)(seed=0)
    assert applied.final_loss != outcome.final_loss


def test_a_trace_says_what_is_largest_and_where_float16_overflows():
    workload = small("two_branches", steps=5)
    trace = record.record(workload)
    params, statistics = training.begin(workload, 0)
    batch = training.batch_of(workload, 0, 0)
    grads, _ = jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    assert trace.largest[0] == pytest.approx(largest, rel=1e-6)

    @jax.jit
    def overflows(scale):
        grads, _ = jls.scaled_grad(workload.loss, scale, has_aux=True)(params, statistics, batch, jnp.float16)
        return ~jls.all_finite(grads)

    scales = 2.0 ** np.arange(0, 40)
    assert [bool(overflows(scale)) for scale in scales] == list(trace.inside[0] * scales >= 65520)
    assert not overflows(1.0)
    assert overflows(scales[-1])
    assert len(set(trace.log2_largest)) == workload.steps  # each step has its own


def test_the_recorded_traces():
    recorded = traces.recorded()
    assert len(recorded) >= 6
    for name, trace in recorded.items():
        assert trace.log2_largest.shape == trace.log2_inside.shape == (WORKLOADS[name]().steps,)
        # Float16's own rounding may make the gradients smaller than they are, in single steps.
        assert (trace.log2_inside >= trace.log2_largest - 1.5).all()
        assert np.median(trace.log2_inside - trace.log2_largest) >= -0.125


def test_a_training_that_ends_as_nan_is_no_number_and_no_noise():
    outcome = training.Outcome(np.nan, np.nan, 0, 1.0, np.ones(1))
    percent = accuracy._percent(outcome, training.Outcome(1.0, 0, 0, 1.0, np.ones(1)))
    one = accuracy.Compared("pinn", "float16", (percent,) * 3, 5.0, (outcome,) * 3)
    assert not one.within_floor
    assert accuracy._beside_noise(one) == "NaN"


def test_what_the_command_line_does_not_know_is_refused(capsys):
    for arguments in "accuracy --workload nothing", "accurate", "accuracy --docs --quick":
        with pytest.raises(SystemExit, match="2"):
            __main__._parse(arguments.split())
        assert "python -m benchmarks: " in capsys.readouterr().err
