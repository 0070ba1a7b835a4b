"""What torch's own tests state of its `GradScaler`, asked of ours: whole runs, with a scale and without, end alike.

As there: four batches, a scale of 128 that doubles after every good step, so that any error of scale would show, and
one batch whose gradients are made infinite. The control trains without scaling, and leaves that step out. What torch
tests of devices, autocast and sparse kernels is CUDA's, and not here. Where the answer is another on purpose, the test
says so, and `docs/migrating.md` says why.
"""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

INITIAL, BAD_STEP = 128.0, 2
SCALES = {"scaled": jls.DynamicLossScale(INITIAL, 1), "disabled": None}
each_scale = pytest.mark.parametrize("loss_scale", SCALES.values(), ids=SCALES)


def random(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {"first": random(8, 8, seed=0) / 3, "second": random(8, 8, seed=1) / 3}
DATA = [(random(8, 8, seed=2 + i), random(8, 8, seed=20 + i)) for i in range(4)]


def mse(params, inputs, targets):
    return jnp.mean((inputs @ params["first"] @ params["second"] - targets) ** 2)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def penalized(params, inputs, targets):
    loss, grads = jax.value_and_grad(mse)(params, inputs, targets)
    return loss + norm(grads)


def poisoned(grads):
    return {**grads, "second": jnp.full_like(grads["second"], jnp.inf)}


def run_control(inner, loss_fn=mse, skips=()):
    params, state = PARAMS, inner.init(PARAMS)
    for step, batch in enumerate(DATA):
        if step not in skips:
            updates, state = inner.update(jax.grad(loss_fn)(params, *batch), state, params)
            params = optax.apply_updates(params, updates)
    return params


def run_scaled(inner, loss_scale, loss_fn=mse, bad_steps=()):
    tx = jls.loss_scaled(inner, loss_scale)
    params, state = PARAMS, tx.init(PARAMS)
    for step, batch in enumerate(DATA):
        value, grads = jls.value_and_scaled_grad(loss_fn, state)(params, *batch)
        grads = poisoned(grads) if step in bad_steps else grads
        params, state = tx.update_and_apply(grads, state, params, value=value)
        state = pickle.loads(pickle.dumps(state))  # at any time: torch may between iterations only
    return params, state


def assert_same_run(loss_scale, inner, loss_fn=mse):
    skips = () if loss_scale is None else (BAD_STEP,)
    params, state = run_scaled(inner, loss_scale, loss_fn, bad_steps=skips)
    chex.assert_trees_all_close(params, run_control(inner, loss_fn, skips), rtol=1e-6, atol=1e-7)
    expected = 1.0 if loss_scale is None else INITIAL * 2**3 / 2
    assert jls.get_loss_scale(state)() == expected


@each_scale
@pytest.mark.parametrize(
    "inner", [optax.sgd(1.0), optax.sgd(1.0, momentum=0.9), optax.adam(0.1)], ids=["sgd", "mom", "adam"]
)
def test_a_run_with_a_scale_is_the_run_without(loss_scale, inner):
    assert_same_run(loss_scale, inner)


@each_scale
def test_clipping_sees_unscaled_gradients(loss_scale):
    """Inside the chain, where torch has ``unscale_`` before it; 0.2 is small enough to matter."""
    assert norm(jax.grad(mse)(PARAMS, *DATA[0])) > 0.2
    assert_same_run(loss_scale, optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(1.0)))


@each_scale
def test_a_gradient_penalty_needs_nothing(loss_scale):
    """On purpose: in torch the inner gradients are scaled, too, and are unscaled by hand."""
    assert_same_run(loss_scale, optax.sgd(0.1), penalized)


@each_scale
def test_accumulation(loss_scale):
    """Two batches a step, which in torch is one ``step`` and ``update`` after two ``backward``."""
    inner = optax.sgd(1.0)
    tx = jls.loss_scaled(inner, loss_scale)
    params, state = PARAMS, tx.init(PARAMS)
    control, control_state = PARAMS, inner.init(PARAMS)
    for first, second in (DATA[:2], DATA[2:]):
        both = tuple(jnp.concatenate(parts) for parts in zip(first, second, strict=True))

        def loss_of_batch(params, batch):
            return mse(params, *batch)

        window = jls.accumulate_gradients(loss_of_batch, state, num_microbatches=2)(params, both)
        params, state = tx.update_and_apply(window.grads, state, params, value=window.value)
        halves = [jax.grad(mse)(control, *batch) for batch in (first, second)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        updates, control_state = inner.update(mean, control_state, control)
        control = optax.apply_updates(control, updates)
    chex.assert_trees_all_close(params, control, rtol=1e-5, atol=1e-6)
    assert jls.get_loss_scale(state)() == (1.0 if loss_scale is None else INITIAL * 2**2)


def test_of_two_optimizers_only_the_one_that_overflows_skips_and_backs_off():
    """On purpose: torch's two share one scale, which goes down for both."""

    def losses(params):
        outputs = {name: DATA[0][0] @ params[name]["kernel"] for name in params}
        first = jnp.mean((0.3 * outputs["a"] + 0.7 * outputs["b"] - DATA[0][1]) ** 2)
        second = jnp.mean((0.6 * outputs["a"] - 0.4 * outputs["b"] - DATA[0][1]) ** 2)
        return first + second

    params = {"a": {"kernel": PARAMS["first"]}, "b": {"kernel": PARAMS["second"]}}
    tx = jls.loss_scaled(optax.sgd(1.0), jls.DynamicLossScale(INITIAL, 1))
    states = {name: tx.init(params[name]) for name in params}
    control = params
    for step in range(4):
        grads = jax.grad(losses)(params)
        control = {
            name: control[name]
            if (name, step) == ("b", BAD_STEP)
            else jax.tree.map(lambda p, g: p - g, control[name], grads[name])
            for name in params
        }
        new_params = {}
        for name in params:
            scale = jls.get_loss_scale(states[name])
            scaled = jax.tree.map(jnp.full_like, grads[name], {"kernel": jnp.inf})
            if (name, step) != ("b", BAD_STEP):
                scaled = scale.scale(grads[name])
            new_params[name], states[name] = tx.update_and_apply(scaled, states[name], params[name])
        params = new_params
    chex.assert_trees_all_close(params, control, rtol=1e-6, atol=1e-7)
    assert [float(states[name].loss_scale()) for name in "ab"] == [INITIAL * 2**4, INITIAL * 2**3 / 2]


def test_the_rule_with_a_backoff_of_a_quarter():
    loss_scale = jls.DynamicLossScale(4.0, 2, 2.0, backoff_factor=0.25)
    rows = []
    for finite in [True, True, False]:
        loss_scale = loss_scale.adjust(finite)
        rows.append((int(loss_scale.num_good_steps), float(loss_scale())))
    assert rows == [(1, 4.0), (0, 8.0), (0, 2.0)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("bad", [None, jnp.inf, jnp.nan])
@pytest.mark.parametrize("where", range(4))
def test_one_bad_element_anywhere_is_found(dtype, bad, where):
    """Of contiguous and transposed and sliced gradients, of mixed dtypes: torch's "perfect storm".

    On purpose: torch refuses to unscale float16 gradients; here they are unscaled in float32.
    """
    full = jnp.full((10, 10), 4.0)
    grads = [full, full[:, :5], full.T.astype(jnp.float16), full.astype(dtype)]
    if bad is not None:
        grads[where] = grads[where].at[2, 2].set(bad)
    unscaled = jls.FixedLossScale(4.0).unscale(grads)
    assert bool(jls.all_finite(unscaled)) == (bad is None)
    assert {leaf.dtype for leaf in unscaled} == {jnp.dtype(jnp.float32)}
    if bad is None:
        chex.assert_trees_all_equal(unscaled, [jnp.ones(leaf.shape) for leaf in grads])


def test_a_scale_that_would_pass_float32_stays():
    """In the words of torch: "grad scale will not overflow"."""
    largest = float(np.finfo(np.float32).max)
    assert float(jls.DynamicLossScale(largest, 1).adjust(True)()) == largest


def test_a_tree_of_scales():
    """``GradScaler.scale`` of tuples and lists of outputs."""
    ones = jnp.full(1, 4.0)
    outputs = (ones, (ones, ones), [ones, (ones, ones)])
    scaled = jls.FixedLossScale(2.0).scale(outputs)
    assert jax.tree.structure(scaled) == jax.tree.structure(outputs)
    assert all(leaf == 8.0 for leaf in jax.tree.leaves(scaled))


def test_a_step_without_gradients_is_a_good_step():
    """On purpose: torch has the assertion "No inf checks were recorded"."""
    tx = jls.loss_scaled(optax.sgd(1.0), jls.DynamicLossScale(INITIAL, 1))
    params, state = tx.update_and_apply({"kernel": None}, tx.init({"kernel": None}), {"kernel": None})
    assert params == {"kernel": None}
    assert (float(state.loss_scale()), int(state.applied_steps)) == (2 * INITIAL, 1)
