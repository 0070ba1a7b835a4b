"""The small training runs of `benchmarks.workloads` in float16 and float32."""

import jax
import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from benchmarks.accuracy.trainings import arms
from benchmarks.workloads import WORKLOADS, training

pytestmark = [pytest.mark.ci, pytest.mark.slow]  # This file compiles and executes ten training runs.

pytest.importorskip("sklearn")

# These sizes compile and train fast, and the numbers of steps suffice to learn something.
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
# The initial statistics of batch norm are wrong, so the first steps are inaccurate.
LEARNT = {"convnet": 0.98}
# In such short runs, the automatic scale still rises during many steps, in which very small gradients underflow.
ABOVE_FLOAT32 = {"tiny_loss": 0.01, "two_branches": 0.06}


def small(name, **sizes):
    return WORKLOADS[name](**SMALL[name] | sizes)


def no_loss_scale(gradients):
    return jls.NoOpLossScale()


@pytest.mark.parametrize("name", WORKLOADS)
def test_float16_with_the_found_policy_reaches_the_loss_of_float32(name):
    workload = small(name)
    exact = training.compile_training(workload, jnp.float32, no_loss_scale)(seed=0)
    begun = float(jax.jit(workload.evaluate)(*training.begin(workload, 0)))
    assert 0 < exact.final_loss < LEARNT.get(name, 0.9) * begun
    assert (exact.skipped_steps, exact.final_loss_scale) == (0, 1)
    arm = next(arm for arm in arms() if arm.name == "autocast, found policy")
    found = training.compile_training(arm.rewritten(workload), arm.dtype, arm.loss_scale)(seed=0)
    assert found.final_loss == pytest.approx(float(exact.final_loss), rel=ABOVE_FLOAT32.get(name, 1e-3))
    assert found.skipped_steps <= 1
    assert found.final_loss_scale > 1
