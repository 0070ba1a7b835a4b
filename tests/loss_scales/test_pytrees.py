"""Loss scales as pytrees: copying, pickling, mapping, donation, compilation and batching."""

import copy
import dataclasses
import pickle
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import ONE_OF_EACH, Dynamic, Fixed, each_kind, grads_of, named
from programs.starting import free_port, run_python

import jax_lossscale as jls

# --- Immutability, copies, pickling and donation ---


def test_base_class_is_abstract_and_subclasses_are_frozen():
    with pytest.raises(TypeError, match="abstract"):
        jls.LossScale()
    for make in ONE_OF_EACH.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().anything = 1


@each_kind
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda loss_scale: pickle.loads(pickle.dumps(loss_scale))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_keep_configuration_and_state(make, duplicate):
    loss_scale = make().adjust(False).adjust(True)
    copied = duplicate(loss_scale)
    assert jax.tree.structure(copied) == jax.tree.structure(loss_scale)
    chex.assert_trees_all_equal(copied, loss_scale, strict=True)
    chex.assert_trees_all_equal(copied.update(np.float32(1)), loss_scale.update(np.float32(1)), strict=True)


STAND_INS: dict[str, Any] = {
    "string": "bad",
    "shape": jax.ShapeDtypeStruct((), jnp.float32),
    "nan": np.nan,
    "object": object(),
}


@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=STAND_INS)
@pytest.mark.parametrize("kind", [kind for kind in ONE_OF_EACH if kind not in ("no_op", "users_own")])
def test_unflatten_does_not_validate_leaves(kind, stand_in):
    loss_scale = ONE_OF_EACH[kind]()
    leaves, structure = jax.tree.flatten(loss_scale)
    mapped = jax.tree.map(lambda leaf: stand_in, loss_scale)
    assert structure.flatten_up_to(mapped) == [stand_in] * len(leaves)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert vars(rebuilt) == vars(loss_scale)


def test_leaf_paths_are_field_names():
    def paths(kind):
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ONE_OF_EACH[kind]())]

    assert paths("fixed") == [".loss_scale_value"]
    assert paths("no_op") == []
    assert paths("dynamic") == [".current_loss_scale", ".num_good_steps"]
    assert paths("dynamic_full") == [".current_loss_scale", ".num_good_steps", ".hysteresis_left"]


@each_kind
def test_fresh_states_share_no_buffers_and_can_be_donated(make):
    first, second = make(), make()
    leaves = jax.tree.leaves((first, second))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    donating = jax.jit(lambda loss_scale, grad: loss_scale.update(grad), donate_argnums=0)
    expected, _ = second.update(np.float32(np.nan))
    moved, _ = donating(first, np.float32(np.nan))
    donating(moved, np.float32(1))
    # The values are compared in another call, because chex keeps a view of the compared arrays with jax 0.11.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moved))
    chex.assert_trees_all_equal(donating(make(), np.float32(np.nan))[0], expected)


# --- JAX transformations of loss scales ---


@each_kind
def test_update_compiles_once_for_many_steps(make):
    step = jax.jit(lambda loss_scale, grads: loss_scale.update(grads))
    loss_scale = fresh = make()
    for grad in grads_of("TTFTFFTT"):
        loss_scale, _ = step(loss_scale, grad)
    assert step._cache_size() == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(loss_scale, fresh)
    assert [leaf.weak_type for leaf in jax.tree.leaves(loss_scale)] == [False] * len(jax.tree.leaves(fresh))


@each_kind
def test_adjust_under_vmap_over_flags(make):
    loss_scale, flags = make(), np.array([True, False, True])

    @jax.jit
    def adjusted_twice(flags):
        batch = jax.vmap(loss_scale.adjust)(flags)
        batch = jax.vmap(lambda one, flag: one.adjust(flag))(batch, ~flags)
        return jax.vmap(lambda one, flag: one(), axis_size=3)(batch, flags)

    expected = [loss_scale.adjust(flag).adjust(not flag)() for flag in flags.tolist()]
    chex.assert_trees_all_equal(adjusted_twice(flags), np.stack(expected))


def test_fixed_loss_scale_accepts_an_array():
    assert Fixed(jnp.array([0.5, 8]))().tolist() == [0.5, 8]
    assert jax.vmap(lambda scale: Fixed(scale).update(jnp.nan)[0]())(jnp.float32([1, 8])).tolist() == [1, 8]


@each_kind
def test_update_reduces_the_finiteness_flag_over_a_named_axis(make):
    def step(grad):
        loss_scale, should_apply = make().update(grad, axis_name="devices")
        return loss_scale(), should_apply

    expected, should_apply = make().update(np.float32(np.nan))
    scales, applied = jax.vmap(step, axis_name="devices", out_axes=0)(jnp.stack(grads_of("TFT")))
    assert scales.tolist() == [float(expected())] * 3
    assert applied.tolist() == [bool(should_apply)] * 3


def test_serialize_rejects_a_batch_of_loss_scales():
    with pytest.raises(ValueError, match="loss_scale_value"):
        jls.serialize(jax.vmap(jls.FixedLossScale)(jnp.array([1.0, 2.0])))


# --- Construction before a JAX backend is initialized ---


CONSTRUCTION = """
import jax, optax
import jax_lossscale as jls
jls.DynamicLossScale(8, hysteresis=2), jls.FixedLossScale(8), jls.NoOpLossScale()
jls.get("dynamic"), jls.get(8), jls.get(jls.serialize(jls.DynamicLossScale())), jls.loss_scale_for("float16")
jls.loss_scaled(optax.adam(1e-3)), jls.loss_scaled(optax.sgd(1.0), 8.0), jls.MixedPrecision(optax.adam(1e-3))
jax.distributed.initialize("127.0.0.1:%d", num_processes=1, process_id=0)
print(jls.DynamicLossScale()())
"""


def test_constructors_do_not_initialize_a_backend():
    assert run_python("-c", CONSTRUCTION % free_port(), XLA_FLAGS="") == "32768.0\n"


# --- Equality and hashes of loss scales ---


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    named(
        [
            ("same", Dynamic(8), Dynamic(8), True),
            ("state", Dynamic(8), replace(Dynamic(8), current_loss_scale=4), False),
            ("configuration", Dynamic(8), Dynamic(8, 3), False),
            ("kind", Fixed(8), Dynamic(8), False),
            ("another_thing", Fixed(8), 8, False),
            ("no_op", jls.NoOpLossScale(), jls.NoOpLossScale(), True),
            ("batch", Fixed(np.float32([8, 16])), Fixed(jnp.float32([8, 16])), True),
            ("one_member", Fixed(np.float32([8, 16])), Fixed(jnp.float32([8, 4])), False),
            ("size_of_batch", Fixed(np.float32([8, 8])), Fixed(8), False),
        ]
    ),
)
def test_loss_scales_are_equal_if_configuration_and_state_are_equal(a, b, equal):
    assert (a == b) is equal
    assert (a != b) is not equal
