"""The record of the last non-finite or skipped step in the optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from samples import GOOD, INF, NAN, PARAMS, recorded

import jax_lossscale as jls

pytestmark = pytest.mark.usefixtures("strict_promotion")


RECORDED = {
    # Each entry contains gradients, loss, `skip_if`, and the recorded leaf and cause.
    "infinity": ([1.0, INF], 1.0, False, 1, "infinity"),
    "NaN": ([NAN, INF], 1.0, False, 0, "nan"),
    "loss": ([1.0, 1.0], INF, False, -1, "loss"),
    "loss and gradients": ([1.0, NAN], NAN, False, 1, "loss"),
    "condition": ([1.0, 1.0], 1.0, True, -1, "skip_if"),
    "condition and gradients": ([1.0, INF], 1.0, True, 1, "infinity"),
}


@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
@pytest.mark.parametrize(("grads", "value", "skip_if", "leaf", "cause"), RECORDED.values(), ids=RECORDED)
def test_state_records_the_last_bad_step(grads, value, skip_if, leaf, cause, skip):
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(8.0, 1), skip=skip, record_bad_steps=True)
    state = recorded(tx, PARAMS, [GOOD, (grads, value, skip_if), GOOD, GOOD])
    record = state.monitoring.last_bad_step
    assert (record.step, record.leaf, record.cause) == (1, leaf, cause)
    assert record.loss_scale == 16  # The finite step before doubled the scale.
    assert jls.metrics(state)["last_bad_leaf"] == leaf


@pytest.mark.parametrize(
    ("applied", "skipped"), [(2**31 - 8, 6), (2**31 - 8, 7), (2**31 - 8, 8), (2**31 - 1, 2**31 - 1)]
)
def test_recorded_step_number_saturates_at_the_largest_int32(applied, skipped):
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    state = tx.init(PARAMS)._replace(applied_steps=jnp.int32(applied), skipped_steps=jnp.int32(skipped))
    _, state = tx.update_and_apply(jax.tree.map(lambda leaf: leaf * NAN, PARAMS), state, PARAMS)
    assert state.monitoring.last_bad_step.step == min(applied + skipped, 2**31 - 1)
    assert "there was a NaN in the gradients" in str(jls.diagnostics.explain(state))


def test_record_is_empty_before_the_first_bad_step_and_absent_by_default():
    for steps in ([], [GOOD]):
        tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
        record = recorded(tx, PARAMS, steps).monitoring.last_bad_step
        numbers = {"step": -1, "leaf": -1, "kind": 0, "loss_scale": 0, "largest": 0, "structure": -1}
        assert record._asdict() == {**numbers, "was_exceeded": False}
        assert record.cause == "none"
    silent = recorded(jls.loss_scaled(optax.sgd(0.1)), PARAMS, [GOOD])
    assert (silent.monitoring.last_bad_step, jls.metrics(silent)["last_bad_leaf"]) == (None, -1)


def test_recording_works_in_scan_and_vmap():
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    grads = jnp.array([[1.0, 1.0, 1.0], [1.0, INF, 1.0]])  # There are two runs of three steps.

    def run(grads):
        def step(carry, g):
            params, state = tx.update_and_apply({"w": g}, carry[1], carry[0])
            return (params, state), None

        params = {"w": jnp.float32(1.0)}
        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][1]

    state = jax.jit(jax.vmap(run))(grads)
    assert state.monitoring.last_bad_step.step.tolist() == [-1, 1]
    assert state.monitoring.last_bad_step.leaf.tolist() == [-1, 0]


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_all_devices_of_a_shard_map_record_the_same_leaf(check_vma):
    tx = jls.loss_scaled(optax.sgd(0.1), axis_name="shard", record_bad_steps=True)
    params = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
    grads = {**params, "b": np.array([1, 1, 1, 1, 1, NAN, 1, 1], np.float32)}
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    split, state = jax.P("shard"), tx.init(params)  # SGD has no moments, so the state contains only scalars.
    specs = {"in_specs": (split, jax.P(), split), "out_specs": (split, jax.P())}
    step = jax.shard_map(tx.update_and_apply, mesh=mesh, check_vma=check_vma, **specs)
    _, state = jax.jit(step)(grads, state, params)
    assert (state.monitoring.last_bad_step.leaf, state.monitoring.last_bad_step.cause) == (1, "nan")
