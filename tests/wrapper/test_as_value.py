"""Copies, pickles and other uses of a `loss_scaled` transformation as a Python object and as a pytree."""

import copy
import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_lossscale as jls

pytestmark = pytest.mark.ci

PARAMS = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.float32(0.5)}
GRADS = jax.tree.map(lambda leaf: 1024.0 * jnp.ones_like(leaf), PARAMS)


def make():
    """Return a loss-scaled optimizer with a fixed loss scale of 1024."""
    return jls.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 1024.0)


def through_cloudpickle(tx):
    cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    return pickle.loads(cloudpickle.dumps(tx))


class Holder(eqx.Module):
    tx: optax.GradientTransformation


REBUILT = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": through_cloudpickle,
    "tree_map": lambda tx: jax.tree.map(lambda leaf: leaf, tx),
    "make": lambda tx: type(tx)._make(tx),
    "replace_init": lambda tx: tx._replace(init=tx.init),
    "replace_update": lambda tx: tx._replace(update=lambda *args, **kwargs: tx.update(*args, **kwargs)),
    "equinox_module": lambda tx: eqx.combine(*eqx.partition(Holder(tx), eqx.is_array)).tx,
    "extra_args": optax.with_extra_args_support,
}


@pytest.mark.parametrize("rebuild", REBUILT.values(), ids=REBUILT)
def test_rebuilt_transformation_takes_the_same_steps(rebuild):
    """The original transformation has already run, so it contains a compiled step."""
    tx = make()
    state = tx.init(PARAMS)
    calls = [(name, value) for name in ("update", "update_and_apply") for value in (1.0, jnp.nan)]
    expected = [getattr(tx, name)(GRADS, state, PARAMS, value=value) for name, value in calls]
    rebuilt = rebuild(tx)
    assert isinstance(rebuilt, optax.GradientTransformationExtraArgs)
    assert jax.tree.structure(rebuilt.init(PARAMS)) == jax.tree.structure(state)
    results = [getattr(rebuilt, name)(GRADS, state, PARAMS, value=value) for name, value in calls]
    jax.tree.map(np.testing.assert_array_equal, results, expected)


def test_transformation_unpacks_into_init_and_update():
    tx = make()
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    assert tx == tx._replace()
    assert hash(tx) == hash(tx._replace())


def test_deep_copy_is_equal_to_the_original():
    """If copies are equal, a copied train state does not cause a recompilation."""
    for tx in optax.adam(0.1), make():
        assert copy.deepcopy(tx) == tx


def test_repr_dir_and_docstrings():
    tx = make()
    assert repr(tx).startswith("LossScaledTransformation(loss_scaled(")
    assert repr(tx).endswith("): init, update, update_and_apply)")
    assert "<built-in function len>: init" in repr(tx._replace(update=len))
    assert "update_and_apply" in dir(tx)
    for function in tx.init, tx.update, tx.update_and_apply, type(tx).update_and_apply:
        assert function.__doc__
    repr(nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param))


# --- Pytrees with leaves that are not arrays ---


@pytest.mark.parametrize("skip_if", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_arrays_without_gradients_are_returned_unchanged(compiled, skip_if):
    """Frozen layers have no gradients, either as single arrays or as whole subtrees. LAMB reads the parameters."""
    tx = jls.loss_scaled(optax.lamb(0.1), 1024.0)
    frozen = {"embedding": jnp.ones(3), "norm": {"scale": jnp.ones(2), "offset": jnp.zeros(2)}}
    grads = {"layer": GRADS, "embedding": None, "norm": None}
    state = tx.init({"layer": PARAMS, "embedding": None, "norm": None})
    step = jax.jit(tx.update_and_apply) if compiled else tx.update_and_apply
    updates, _ = tx.update(grads, state, {"layer": PARAMS, **frozen}, skip_if=skip_if)
    after, state = step(grads, state, {"layer": PARAMS, **frozen}, skip_if=skip_if)
    chex.assert_trees_all_close(eqx.apply_updates({"layer": PARAMS, **frozen}, updates), after)
    expected, _ = step(GRADS, tx.init(PARAMS), PARAMS, skip_if=skip_if)
    jax.tree.map(np.testing.assert_array_equal, after, {"layer": expected, **frozen})
    assert compiled or after["embedding"] is frozen["embedding"]
    assert state.skipped_steps == skip_if


def test_leaves_without_gradients_that_are_not_arrays_get_no_update():
    tx = make()
    others = {"inference": False, "depth": 3, "steps": jnp.int32(3), "activation": jax.nn.relu}
    others |= {"dtype": jnp.float16, "names": np.array(["a", "b"])}
    model, grads = {"layer": PARAMS, **others}, {"layer": GRADS, **dict.fromkeys(others)}
    updates, _ = jax.jit(lambda grads: tx.update(grads, tx.init(model), model))(grads)
    assert all(updates[name] is None for name in others if name != "steps")
    assert updates["steps"] == 0
    after = eqx.apply_updates(model, updates)
    assert (after["inference"], after["depth"], after["steps"]) == (False, 3, 3)
