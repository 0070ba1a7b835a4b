"""`loss_scaled` on eight host devices: every device takes the same decision, and shardings stay."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

SKIPS = ["auto", "cond", "select"]
SCALE = jls.DynamicLossScale(8.0, increment_period=3)
MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def sharded_step(tx, axis_type):
    """Parameters and state after a good and after a bad step, on eight devices, parameters fully sharded."""
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        params = {
            "kernel": jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("shard"))),
            "bias": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())),
        }
        good = jax.tree.map(lambda leaf: leaf * 8, params)
        spoiled = np.full((16, 4), 8, np.float32)
        spoiled[11, 2] = np.nan  # one element on one device
        bad = {**good, "kernel": jax.device_put(spoiled, params["kernel"].sharding)}
        step = jax.jit(tx.update_and_apply)
        first = step(good, jax.jit(tx.init)(params), params)
        return first, step(bad, *reversed(first))


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_type", MESH.values(), ids=MESH)
def test_on_a_mesh_one_bad_element_is_seen_by_all_and_shardings_stay(axis_type, skip):
    (params, state), (after, after_state) = sharded_step(jls.loss_scaled(optax.adam(0.1), SCALE, skip=skip), axis_type)
    assert (np.asarray(params["kernel"]) < 1).all()
    assert (after_state.loss_scale(), after_state.skipped_steps) == (4.0, 1)
    chex.assert_trees_all_equal(after, params)
    chex.assert_trees_all_equal(after_state.inner_state, state.inner_state)
    for leaf in after["kernel"], after_state.inner_state[0].mu["kernel"], after_state.inner_state[0].nu["kernel"]:
        assert leaf.sharding.is_equivalent_to(params["kernel"].sharding, 2)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 4)}


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
@pytest.mark.parametrize("spec", [P("shard"), P()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("method", ["update", "update_and_apply"])
def test_under_shard_map_one_bad_shard_is_seen_by_all(method, spec, check_vma, skip):
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name="shard", skip=skip)
    params = jnp.ones(8)
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: spec if leaf.ndim else P(), state)
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))

    def step(grads, losses, state, params):
        if spec == P():  # data parallel: the user sums the gradients, the losses stay local
            grads = jax.lax.psum(grads.sum(), "shard") * jnp.ones(8)
        value = losses.sum()
        if method == "update_and_apply":
            return tx.update_and_apply(grads, state, params, value=value)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("shard"), P("shard"), specs, spec),
            out_specs=(spec, specs),
            check_vma=check_vma,
        )
    )
    ones, bad = np.ones(8, np.float32), np.ones(8, np.float32)
    bad[5] = np.nan
    for grads, losses, scale in (ones, ones, 8.0), (bad, ones, 4.0), (ones, bad, 4.0), (ones, ones, 4.0):
        before = params
        params, state = jax.device_get(step(grads, losses, state, params))
        assert state.loss_scale() == scale
        assert (np.asarray(params) == np.asarray(before)).all() == (grads is bad or losses is bad)
    assert (state.applied_steps, state.skipped_steps) == (2, 2)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("method", ["update", "update_and_apply"])
def test_under_shard_map_replicated_parameters_may_take_local_steps(method, skip):
    """What was the same everywhere before the step is not after it; both branches must say so."""
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, skip=skip)  # each device decides for itself
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))

    def local_step(grads, state, params):
        if method == "update":
            updates, state = tx.update(grads[0], state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, state = tx.update_and_apply(grads[0], state, params)
        return params[None], state.skipped_steps[None]

    step = jax.shard_map(local_step, mesh=mesh, in_specs=(P("shard"), P(), P()), out_specs=P("shard"))
    grads = np.ones((8, 3), np.float32)
    grads[5, 1] = np.inf
    params, skipped = jax.jit(step)(grads, tx.init(jnp.ones(3)), jnp.ones(3))
    assert skipped.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert (params == 1).all(axis=1).tolist() == [False] * 5 + [True] + [False] * 2


@pytest.mark.parametrize("axis_type", MESH.values(), ids=MESH)
def test_on_a_mesh_the_verdict_is_one_all_reduce_whatever_the_number_of_leaves(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    specs = (P("data"), P(None, "model"), P("model", "data"), P())
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    with jax.set_mesh(mesh):
        for number in 1, 30:
            params = {
                str(n): jax.device_put(np.ones((16, 512, 8), np.float32), NamedSharding(mesh, specs[n % 4]))
                for n in range(number)
            }
            state = jax.jit(tx.init)(params)
            for function in lambda g, s, p: jls.all_finite(g), tx.update, tx.update_and_apply:
                text = jax.jit(function).lower(params, state, params).compile().as_text()
                assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
                assert not re.findall(r" (?:all-gather|all-to-all|collective-permute)", text)


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
@pytest.mark.parametrize("axis_type", MESH.values(), ids=MESH)
def test_under_shard_map_the_verdict_is_agreed_over_several_axes(axis_type, check_vma):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name=("data", "model"))
    specs = {"kernel": P("data", "model"), "bias": P()}
    params = {"kernel": np.ones((8, 4), np.float32), "bias": np.ones(2, np.float32)}
    state_specs = jax.tree.map(lambda leaf: P("data", "model") if leaf.ndim == 2 else P(), tx.init(params))
    step = jax.jit(
        jax.shard_map(
            tx.update_and_apply,
            mesh=mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
            check_vma=check_vma,
        )
    )
    grads = jax.tree.map(lambda leaf: 8 * leaf, params)
    bad = {**grads, "kernel": grads["kernel"].copy()}
    bad["kernel"][7, 3] = np.nan

    def placed(tree, tree_specs):
        return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, tree_specs)

    with jax.set_mesh(mesh):
        first = step(placed(grads, specs), placed(tx.init(params), state_specs), placed(params, specs))
        second = step(placed(bad, specs), *reversed(first))
    (params, state), (after, after_state) = jax.device_get((first, second))
    chex.assert_trees_all_equal((after, after_state.inner_state), (params, state.inner_state))
    assert (after_state.loss_scale(), after_state.applied_steps, after_state.skipped_steps) == (4.0, 1, 1)


MAPS = {"pmap": jax.pmap, "vmap": jax.vmap}


@pytest.mark.parametrize("mapped", MAPS.values(), ids=MAPS)
def test_under_a_named_map_one_bad_member_is_seen_by_all(mapped):
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name="member")
    params = jnp.full((8, 2), 8.0)
    step = mapped(tx.update_and_apply, axis_name="member")
    good = step(params, mapped(tx.init)(params), params)
    bad = step(params.at[3, 1].set(jnp.nan), good[1], good[0])
    chex.assert_trees_all_equal((bad[0], bad[1].inner_state), (good[0], good[1].inner_state))
    assert bad[1].loss_scale().tolist() == [4.0] * 8
