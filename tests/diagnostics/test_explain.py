"""The state of a run in plain sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from samples import GOOD, INF, NAN, PARAMS, recorded

import jax_lossscale as jls
from jax_lossscale.diagnostics import (
    explain,
    nonfinite_report,
)

NAN_GRADS, INF_GRADS, NAN_LOSS = ([1.0, NAN], 1.0, False), ([INF, 1.0], 1.0, False), ([1.0, 1.0], NAN, False)
CONDITION = ([1.0, 1.0], 1.0, True)
EXPLAINED = {
    # loss scale, recorded, steps: what is said, and what is not
    "a healthy run": ("dynamic", True, [GOOD] * 3, ["2^15 = 32768", "Of 3 steps, 3 were applied"], ["last"]),
    "a scale that is no power of two": (10.0, False, [GOOD], ["The loss scale is 10 (FixedLossScale)"], ["2^"]),
    "long ago": (
        "dynamic",
        True,
        [NAN_GRADS, GOOD, GOOD],
        ["The last bad step was 3 steps ago", "['kernel']"],
        ["try"],
    ),
    "long ago, not recorded": ("dynamic", False, [NAN_GRADS, GOOD], ["Of 2 steps, 1 were applied"], ["last"]),
    "an overflow": (
        "dynamic",
        True,
        [INF_GRADS],
        ["an infinity in the gradients, first in ['bias']", "nothing to do"],
        [],
    ),
    "an overflow, not recorded": ("dynamic", False, [INF_GRADS], ["a NaN or an infinity", "nothing to do"], ["['"]),
    "a NaN at every scale": (
        jls.DynamicLossScale(2.0**30),
        True,
        [NAN_GRADS] * 17,
        ["The last 17 steps were skipped", "a NaN in the gradients, first in ['kernel']", "a NaN that stays is none"],
        ["cannot go lower"],
    ),
    "at the floor": ("dynamic", True, [INF_GRADS] * 15, ["cannot go lower", "`min_loss_scale`"], ["nothing to do"]),
    "at the floor, a NaN": ("dynamic", True, [NAN_GRADS] * 15, ["cannot go lower", "a NaN that stays is none"], []),
    "at the floor, not recorded": ("dynamic", False, [NAN_GRADS] * 15, ["cannot go lower", "nonfinite_report"], []),
    "one step above the floor": ("dynamic", True, [INF_GRADS] * 14, ["nothing to do"], ["cannot go lower"]),
    "a loss": ("dynamic", True, [NAN_LOSS], ["its loss was not finite", "forward pass"], ["cannot"]),
    "a loss and its gradients": (
        "dynamic",
        True,
        [([NAN, 1.0], NAN, False)],
        ["its loss was not finite", "forward pass"],
        ["nothing to do"],
    ),
    "a loss, not recorded": ("dynamic", False, [NAN_LOSS], ["its loss was not finite, or `skip_if` was true"], []),
    "a condition": ("dynamic", True, [CONDITION], ["`skip_if` was true", "condition of your own"], ["forward pass"]),
    "a scale that started too high": (
        jls.DynamicLossScale(2.0**60),
        True,
        [INF_GRADS] * 17,
        ["nothing to do"],
        ["almost without a scale"],
    ),
    "at a floor that is high": (
        jls.DynamicLossScale(2.0**10, min_loss_scale=2.0**10),
        True,
        [INF_GRADS],
        ["Allow a lower one"],
        ["almost"],
    ),
    "a fixed scale that skips": (
        jls.FixedLossScale(8.0, skip_nonfinite=True),
        True,
        [INF_GRADS],
        ["Take a smaller one"],
        ["min_loss_scale"],
    ),
    "an infinity in one leaf, a NaN in the next": (
        "dynamic",
        True,
        [([INF, NAN], 1.0, False)],
        ["an infinity in the gradients, first in ['bias']"],
        ["a NaN"],
    ),
    "unscaling overflows": (
        jls.DynamicLossScale(2.0**-4, min_loss_scale=2.0**-10),
        True,
        [([1.0, 1e38], 1.0, False), GOOD],
        ["2 steps ago: there was an infinity in the gradients, first in ['kernel']"],
        ["skip_if", "copies"],
    ),
    "often on condition": (
        "dynamic",
        True,
        [CONDITION, *[GOOD] * 4] * 20,
        ["20% of", "your own"],
        ["increment_period"],
    ),
    "a fixed scale that does not skip": (8.0, False, [NAN_GRADS], ["applied all the same", "checkpoint"], ["skipped:"]),
    "no loss scale": (None, False, [GOOD], ["not checked (NoOpLossScale)"], ["2^"]),
    "often, a NaN at the floor": (
        jls.DynamicLossScale(1.0),
        True,
        [NAN_GRADS, *[GOOD] * 4] * 20,
        ["20% of", "is none"],
        [],
    ),
    "often, a loss": ("dynamic", True, [NAN_LOSS, *[GOOD] * 4] * 20, ["20% of", "forward pass"], ["increment_period"]),
    "often": (jls.DynamicLossScale(2.0**15, 9), True, [INF_GRADS, *[GOOD] * 9] * 10, ["10% of all steps", "often"], []),
}


@pytest.mark.parametrize(("loss_scale", "record", "steps", "said", "unsaid"), EXPLAINED.values(), ids=EXPLAINED)
def test_explanations(loss_scale, record, steps, said, unsaid):
    state = recorded(jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record), PARAMS, steps)
    text = explain(state, PARAMS)
    for phrase in said:
        assert phrase in text
    for phrase in unsaid:
        assert phrase not in text


def after_one_bad_step(grads):
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    params = jax.tree.map(jnp.ones_like, grads)
    return tx.update_and_apply(grads, tx.init(params), params)[1]


def test_a_frozen_parameter_has_no_gradient_and_keeps_its_place():
    state = after_one_bad_step({"a": None, "b": jnp.array([NAN])})
    assert "first in ['b']" in explain(state, {"a": jnp.ones(3), "b": jnp.ones(1)})


def test_the_only_leaf_has_no_path():
    state = after_one_bad_step(jnp.array([NAN]))
    assert "first in the only leaf." in explain(state, jnp.ones(1))
    assert str(nonfinite_report(jnp.ones(1))).endswith("is in the only leaf.")


def test_a_tree_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="has 3 leaves, but the gradients had 2"):
        explain(after_one_bad_step({"a": jnp.ones(1), "b": jnp.array([NAN])}), {"a": 1, "b": 2, "c": 3})


def test_a_traced_state_is_refused():
    state = jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="values that are traced"):
        jax.jit(lambda state: explain(state) and state)(state)


def test_without_parameters_the_leaf_is_a_number():
    state = recorded(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), PARAMS, [NAN_GRADS])
    assert "first in leaf 1" in explain(state)


def test_copies_of_a_leaf_that_differ_are_told():
    """A fault of one device: the verdict reads every copy, looking for the leaf reads one."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    copies = NamedSharding(mesh, P(None, "model"))
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    with jax.set_mesh(mesh):
        params = jax.device_put(np.ones((8, 8), np.float32), copies)
        shards = [np.array(shard.data) for shard in params.addressable_shards]
        shards[5][3, 1] = INF
        placed = [jax.device_put(data, device) for data, device in zip(shards, mesh.devices.flat, strict=True)]
        grads = jax.make_array_from_single_device_arrays(params.shape, copies, placed)
        _, state = jax.jit(tx.update_and_apply)(grads, tx.init(params), params)
        assert state.skipped_steps == 1
        assert "whose copies on several devices differ" in explain(state, params)
