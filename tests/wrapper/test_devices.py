"""`loss_scaled` on eight host devices: all devices make the same decision, and shardings are preserved.

The tests run only the optimizer step: on a mesh, inside `jax.shard_map` and under `jax.pmap`.
`test_mesh_configurations.py` trains on a mesh.
"""

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
from jax_lossscale._measure import axes_varied_over

pytestmark = pytest.mark.ci

# "auto" is equivalent to one of these, depending on the platform (see `test_lowering.py`).
SKIPS = ["cond", "select"]
SCALE = jls.DynamicLossScale(8.0, increment_period=3)
MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def sharded_step(tx, axis_type):
    """Return parameters and state after a finite and after a nonfinite step, with fully sharded parameters."""
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(axis_type,))
    with set_mesh(mesh):
        params = {
            "kernel": jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("shard"))),
            "bias": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())),
        }
        good = jax.tree.map(lambda leaf: leaf * 8, params)
        spoiled = np.full((16, 4), 8, np.float32)
        spoiled[11, 2] = np.nan  # One device has a NaN in its shard.
        bad = {**good, "kernel": jax.device_put(spoiled, params["kernel"].sharding)}
        step = jax.jit(tx.update_and_apply)
        first = step(good, jax.jit(tx.init)(params), params)
        return first, step(bad, *reversed(first))


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_type", MESH.values(), ids=MESH)
def test_nonfinite_element_skips_the_step_on_all_devices_of_a_mesh(axis_type, skip):
    (params, state), (after, after_state) = sharded_step(jls.loss_scaled(optax.adam(0.1), SCALE, skip=skip), axis_type)
    assert (np.asarray(params["kernel"]) < 1).all()
    assert (after_state.loss_scale(), after_state.skipped_steps) == (4.0, 1)
    chex.assert_trees_all_equal(after, params)
    chex.assert_trees_all_equal(after_state.inner_state, state.inner_state)
    for leaf in after["kernel"], after_state.inner_state[0].mu["kernel"], after_state.inner_state[0].nu["kernel"]:
        assert leaf.sharding.is_equivalent_to(params["kernel"].sharding, 2)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 4)}


SHARDED, REPLICATED = P("shard"), P()


@pytest.mark.parametrize(
    ("method", "spec", "check_vma", "skip"),
    [
        *(("update", SHARDED, True, "cond"), ("update", REPLICATED, False, "select")),
        *(("update_and_apply", SHARDED, False, "cond"), ("update_and_apply", SHARDED, True, "select")),
        *(("update_and_apply", REPLICATED, True, "cond"), ("update_and_apply", REPLICATED, True, "select")),
    ],
)
def test_nonfinite_shard_skips_the_step_on_all_devices_under_shard_map(method, spec, check_vma, skip):
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name="shard", skip=skip)
    params = jnp.ones(8)
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: spec if leaf.ndim else P(), state)
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))

    def step(grads, losses, state, params):
        if spec == P():  # In data parallelism, the user sums the gradients, and each device has its own loss.
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
def test_each_device_decides_separately_without_axis_name(method, skip):
    """Values that are replicated before the step vary over devices after it, and both branches must declare that."""
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, skip=skip)  # Without `axis_name`, each device decides separately.
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))

    def local_step(grads, state, params):
        if method == "update":
            updates, state = tx.update(grads[0], state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, state = tx.update_and_apply(grads[0], state, params)
        # JAX does not mark the results of a conditional as varying over devices. Without a mark, the value of one
        # device would count as the value of all devices.
        assert {axes_varied_over(leaf) for leaf in jax.tree.leaves((params, state))} == {frozenset({"shard"})}
        return params[None], state.skipped_steps[None]

    step = jax.shard_map(local_step, mesh=mesh, in_specs=(P("shard"), P(), P()), out_specs=P("shard"))
    grads = np.ones((8, 3), np.float32)
    grads[5, 1] = np.inf
    params, skipped = jax.jit(step)(grads, tx.init(jnp.ones(3)), jnp.ones(3))
    assert skipped.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert (params == 1).all(axis=1).tolist() == [False] * 5 + [True] + [False] * 2


@pytest.mark.parametrize(("axis_type", "check_vma"), [(AxisType.Auto, True), (AxisType.Explicit, False)])
def test_decision_is_shared_over_several_mesh_axes(axis_type, check_vma):
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

    with set_mesh(mesh):
        first = step(placed(grads, specs), placed(tx.init(params), state_specs), placed(params, specs))
        second = step(placed(bad, specs), *reversed(first))
    (params, state), (after, after_state) = jax.device_get((first, second))
    chex.assert_trees_all_equal((after, after_state.inner_state), (params, state.inner_state))
    assert (after_state.loss_scale(), after_state.applied_steps, after_state.skipped_steps) == (4.0, 1, 1)


has_pmap = pytest.mark.skipif(not hasattr(jax, "pmap"), reason="this version of JAX has no pmap")


@pytest.mark.parametrize("name", [pytest.param("pmap", marks=has_pmap), "vmap"])
def test_nonfinite_member_skips_the_step_of_all_members_under_pmap_and_vmap(name):
    mapped = jax.pmap if name == "pmap" else lambda *args, **axis: jax.jit(jax.vmap(*args, **axis))
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name="member")
    params = jnp.full((8, 2), 8.0)
    step = mapped(tx.update_and_apply, axis_name="member")
    good = step(params, mapped(tx.init)(params), params)
    bad = step(params.at[3, 1].set(jnp.nan), good[1], good[0])
    chex.assert_trees_all_equal((bad[0], bad[1].inner_state), (good[0], good[1].inner_state))
    assert bad[1].loss_scale().tolist() == [4.0] * 8


@pytest.mark.parametrize("loss_scale", ["auto", None])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
def test_init_keeps_the_placement_of_parameters_on_different_devices(loss_scale, dtype):
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Explicit,), devices=jax.devices()[2:4])
    places = [jax.devices()[0], jax.devices()[1], NamedSharding(mesh, P("shard"))]
    params = [{"kernel": jax.device_put(np.ones((2, 4), dtype), place)} for place in places]
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    state, expected = jls.loss_scaled(chain, loss_scale).init(params).inner_state, chain.init(params)
    for leaf, bare in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(bare.sharding, bare.ndim)
        assert leaf.dtype == (jnp.float32 if bare.dtype == dtype else bare.dtype)
