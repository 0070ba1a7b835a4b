"""`loss_scaled` with `AutoLossScale`, which is told the largest gradient, too: what every kind goes through."""

import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

SKIPS = ["cond", "select"]  # "auto" is one of the two, depending on the platform: test_lowering.py
METHODS = ["update", "update_and_apply"]
MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.asarray([0.25, -0.5])}
TRUE_GRADS = {"kernel": jnp.asarray([[1.0, -2.0], [-0.5, 0.25]]), "bias": jnp.asarray([0.5, -1.0])}
LARGEST = 2.0
NAN, INF = jnp.nan, jnp.inf


def scaled(state, spoil=0.0):
    """The gradients as they come at the state's scale, one element of them plus ``spoil``."""
    grads = jax.tree.map(lambda leaf: leaf * state.loss_scale(), TRUE_GRADS)
    return {**grads, "bias": grads["bias"] + jnp.asarray([0.0, spoil])}


@functools.cache
def adam():
    """One object, so that whoever takes the same arguments shares the compiled steps."""
    return jls.loss_scaled(optax.adam(0.1), jls.AutoLossScale(8.0))


def stepped(tx, method, grads, state, params, **extra):
    """Parameters and state after one compiled step."""
    if method == "update_and_apply":
        return jax.jit(tx.update_and_apply)(grads, state, params, **extra)
    updates, state = jax.jit(tx.update)(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


# what spoils the gradients, value, skip_if: applied, how the scale moves, largest is kept
STEPS = {
    "all is well": (0.0, 1.0, False, True, "good", True),
    "nothing is told": (0.0, None, None, True, "good", True),
    "the user skips": (0.0, 1.0, True, False, "stays", True),
    "overflow": (INF, 1.0, False, False, "bad", False),
    "NaN": (NAN, None, None, False, "bad", False),
    "overflow while the user skips": (-INF, 1.0, True, False, "bad", False),
    "the loss is NaN": (0.0, NAN, False, False, "stays", True),
    "the loss is infinite": (0.0, -INF, None, False, "stays", True),
    "the loss is NaN, and so are the gradients": (NAN, NAN, False, False, "stays", False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("spoil", "value", "skip_if", "applied", "moves", "keeps"), STEPS.values(), ids=STEPS)
def test_when_a_step_is_skipped_and_how_the_scale_moves(spoil, value, skip_if, applied, moves, keeps, method):
    tx = adam()
    params, before = stepped(tx, method, scaled(tx.init(PARAMS)), tx.init(PARAMS), PARAMS)
    told = {"value": value, "skip_if": skip_if}
    told = {name: jnp.asarray(flag) for name, flag in told.items() if flag is not None}
    after, state = stepped(tx, method, scaled(before, spoil), before, params, **told)

    expected = {
        "good": before.loss_scale.adjust(True, largest=LARGEST),
        "bad": before.loss_scale.adjust(False, largest=LARGEST),
        "stays": before.loss_scale,
    }
    assert len({float(loss_scale()) for loss_scale in expected.values()}) == 3
    chex.assert_trees_all_close(state.loss_scale, expected[moves], rtol=1e-6)
    assert (state.applied_steps, state.skipped_steps) == (1 + applied, 1 - applied)
    if keeps:
        assert jls.metrics(state)["largest"] == LARGEST
    if applied:
        assert (after["bias"] != params["bias"]).all()
    else:
        chex.assert_trees_all_equal((after, state.inner_state), (params, before.inner_state))


def test_scan_carries_the_state_and_donates_it():
    tx = jls.loss_scaled(optax.adam(0.1), "auto")

    @jax.jit
    def expected(carry, spoil):
        params, state = carry
        return tx.update_and_apply(scaled(state, spoil), state, params)

    def step(carry, spoil):
        return expected(carry, spoil), jls.metrics(carry[1])["loss_scale"]

    spoils = jnp.asarray([0.0, 0.0, INF, 0.0])
    carry = by_hand = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
    for spoil in spoils:
        by_hand = expected(by_hand, spoil)
    run = jax.jit(lambda carry, spoils: jax.lax.scan(step, carry, spoils), donate_argnums=0)
    after, scales = run(carry, spoils)
    chex.assert_trees_all_close(after, by_hand, rtol=1e-6)
    assert scales.tolist() == [2.0**8, 2.0**9, 2.0**10, 2.0**2]  # up by a bit, and down by eight
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(carry))


@pytest.mark.parametrize("skip", SKIPS)
def test_under_vmap_each_member_measures_its_own(skip):
    tx = jls.loss_scaled(optax.adam(0.1), "auto", skip=skip)
    state = tx.init(PARAMS)
    factors = [1.0, 2.0**-10, 1.0]
    grads = [jax.tree.map(lambda leaf, factor=factor: leaf * factor, scaled(state)) for factor in factors]
    grads[2] = scaled(state, NAN)
    stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
    members, states = (jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree) for tree in (PARAMS, state))
    after, states = jax.jit(jax.vmap(tx.update_and_apply))(jax.tree.map(stack, *grads), states, members)
    alone = [tx.update_and_apply(each, state, PARAMS) for each in grads]
    chex.assert_trees_all_close(after, jax.tree.map(stack, *(params for params, _ in alone)), rtol=1e-6)
    chex.assert_trees_all_close(
        states.loss_scale, jax.tree.map(stack, *(each.loss_scale for _, each in alone)), rtol=1e-6
    )
    assert states.skipped_steps.tolist() == [0, 0, 1]
    assert jls.metrics(states)["largest"][:2].tolist() == [LARGEST, LARGEST * 2.0**-10]


# --- Many devices ---


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_type", MESH)
def test_on_a_mesh_the_largest_is_that_of_all_devices(axis_type, skip):
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(MESH[axis_type],))
    tx = jls.loss_scaled(optax.adam(0.1), "auto", skip=skip)
    with set_mesh(mesh):
        params = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("shard")))
        before = jax.jit(tx.init)(params)
        scale = float(before.loss_scale())
        for spoil, expected in ((7.0, (True, 7.0)), (np.inf, (False, None))):
            grads = np.full((16, 4), scale, np.float32)
            grads[11, 2] *= -spoil  # one element on one device
            grads = jax.device_put(grads, params.sharding)
            after, state = jax.jit(tx.update_and_apply)(grads, before, params)
            finite, largest = expected
            chex.assert_trees_all_close(
                jax.device_get(state.loss_scale), before.loss_scale.adjust(finite, largest=largest or 0.0), rtol=1e-6
            )
            assert (state.applied_steps == 1) == finite
            assert (np.asarray(after) != np.asarray(params)).all() == finite
            assert after.sharding.is_equivalent_to(params.sharding, 2)
            assert largest is None or jls.metrics(state)["largest"] == largest


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_under_shard_map_one_all_reduce_agrees_on_verdict_and_largest(check_vma, method):
    tx = jls.loss_scaled(optax.adam(0.1), "auto", axis_name="shard")
    params, before = jnp.ones(8), tx.init(jnp.ones(8))
    specs = jax.tree.map(lambda leaf: P("shard") if leaf.ndim else P(), before)
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))

    def local_step(grads, losses, state, params):
        value = losses.sum()
        if method == "update_and_apply":
            return tx.update_and_apply(grads, state, params, value=value)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(P("shard"), P("shard"), specs, P("shard")),
            out_specs=(P("shard"), specs),
            check_vma=check_vma,
        )
    )
    scale = float(before.loss_scale())
    ones = np.ones(8, np.float32)
    cases = [(ones.copy(), ones.copy(), True, True) for _ in range(3)]
    cases[0][0][5] = -3.0
    cases[1][0][5] = np.nan
    cases[2][1][2] = np.nan  # the loss of one device: the scale stays
    for number, (grads, losses, *_) in enumerate(cases):
        after, state = step(grads * scale, losses, before, params)
        expected = [
            before.loss_scale.adjust(True, largest=3.0),
            before.loss_scale.adjust(False, largest=0.0),
            before.loss_scale,
        ][number]
        chex.assert_trees_all_close(jax.device_get(state.loss_scale), expected, rtol=1e-6)
        assert state.largest == [3.0, 0.0, 1.0][number]  # seven devices have a largest gradient in each case
        assert (np.asarray(after) != 1).all() == (number == 0)
        assert state.skipped_steps == (number > 0)
    text = step.lower(ones, ones, before, params).compile().as_text()
    collectives = r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
    assert Counter(re.findall(collectives, text)) == {"all-reduce": 1}


# --- What is kept ---


def test_of_gradients_that_are_known_not_to_be_finite_none_is_the_largest():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    before = tx.init(PARAMS)
    for grads in (scaled(before), scaled(before, NAN)):
        _, state = tx.update(grads, before, PARAMS, grads_finite=False)
        assert state.largest == 0


def test_another_kind_may_be_put_into_the_state_and_taken_out_again():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    _, state = tx.update_and_apply(scaled(tx.init(PARAMS)), tx.init(PARAMS), PARAMS)
    changed = optax.tree_utils.tree_set(state, loss_scale=jls.DynamicLossScale(8.0))
    _, changed = tx.update_and_apply(scaled(changed), changed, PARAMS)
    assert jls.metrics(changed)["largest"] == 0  # it is not measured
    back = optax.tree_utils.tree_set(changed, loss_scale=jls.AutoLossScale(8.0))
    _, back = tx.update_and_apply(scaled(back), back, PARAMS)
    assert jls.metrics(back)["largest"] == LARGEST
