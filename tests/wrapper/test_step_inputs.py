"""The arguments `value` and `grads_finite` of `update`, small scales, dtype promotion and parameter types."""

import itertools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

PARAMS = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.float32(0.5)}
GRADS = {"kernel": jnp.array([8.0, 16.0]), "bias": jnp.float32(4.0)}  # The gradients are scaled by 8.
BAD_GRADS = {**GRADS, "bias": jnp.float32(jnp.nan)}
SCALE = jls.DynamicLossScale(8.0)
CALLS = {"eager": lambda function: function, "jit": jax.jit}

# --- The argument `value` ---

NO_LOSS = {
    "pair": (1.0, {"accuracy": 0.5}),
    "string": "0.5",
    "vector": jnp.ones(2),
    "vector_of_one": jnp.ones(1),
    "bool": True,
    "flag": jnp.array(True),
    "complex": 1j,
    "key": jax.random.key(0),
}


@pytest.mark.parametrize("value", NO_LOSS.values(), ids=NO_LOSS)
def test_value_must_be_a_real_scalar(value):
    for loss_scale in SCALE, None:
        tx = jls.loss_scaled(optax.sgd(0.1), loss_scale)
        for call, method in itertools.product(CALLS.values(), (tx.update, tx.update_and_apply)):
            step = call(lambda grads, tx=tx, method=method: method(grads, tx.init(PARAMS), PARAMS, value=value))
            with pytest.raises(ValueError, match=rf"{method.__name__}\(value=.*real scalar.*got"):
                step(GRADS)


SCALARS = [1, 1.0, np.float16(1), np.array(1.0), np.ones(1, jnp.bfloat16)[0], jnp.bfloat16(1), jnp.int32(1)]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__}-{value!r}")
def test_value_accepts_python_numpy_and_jax_scalars(value):
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    _, state = tx.update_and_apply(GRADS, tx.init(PARAMS), PARAMS, value=value)
    assert state.applied_steps == 1


def test_gradients_may_be_a_pair_with_a_scalar():
    params, tx = (jnp.float32(1), jnp.ones(2)), jls.loss_scaled(optax.sgd(1.0), SCALE)
    _, state = tx.update_and_apply(params, tx.init(params), params)
    assert state.applied_steps == 1


# --- The argument `grads_finite` ---


def test_gradients_are_not_read_if_grads_finite_is_given():
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    state = tx.init(PARAMS)

    def questions(**kwargs):
        jaxpr = jax.make_jaxpr(lambda grads: tx.update_and_apply(grads, state, PARAMS, **kwargs))(GRADS)
        return str(jaxpr).count("largest_magnitude")

    assert questions() > 0
    assert questions(grads_finite=jnp.array(True)) == 0
    assert questions(grads_finite=jnp.array(True), skip_if=jnp.array(False)) == 0


# --- Scales below 1, which can overflow when finite scaled gradients are divided by them ---

BELOW_ONE = {
    "set_by_hand": replace(jls.DynamicLossScale(), current_loss_scale=0.25),
    "constructor": jls.DynamicLossScale(current_loss_scale=0.25),
    "floor_below": jls.DynamicLossScale(0.25, min_loss_scale=2.0**-10),
    "tiny": replace(jls.DynamicLossScale(), current_loss_scale=2.0**-120),
    "fixed": jls.FixedLossScale(np.float32([0.25, 8]), skip_nonfinite=True),
}


@pytest.mark.parametrize(("skip", "dtype"), [("cond", jnp.float32), ("select", jnp.bfloat16)])
@pytest.mark.parametrize("loss_scale", BELOW_ONE.values(), ids=BELOW_ONE)
def test_overflow_in_unscaling_skips_the_step(loss_scale, dtype, skip):
    if loss_scale().ndim:  # The scale is a batch element, and its static configuration does not contain the value.
        loss_scale = jax.tree.map(lambda leaf: leaf[0], loss_scale)
    tx = jls.loss_scaled(optax.sgd(1.0), 8.0, skip=skip)
    params = {"large": jnp.zeros(2**16), "small": jnp.zeros(3)}
    state = tx.init(params)._replace(loss_scale=loss_scale)
    step = jax.jit(tx.update_and_apply)
    for leaf in params:
        grads = jax.tree.map(lambda param: jnp.zeros(param.shape, dtype), params)
        finite, state_after = step({**grads, leaf: grads[leaf].at[-1].set(1e-30)}, state, params)
        assert jax.tree.all(jax.tree.map(lambda param: jnp.isfinite(param).all(), finite))
        assert state_after.skipped_steps == 0
        after, state_after = step({**grads, leaf: grads[leaf].at[-1].set(3e38)}, state, params)
        chex.assert_trees_all_equal(after, params)
        assert (state_after.skipped_steps, bool(state_after.grads_finite)) == (1, False)


# --- Skipped updates, promotion and weak types ---


@pytest.mark.parametrize(("skip", "call"), [("cond", jax.jit), ("select", jax.jit), ("auto", lambda step: step)])
def test_skipped_step_keeps_parameters_bitwise_with_apply_updates(skip, call):
    params = {"real": jnp.array([-0.0, 0.0, 1.5]), "complex": jnp.array([complex(-0.0, -0.0), 1j]), "count": 3}
    grads = {
        "real": jnp.full(3, jnp.nan),
        "complex": jnp.zeros(2, jnp.complex64),
        "count": np.zeros((), jax.dtypes.float0),
    }
    tx = jls.loss_scaled(optax.sgd(1.0), SCALE, skip=skip)
    updates, state = call(tx.update)(grads, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    assert state.skipped_steps == 1
    for name in "real", "complex":
        assert np.asarray(after[name]).tobytes() == np.asarray(params[name]).tobytes()
    assert after["count"] == 3


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "loss_scale"),
    [
        ("float16", jls.AutoLossScale(8.0, max_loss_scale=2.0**15)),
        ("bfloat16", jls.DynamicLossScale(8.0, 1, max_loss_scale=2.0**15, hysteresis=2)),
        ("float32", 8.0),
    ],
)
def test_steps_are_the_same_under_strict_promotion(dtype, loss_scale):
    params, grads = (jax.tree.map(lambda leaf: leaf.astype(dtype), tree) for tree in (PARAMS, GRADS))
    results = []
    for promotion in "standard", "strict":
        with jax.numpy_dtype_promotion(promotion):
            tx = jls.loss_scaled(optax.sgd(0.1, momentum=0.9), loss_scale)  # Adam does not support strict promotion.
            kwargs = {"value": jnp.float16(1), "skip_if": False}
            first = jax.jit(tx.update_and_apply)(grads, tx.init(params), params, **kwargs)
            results.append((first, tx.update(grads, first[1], first[0], **kwargs)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_python_float_parameters_become_strongly_typed():
    tx = jls.loss_scaled(optax.sgd(1.0), SCALE)
    for call in CALLS.values():
        for grad in 8.0, float("nan"):
            after, state = call(tx.update_and_apply)(grad, tx.init(1.0), 1.0)
            updates, _ = call(tx.update)(grad, tx.init(1.0), 1.0)
            assert not any(leaf.weak_type for leaf in jax.tree.leaves((after, updates, state)))
            assert (after, after.dtype) == (1.0 if np.isnan(grad) else 0.0, jnp.result_type(float))


def test_apply_if_finite_around_the_wrapper_prevents_scale_changes():
    """`apply_if_finite` restores the state before the overflow, so `docs/guide/accumulation.md` advises against it."""
    tx = optax.apply_if_finite(jls.loss_scaled(optax.sgd(0.1), SCALE), max_consecutive_errors=100)
    state = tx.init(PARAMS)
    for _ in range(5):
        _, state = tx.update(BAD_GRADS, state, PARAMS)
    assert jls.get_loss_scale(state)() == 8.0


def failing(error):
    def update(updates, state, params=None):
        raise error

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_errors_of_the_inner_optimizer_are_passed_on(compiled):
    params = {"kernel": jnp.ones(2), "frozen": None, "layers": [jnp.ones(3)]}
    for grads in params, {**params, "layers": None}:
        tx = jls.loss_scaled(failing(ValueError("of its own")))
        step = jax.jit(tx.update_and_apply) if compiled else tx.update_and_apply
        with pytest.raises(ValueError, match=r"^of its own"):
            step(grads, tx.init(params), params)


@pytest.mark.parametrize(
    ("name", "meant"), [("skipif", "skip_if"), ("skip_fi", "skip_if"), ("grad_finite", "grads_finite")]
)
def test_misspelled_argument_raises_an_error_that_suggests_the_name(name, meant):
    tx = jls.loss_scaled(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    for method in (tx.update, tx.update_and_apply):
        with pytest.raises(ValueError, match=f"has no argument `{name}`. Did you mean '{meant}'"):
            method(params, tx.init(params), params, **{name: False})


def test_similar_argument_of_the_inner_optimizer_is_passed_on():
    inner = optax.GradientTransformationExtraArgs(lambda params: (), lambda grads, state, params, values: (values, ()))
    tx = jls.loss_scaled(inner)
    assert tx.update(PARAMS, tx.init(PARAMS), PARAMS, values=GRADS)[0]["bias"] == 4
