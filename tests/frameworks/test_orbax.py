"""orbax: its manager as it is and as it was, and its other checkpointers."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ocp = pytest.importorskip("orbax.checkpoint")

from pages import assert_same_bits

import jax_lossscale as jls

pytestmark = [
    pytest.mark.slow,  # test_linen.py has one way through checkpoints
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within orbax
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of orbax, about shardings
]
PARAMS = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.float32(0.5)}
GRADS = jax.tree.map(lambda leaf: 8.0 * jnp.ones_like(leaf), PARAMS)
LOSS_SCALES = {
    "dynamic": jls.DynamicLossScale(8.0, 3, hysteresis=2),
    "auto": jls.AutoLossScale(8.0),
    "fixed": jls.FixedLossScale(8.0),
    "none": None,
}


def a_run(loss_scale, train_state):
    """An optimizer, a run after a skipped step, and a fresh one to restore onto."""
    tx = jls.loss_scaled(optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), loss_scale)
    params, state = PARAMS, tx.init(PARAMS)
    for skip_if in False, True, False:
        params, state = tx.update_and_apply(GRADS, state, params, skip_if=skip_if)
    runs = [{"params": params, "opt_state": state}, {"params": PARAMS, "opt_state": tx.init(PARAMS)}]
    if train_state:
        flax_interop = pytest.importorskip("jax_lossscale.interop.flax")
        runs = [flax_interop.TrainState(step=3, apply_fn=None, tx=tx, **run) for run in runs]
    return tx, *runs


def by_manager(run, target, folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.StandardSave(run))
        manager.wait_until_finished()
        return manager.restore(3, args=ocp.args.StandardRestore(target))


def by_the_old_manager(run, target, folder):
    with ocp.CheckpointManager(folder, ocp.PyTreeCheckpointer()) as manager:
        manager.save(3, run)
        manager.wait_until_finished()
        return manager.restore(3, items=target)


def by_standard_checkpointer(run, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", run)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", target)


WAYS = [by_manager, by_the_old_manager, by_standard_checkpointer]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["dynamic", "train state"])
def test_a_restored_run_goes_on_bit_for_bit(kind, way, tmp_path):
    tx, run, target = a_run(LOSS_SCALES["dynamic"], kind == "train state")
    check_restored(tx, run, way(run, target, tmp_path))


@pytest.mark.parametrize("name", [name for name in LOSS_SCALES if name != "dynamic"])
def test_every_kind_of_loss_scale_is_restored(name, tmp_path):
    tx, run, target = a_run(LOSS_SCALES[name], train_state=False)
    check_restored(tx, run, by_manager(run, target, tmp_path))


def check_restored(tx, run, restored):
    def parts(run):
        return (run["params"], run["opt_state"]) if isinstance(run, dict) else (run.params, run.opt_state)

    assert type(restored) is type(run)
    assert_same_bits(restored, run)
    (params, state), (expected_params, expected_state) = parts(restored), parts(run)
    assert isinstance(state, jls.LossScaledState)
    assert_same_bits(
        tx.update_and_apply(GRADS, state, params), tx.update_and_apply(GRADS, expected_state, expected_params)
    )


def test_a_target_of_shapes_alone(tmp_path):
    tx, run, _ = a_run(LOSS_SCALES["dynamic"], train_state=False)
    target = jax.eval_shape(lambda: {"params": PARAMS, "opt_state": tx.init(PARAMS)})
    assert_same_bits(by_manager(run, target, tmp_path), run)
