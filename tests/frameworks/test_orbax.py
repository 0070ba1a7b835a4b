"""Restoring every class of loss scale with orbax, from abstract shapes."""

import warnings

import jax
import numpy as np
import optax
import pytest

with warnings.catch_warnings(action="ignore"):
    ocp = pytest.importorskip("orbax.checkpoint")

from kinds import assert_same_bits

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # The warning comes from orbax.

LOSS_SCALES = {
    "dynamic": jls.DynamicLossScale(8.0, 3, hysteresis=2),
    "auto": jls.AutoLossScale(8.0),
    "fixed": jls.FixedLossScale(8.0, skip_nonfinite=True),
    "none": None,
}
PARAMS = {"kernel": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4), "bias": np.ones(4, np.float32)}


def grads_at(step):
    """Return gradients scaled by about 8. The gradients of step 2 are nonfinite."""
    dice = np.random.default_rng(step)
    grads = jax.tree.map(lambda leaf: 8 * dice.normal(size=leaf.shape).astype(np.float32), PARAMS)
    if step == 2:
        grads["kernel"][13, 2] = np.inf
    return grads


def steps(tx, run, numbers):
    step = jax.jit(tx.update_and_apply)
    for number in numbers:
        # Without a loss scale, the gradients are not checked, so `skip_if` skips the nonfinite step.
        params, opt_state = step(grads_at(number), run["opt_state"], run["params"], skip_if=number == 2)
        run = {"params": params, "opt_state": opt_state}
    return run


@pytest.mark.parametrize("name", LOSS_SCALES)
def test_run_restored_from_a_checkpoint_continues_bitwise_equal(name, tmp_path):
    tx = jls.loss_scaled(optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), LOSS_SCALES[name])
    run = steps(tx, {"params": PARAMS, "opt_state": tx.init(PARAMS)}, range(4))
    assert run["opt_state"].skipped_steps == 1
    target = jax.eval_shape(lambda: {"params": PARAMS, "opt_state": tx.init(PARAMS)})
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(run))
        manager.wait_until_finished()
        restored = manager.restore(3, args=ocp.args.StandardRestore(target))
    assert isinstance(restored["opt_state"], jls.LossScaledState)
    assert_same_bits(restored, run)
    assert_same_bits(steps(tx, restored, range(4, 8)), steps(tx, run, range(4, 8)))
