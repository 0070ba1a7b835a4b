"""`loss_scaled` on eight host devices: all devices make the same decision, and shardings are preserved.

The first tests run only the optimizer step: on a mesh, inside `jax.shard_map` and under `jax.pmap`. The other tests run
a whole training step on a mesh.
"""

from typing import NamedTuple

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


ONE_AXIS, TWO_AXES = {"shard": 8}, {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("method", "is_sharded", "check_vma", "skip", "axes", "axis_type"),
    [
        ("update", True, True, "cond", ONE_AXIS, AxisType.Auto),
        ("update", False, False, "select", ONE_AXIS, AxisType.Auto),
        ("update_and_apply", True, False, "cond", ONE_AXIS, AxisType.Auto),
        ("update_and_apply", True, True, "select", ONE_AXIS, AxisType.Auto),
        ("update_and_apply", False, True, "cond", ONE_AXIS, AxisType.Auto),
        ("update_and_apply", False, True, "select", ONE_AXIS, AxisType.Auto),
        ("update_and_apply", True, True, "cond", TWO_AXES, AxisType.Auto),
        ("update_and_apply", True, False, "cond", TWO_AXES, AxisType.Explicit),
    ],
)
def test_nonfinite_shard_skips_the_step_on_all_devices_under_shard_map(
    method, is_sharded, check_vma, skip, axes, axis_type
):
    names = tuple(axes)
    tx = jls.loss_scaled(optax.adam(0.1), SCALE, axis_name=names, skip=skip)
    mesh = jax.make_mesh(tuple(axes.values()), names, axis_types=(axis_type,) * len(names))
    params = {"kernel": jnp.ones(8), "bias": jnp.ones(2)}
    specs = {"kernel": P(names) if is_sharded else P(), "bias": P()}
    state_specs = jax.tree.map(lambda leaf: specs["kernel"] if leaf.shape == (8,) else P(), tx.init(params))

    def step(grad, losses, state, params):
        if not is_sharded:  # In data parallelism, the user sums the gradients, and each device has its own loss.
            grad = jax.lax.psum(grad.sum(), names) * jnp.ones(8)
        grads, value = {"kernel": grad, "bias": jnp.ones(2)}, losses.sum()
        if method == "update_and_apply":
            return tx.update_and_apply(grads, state, params, value=value)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    in_specs, out_specs = (P(names), P(names), state_specs, specs), (specs, state_specs)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))
    ones, bad = np.ones(8, np.float32), np.ones(8, np.float32)
    bad[5] = np.nan
    state = tx.init(params)
    for grad, losses, scale in (ones, ones, 8.0), (bad, ones, 4.0), (ones, bad, 4.0), (ones, ones, 4.0):
        arguments = (grad, losses, state, params)
        placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), arguments, in_specs)
        new_params, new_state = jax.device_get(step(*placed))
        assert new_state.loss_scale() == scale
        if grad is bad or losses is bad:
            chex.assert_trees_all_equal((new_params, new_state.inner_state), (params, state.inner_state))
        else:
            assert all((new_params[name] != params[name]).all() for name in params)
        params, state = new_params, new_state
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


# --- A whole training step: float16 forward and backward pass, and the optimizer ---

START = jls.DynamicLossScale(2.0**10)
RANDOM = np.random.default_rng(0)
PARAMS = {
    "kernel": RANDOM.normal(size=(8, 32)).astype(np.float32),
    "bias": np.zeros(32, np.float32),
    "readout": RANDOM.normal(size=(32, 8)).astype(np.float32),
    "offset": np.zeros(8, np.float32),
}
BATCH = {name: RANDOM.normal(size=(16, 8)).astype(np.float16) for name in ("x", "y")}


def loss_fn(params, batch, **dot_options):
    compute = jls.cast_floating(params, jnp.float16)
    hidden = jnp.tanh(batch["x"] @ compute["kernel"] + compute["bias"][None])
    error = jnp.dot(hidden, compute["readout"], **dot_options) + compute["offset"][None] - batch["y"]
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


def with_one_element(array, value):
    """Return a copy with one changed element, which belongs to one example and to one shard."""
    changed = np.array(array)
    changed[11, 2] = value
    return changed


# Each entry contains a batch with one changed element, and the loss scale after the step. A nonfinite loss does not
# lower the scale.
SPOILED_BATCHES = {
    "a NaN in the batch": ({**BATCH, "x": with_one_element(BATCH["x"], np.nan)}, 2.0**10),
    "an infinity in the batch": ({**BATCH, "y": with_one_element(BATCH["y"], np.inf)}, 2.0**10),
    "a gradient beyond the range of float16": ({**BATCH, "y": with_one_element(BATCH["y"], 6e4)}, 2.0**9),
}


def on_each_device(scalar):
    """Return the copy of a replicated scalar on each device. The copies can differ if the program is wrong."""
    return [shard.data.item() for shard in scalar.addressable_shards]


def shard_bits(tree):
    """Return the bytes of each shard on each device."""
    return [[np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]


class Layout(NamedTuple):
    mesh: dict[str, int]
    params: dict[str, P]
    gathers: bool  # whether the model gathers its parameters


LAYOUTS = {
    "data parallel": Layout({"data": 8}, dict.fromkeys(PARAMS, P()), False),
    "fully sharded": Layout({"data": 8}, dict.fromkeys(PARAMS, P("data")), True),
    "data and model": Layout(
        {"data": 2, "model": 4},
        {"kernel": P(None, "model"), "bias": P("model"), "readout": P("model"), "offset": P()},
        False,
    ),
}


# These cases cover every pair of options.
@pytest.mark.parametrize(
    ("layout", "axis_type", "skip"),
    [
        *(("data parallel", "auto", "cond"), ("data parallel", "explicit", "select")),
        *(("fully sharded", "auto", "select"), ("fully sharded", "explicit", "cond")),
        *(("data and model", "auto", "cond"), ("data and model", "explicit", "select")),
    ],
)
def test_nonfinite_batch_or_gradient_skips_the_training_step_on_a_mesh(layout, axis_type, skip):
    layout, axis_type = LAYOUTS[layout], MESH[axis_type]
    mesh = jax.make_mesh(tuple(layout.mesh.values()), tuple(layout.mesh), axis_types=(axis_type,) * len(layout.mesh))
    tx = jls.loss_scaled(optax.adam(0.1), START, skip=skip)
    gather = jax.sharding.reshard if axis_type is AxisType.Explicit else jax.lax.with_sharding_constraint
    # With explicit axes, the user must specify the output sharding of a matmul whose contracted dimension is sharded.
    dot_options = {"out_sharding": P("data")} if axis_type is AxisType.Explicit else {}

    def sharded_loss_fn(params, batch):
        if layout.gathers:
            compute = jls.cast_floating(params, jnp.float16)
            params = jax.tree.map(lambda leaf: gather(leaf, P()), compute)
        return loss_fn(params, batch, **dot_options)

    def step(params, state, batch, spoil):
        loss, grads = jls.value_and_scaled_grad(sharded_loss_fn, state)(params, batch)
        grads = {**grads, "kernel": grads["kernel"] + spoil}
        return tx.update_and_apply(grads, state, params, value=loss)

    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    def inputs(batch, value):
        """Return the batch, and the array that is added to a gradient. All but one element of this array is zero."""
        spoil = np.zeros((8, 32), np.float32)
        spoil[5, 13] = value
        return {name: put(array, P("data")) for name, array in batch.items()}, put(spoil, layout.params["kernel"])

    with set_mesh(mesh):
        params = {name: put(PARAMS[name], spec) for name, spec in layout.params.items()}
        # The moments have the shardings of the parameters. The scalars are replicated.
        state = jax.tree.map(lambda leaf: leaf if leaf.ndim else put(leaf, P()), tx.init(params))
        compiled = jax.jit(step).lower(params, state, *inputs(BATCH, 0.0)).compile()
    applied = compiled(params, state, *inputs(BATCH, 0.0))
    for before, after in zip(jax.tree.leaves((params, state)), jax.tree.leaves(applied), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    params, state = applied
    assert on_each_device(state.applied_steps) == [1] * 8
    spoiled = [(batch, 0.0, scale) for batch, scale in SPOILED_BATCHES.values()]
    spoiled += [(BATCH, value, 2.0**9) for value in (np.nan, -np.inf)]
    for batch, value, scale in spoiled:
        after, after_state = compiled(params, state, *inputs(batch, value))
        assert on_each_device(after_state.loss_scale()) == [scale] * 8
        assert on_each_device(after_state.grads_finite) == [False] * 8
        assert on_each_device(after_state.skipped_steps) == [1] * 8
        assert shard_bits((after, after_state.inner_state)) == shard_bits((params, state.inner_state))


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
