"""Restoring every class of loss scale with orbax, from abstract shapes and on another mesh."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ocp = pytest.importorskip("orbax.checkpoint")

from pages import assert_same_bits

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


def steps(tx, run, numbers, at=lambda tree: tree):
    step = jax.jit(tx.update_and_apply)
    for number in numbers:
        # Without a loss scale, the gradients are not checked, so `skip_if` skips the nonfinite step.
        params, opt_state = step(at(grads_at(number)), run["opt_state"], run["params"], skip_if=number == 2)
        run = {"params": params, "opt_state": opt_state}
    return run


def saved_and_restored(run, target, folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.StandardSave(run))
        manager.wait_until_finished()
        return manager.restore(3, args=ocp.args.StandardRestore(target))


@pytest.mark.parametrize("name", LOSS_SCALES)
def test_run_restored_from_a_checkpoint_continues_bitwise_equal(name, tmp_path):
    tx = jls.loss_scaled(optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), LOSS_SCALES[name])
    run = steps(tx, {"params": PARAMS, "opt_state": tx.init(PARAMS)}, range(4))
    assert run["opt_state"].skipped_steps == 1
    target = jax.eval_shape(lambda: {"params": PARAMS, "opt_state": tx.init(PARAMS)})
    restored = saved_and_restored(run, target, tmp_path)
    assert isinstance(restored["opt_state"], jls.LossScaledState)
    assert_same_bits(restored, run)
    assert_same_bits(steps(tx, restored, range(4, 8)), steps(tx, run, range(4, 8)))


@pytest.mark.parametrize("name", ["dynamic", "auto"])
def test_run_on_eight_devices_continues_on_another_mesh(name, tmp_path):
    tx = jls.loss_scaled(optax.sgd(0.125, momentum=0.5), LOSS_SCALES[name])

    def on(mesh, spec):
        def sharding(leaf):
            return NamedSharding(mesh, spec if leaf.ndim == 2 else P())

        return sharding, lambda tree: jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), tree)

    auto = AxisType.Auto
    _, on_eight = on(jax.make_mesh((8,), ("shard",), axis_types=(auto,)), P("shard"))
    sharding, on_four = on(jax.make_mesh((2, 2), ("data", "model"), axis_types=(auto, auto)), P("data", "model"))
    start = on_eight({"params": PARAMS, "opt_state": tx.init(jax.tree.map(jnp.asarray, PARAMS))})
    run = steps(tx, start, range(4), on_eight)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf)), run)
    restored = saved_and_restored(run, target, tmp_path)
    for leaf in restored["params"]["kernel"], restored["opt_state"].inner_state[0].trace["kernel"]:
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(8, 2)}
    after, expected = steps(tx, restored, [4, 2, 5], on_four), steps(tx, run, [4, 2, 5], on_eight)
    assert after["opt_state"].skipped_steps == 2
    assert_same_bits(after["opt_state"].loss_scale, expected["opt_state"].loss_scale)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.device_get((after, expected))[0], expected
    )
