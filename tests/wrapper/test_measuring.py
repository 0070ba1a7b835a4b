"""`loss_scaled` with loss scales that require the largest gradient magnitude, such as `AutoLossScale`.

If the gradients are nonfinite, `largest` is not a number that a loss scale could mistake for the largest gradient
magnitude. In particular, `largest` is not zero if the caller states that all gradients are finite.
"""

import dataclasses
import re
from collections import Counter
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.asarray([0.25, -0.5])}
TRUE_GRADS = {"kernel": jnp.asarray([[1.0, -2.0], [-0.5, 0.25]]), "bias": jnp.asarray([0.5, -1.0])}
LARGEST = 2.0
NAN, INF = jnp.nan, jnp.inf
TX = jls.loss_scaled(optax.adam(0.1), jls.AutoLossScale(8.0))


def scaled(state):
    """Return gradients that are scaled by the loss scale of the state."""
    return jax.tree.map(lambda leaf: leaf * state.loss_scale(), TRUE_GRADS)


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
            mesh=jax.make_mesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,)),
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
        np.testing.assert_equal(float(state.monitoring.largest), largest)
        assert (np.asarray(after) != 1).all() == (largest == 3.0)
    text = step.lower(ones, ones, before, params).compile().as_text()
    collectives = r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
    assert Counter(re.findall(collectives, text)) == {"all-reduce": 1}


# --- The largest magnitude in the state ---


@pytest.mark.parametrize("option", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("loss_scale", ["dynamic", "auto"])
def test_only_debug_nans_raises_at_a_skipped_step_if_largest_is_nan(loss_scale, option):
    tx = jls.loss_scaled(optax.adam(0.1), loss_scale)

    @jax.jit
    def train_step(params, state, x):
        loss, grads = jls.value_and_scaled_grad(lambda params: jnp.mean((params["kernel"] * x) ** 2), state)(params)
        return tx.update_and_apply(grads, state, params, value=loss)

    with option(True):
        state = tx.init(PARAMS)
        train_step(PARAMS, state, 1.0)
        if loss_scale == "auto" and option is jax.debug_nans:
            with pytest.raises(FloatingPointError):
                train_step(PARAMS, state, INF)
        else:
            assert train_step(PARAMS, state, INF)[1].skipped_steps == 1


def test_loss_scale_in_the_state_can_be_replaced_and_restored():
    _, state = TX.update_and_apply(scaled(TX.init(PARAMS)), TX.init(PARAMS), PARAMS)
    changed = optax.tree_utils.tree_set(state, loss_scale=jls.DynamicLossScale(8.0))
    _, changed = TX.update_and_apply(scaled(changed), changed, PARAMS)
    assert np.isnan(jls.metrics(changed)["largest"])  # `DynamicLossScale` does not measure the largest gradient.
    back = optax.tree_utils.tree_set(changed, loss_scale=jls.AutoLossScale(8.0))
    _, back = TX.update_and_apply(scaled(back), back, PARAMS)
    assert jls.metrics(back)["largest"] == LARGEST


# --- The arguments of `adjust` of a user-defined loss scale ---

SCALE = 8.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listening(jls.LossScale):
    """A loss scale that stores the arguments of `adjust`, and accepts them only as documented."""

    finite: jax.Array
    largest: jax.Array
    needs_largest: ClassVar[bool] = True

    def __call__(self):
        return jnp.float32(SCALE)

    def adjust(self, grads_finite, *, largest):
        assert (grads_finite.dtype, grads_finite.shape) == (jnp.bool_, ())
        assert (largest.dtype, largest.shape) == (jnp.float32, ())
        return Listening(grads_finite, largest)

    def get_config(self):
        return {}


START = Listening(jnp.array(True), jnp.float32(0))


FINITE, OVERFLOWED = np.array([-3.0, 1.0], np.float32), np.array([-np.inf, 1.0], np.float32)
# The columns are the unscaled gradients, the argument `grads_finite` of `update`, and the expected arguments of
# `adjust`.
REPORTED = {
    "no flag, finite gradients": (FINITE, None, True, 3.0),
    "no flag, nonfinite gradients": (OVERFLOWED, None, False, None),
    "correct flag, finite gradients": (FINITE, True, True, 3.0),
    "correct flag, nonfinite gradients": (OVERFLOWED, False, False, None),
    "wrong flag, nonfinite gradients": (OVERFLOWED, True, True, None),
    "wrong flag, finite gradients": (FINITE, False, False, None),
    "correct flag, zero gradients": (0 * FINITE, True, True, 0.0),
}


@pytest.mark.parametrize("call", [lambda step: step, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("grads", "said", "finite", "largest"), REPORTED.values(), ids=REPORTED)
def test_adjust_receives_grads_finite_and_the_largest_gradient(grads, said, finite, largest, call):
    tx = jls.loss_scaled(optax.sgd(0.1), START)
    step = call(lambda grads, said: tx.update_and_apply(grads, tx.init(FINITE), FINITE, grads_finite=said))
    _, state = step(grads * SCALE, said)
    assert bool(state.loss_scale.finite) == finite
    if largest is None:  # The largest gradient was not measured.
        assert not 0 < state.loss_scale.largest < np.inf
        assert not (finite and state.loss_scale.largest == 0)
    else:
        assert state.loss_scale.largest == largest
    assert (state.applied_steps, state.skipped_steps, state.grads_finite) == (finite, not finite, finite)
    np.testing.assert_equal(float(state.monitoring.largest), np.nan if largest is None else largest)
