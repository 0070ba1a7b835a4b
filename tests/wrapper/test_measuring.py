"""`loss_scaled` with `AutoLossScale`, which also requires the largest gradient magnitude."""

import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from jax_lossscale._measure import agree

PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.asarray([0.25, -0.5])}
TRUE_GRADS = {"kernel": jnp.asarray([[1.0, -2.0], [-0.5, 0.25]]), "bias": jnp.asarray([0.5, -1.0])}
LARGEST = 2.0
NAN, INF = jnp.nan, jnp.inf
TX = jls.loss_scaled(optax.adam(0.1), jls.AutoLossScale(8.0))


def scaled(state, spoil=0.0):
    """Return gradients that are scaled by the loss scale of the state, with ``spoil`` added to one element."""
    grads = jax.tree.map(lambda leaf: leaf * state.loss_scale(), TRUE_GRADS)
    return {**grads, "bias": grads["bias"] + jnp.asarray([0.0, spoil])}


# The columns are the value that is added to a gradient, `value`, `skip_if`, whether the step is applied, the change of
# the scale, and the stored `largest`.
STEPS = {
    "finite step": (0.0, 1.0, False, True, "good", LARGEST),
    "skip_if": (0.0, 1.0, True, False, "stays", LARGEST),
    "overflow": (INF, 1.0, False, False, "bad", NAN),
    "overflow and skip_if": (-INF, 1.0, True, False, "bad", NAN),
    "NaN loss": (0.0, NAN, False, False, "stays", LARGEST),
    "NaN loss and NaN gradients": (NAN, NAN, False, False, "stays", NAN),
}


@pytest.mark.parametrize(("spoil", "value", "skip_if", "applied", "moves", "largest"), STEPS.values(), ids=STEPS)
def test_skipped_steps_and_scale_changes_of_the_automatic_scale(spoil, value, skip_if, applied, moves, largest):
    step = jax.jit(TX.update_and_apply)
    kwargs = {"value": jnp.float32(1.0), "skip_if": jnp.array(False)}
    params, before = step(scaled(TX.init(PARAMS)), TX.init(PARAMS), PARAMS, **kwargs)
    kwargs = {"value": jnp.float32(value), "skip_if": jnp.array(skip_if)}
    after, state = step(scaled(before, spoil), before, params, **kwargs)
    expected = {
        "good": before.loss_scale.adjust(True, largest=LARGEST),
        "bad": before.loss_scale.adjust(False, largest=LARGEST),
        "stays": before.loss_scale,
    }
    assert len({float(loss_scale()) for loss_scale in expected.values()}) == 3
    chex.assert_trees_all_close(state.loss_scale, expected[moves], rtol=1e-6)
    assert (state.applied_steps, state.skipped_steps) == (1 + applied, 1 - applied)
    np.testing.assert_equal(np.float32(jls.metrics(state)["largest"]), np.float32(largest))
    if applied:
        assert (after["bias"] != params["bias"]).all()
    else:
        chex.assert_trees_all_equal((after, state.inner_state), (params, before.inner_state))


# --- Several devices ---


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_flag_and_largest_share_one_all_reduce_under_shard_map(check_vma):
    tx = jls.loss_scaled(optax.adam(0.1), "auto", axis_name="shard")
    params, before = jnp.ones(8), tx.init(jnp.ones(8))
    specs = jax.tree.map(lambda leaf: P("shard") if leaf.ndim else P(), before)

    def local_step(grads, losses, state, params):
        return tx.update_and_apply(grads, state, params, value=losses.sum())

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,)),
            in_specs=(P("shard"), P("shard"), specs, P("shard")),
            out_specs=(P("shard"), specs),
            check_vma=check_vma,
        )
    )
    scale, ones = float(before.loss_scale()), np.ones(8, np.float32)
    for spoiled, expected, largest in (
        ((-3.0, 1.0), before.loss_scale.adjust(True, largest=3.0), 3.0),
        ((np.nan, 1.0), before.loss_scale.adjust(False, largest=NAN), NAN),
        ((1.0, np.nan), before.loss_scale, 1.0),  # The loss is nonfinite on one device, so the scale stays.
    ):
        grads, losses = (np.where(np.arange(8) == 5, value, 1).astype(np.float32) for value in spoiled)
        after, state = step(grads * scale, losses, before, params)
        chex.assert_trees_all_close(jax.device_get(state.loss_scale), expected, rtol=1e-6)
        # Seven of the eight devices have finite gradients in each case.
        np.testing.assert_equal(float(state.largest), largest)
        assert (np.asarray(after) != 1).all() == (largest == 3.0)
    text = step.lower(ones, ones, before, params).compile().as_text()
    collectives = r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
    assert Counter(re.findall(collectives, text)) == {"all-reduce": 1}


@pytest.mark.parametrize("values", [(1.0, 3.0), (1.0, np.nan), (np.nan, np.nan)], ids=str)
def test_agree_returns_nan_if_one_device_has_nan(values):
    """On some platforms, the minimum of a number and NaN is the number, so NaN needs special treatment."""
    shards = np.float32([values[0], values[1], *[0.5] * 6])

    def agreed(shard):
        (flag,), largest = agree([jnp.array(True)], shard[0], "shard")
        return flag, largest

    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))
    flag, largest = jax.jit(jax.shard_map(agreed, mesh=mesh, in_specs=P("shard"), out_specs=P()))(shards)
    assert flag
    np.testing.assert_equal(float(largest), float(np.max(shards)))


# --- The largest magnitude in the state ---


def test_largest_is_nan_before_the_first_step():
    with jax.debug_nans(True):  # `debug_nans` raises if JAX computes a NaN.
        assert np.isnan(jls.metrics(TX.init(PARAMS))["largest"])


@pytest.mark.parametrize("option", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("loss_scale", ["dynamic", "auto"])
def test_only_debug_nans_raises_at_a_skipped_step_if_largest_is_nan(loss_scale, option):
    tx = jls.loss_scaled(optax.adam(0.1), loss_scale)
    state = tx.init(PARAMS)

    @jax.jit
    def train_step(params, state, x):
        loss, grads = jls.value_and_scaled_grad(lambda params: jnp.mean((params["kernel"] * x) ** 2), state)(params)
        return tx.update_and_apply(grads, state, params, value=loss)

    with option(True):
        train_step(PARAMS, state, 1.0)
        if loss_scale == "auto" and option is jax.debug_nans:
            with pytest.raises(FloatingPointError):
                train_step(PARAMS, state, INF)
        else:
            assert train_step(PARAMS, state, INF)[1].skipped_steps == 1


def test_largest_is_nan_if_grads_finite_is_false():
    before = TX.init(PARAMS)
    for grads in (scaled(before), scaled(before, NAN)):
        _, state = TX.update(grads, before, PARAMS, grads_finite=False)
        assert np.isnan(state.largest)


def test_nonfinite_gradients_are_not_treated_as_zeros_if_grads_finite_is_true():
    """If the gradients were treated as zeros, the scale would rise."""
    state = TX.init(PARAMS)
    for _ in range(4):
        _, state = TX.update(jax.tree.map(lambda leaf: leaf * NAN, PARAMS), state, PARAMS, grads_finite=True)
    assert (state.loss_scale(), state.applied_steps) == (8.0, 4)
    assert np.isnan(jls.metrics(state)["largest"])


def test_loss_scale_in_the_state_can_be_replaced_and_restored():
    _, state = TX.update_and_apply(scaled(TX.init(PARAMS)), TX.init(PARAMS), PARAMS)
    changed = optax.tree_utils.tree_set(state, loss_scale=jls.DynamicLossScale(8.0))
    _, changed = TX.update_and_apply(scaled(changed), changed, PARAMS)
    assert np.isnan(jls.metrics(changed)["largest"])  # `DynamicLossScale` does not measure the largest gradient.
    back = optax.tree_utils.tree_set(changed, loss_scale=jls.AutoLossScale(8.0))
    _, back = TX.update_and_apply(scaled(back), back, PARAMS)
    assert jls.metrics(back)["largest"] == LARGEST
