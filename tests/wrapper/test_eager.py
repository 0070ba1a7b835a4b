"""Steps outside `jax.jit`: number of compilations, lifetime of references, and agreement with compiled steps."""

import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds import assert_same_bits

import jax_lossscale as jls

pytestmark = pytest.mark.ci

PARAMS = {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.float32(0.5)}
GRADS = {"kernel": jnp.array([8.0, 16.0]), "bias": jnp.float32(4.0)}
BAD_GRADS = {**GRADS, "bias": jnp.float32(np.nan)}
LOSS_SCALES = {"dynamic": jls.DynamicLossScale(8.0), "auto": "auto", "fixed": 8.0, "none": None}

# Each entry maps the step number to extra arguments, and states whether the whole step is one compiled call.
EXTRAS = {
    "nothing": (lambda step: {}, True),
    "loss": (lambda step: {"value": float(step)}, True),
    "array": (lambda step: {"factor": jnp.float32(step)}, True),
    "array of NumPy": (lambda step: {"factor": np.full((), step, np.float32)}, True),
    "tree of arrays": (lambda step: {"factor": jnp.float32(1), "others": {"a": [jnp.full(2, step), None]}}, True),
    "number": (lambda step: {"factor": step}, False),
    "scalar of NumPy": (lambda step: {"factor": np.float32(step)}, False),
    "function": (lambda step: {"function": lambda leaf: leaf * step}, False),
    "string": (lambda step: {"label": f"step {step}"}, False),
    "array of strings": (lambda step: {"label": np.array([f"step {step}"])}, False),
}


def scale_by_extra():
    def update(updates, state, params=None, *, factor=1.0, function=lambda leaf: leaf, **extra_args):
        return jax.tree.map(lambda leaf: function(leaf * factor), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def chain():
    return optax.chain(scale_by_extra(), optax.adam(0.1))


@pytest.mark.parametrize(
    ("extra", "is_compiled", "loss_scale"),
    [
        *((*extra, LOSS_SCALES["dynamic"]) for extra in EXTRAS.values()),
        *((*EXTRAS["nothing"], loss_scale) for loss_scale in LOSS_SCALES.values()),
    ],
)
def test_eager_steps_compile_once_for_any_extra_arguments(extra, is_compiled, loss_scale, compilations):
    tx = jls.loss_scaled(chain(), loss_scale)
    steps = [GRADS, BAD_GRADS, GRADS, BAD_GRADS, GRADS]
    (params, state), counts = (PARAMS, tx.init(PARAMS)), []
    extras = [extra(step) for step in range(1, 6)]
    for grads, extra_args in zip(steps, extras, strict=True):
        before = len(compilations)
        params, state = tx.update_and_apply(grads, state, params, **extra_args)
        counts.append(len(compilations) - before)
    # A step that is not one compiled call executes additional operations at the first nonfinite step, and compiles them
    # then.
    assert counts[1 if is_compiled else 2 :] == [0] * (4 if is_compiled else 3)
    assert not is_compiled or counts[0] == 1


def test_traced_step_is_not_wrapped_in_its_own_jit_call():
    tx = jls.loss_scaled(chain(), 8.0)
    program = jax.make_jaxpr(tx.update_and_apply)(GRADS, tx.init(PARAMS), PARAMS)
    assert "_step" not in [eqn.params.get("name") for eqn in program.eqns]


@pytest.mark.parametrize(
    ("loss_scale", "skip", "apply_together"),
    [("dynamic", "cond", True), ("auto", "select", True), ("auto", "cond", False), (8.0, "cond", True)],
)
def test_eager_and_compiled_steps_agree(loss_scale, skip, apply_together):
    tx = jls.loss_scaled(chain(), loss_scale, skip=skip, record_bad_steps=True)

    def step(grads, state, params, **extra_args):
        if apply_together:
            return tx.update_and_apply(grads, state, params, **extra_args)
        updates, state = tx.update(grads, state, params, **extra_args)
        return updates, optax.apply_updates(params, updates), state

    jitted = jax.jit(step, static_argnames="label")
    ways = [
        lambda *args: step(*args, value=1.0, skip_if=False),
        lambda *args: step(*args, label="a"),
        lambda *args: jitted(*args, label="a"),
    ]
    states = [(PARAMS, tx.init(PARAMS))] * len(ways)
    for grads in GRADS, BAD_GRADS, GRADS:
        results = [way(grads, state, params) for way, (params, state) in zip(ways, states, strict=True)]
        for result in results[:2]:
            chex.assert_trees_all_equal_shapes_and_dtypes(result, results[2])
            chex.assert_trees_all_close(result, results[2], rtol=1e-6)
        if apply_together:
            assert_same_bits(results[0], results[2])
        states = [result[-2:] for result in results]


STEPPED = {
    "update": lambda tx, state: tx.update(GRADS, state, PARAMS),
    "update_and_apply": lambda tx, state: tx.update_and_apply(GRADS, state, PARAMS, value=1.0),
    "with an array": lambda tx, state: tx.update(GRADS, state, PARAMS, factor=jnp.float32(2)),
    "with a function": lambda tx, state: tx.update_and_apply(GRADS, state, PARAMS, function=lambda leaf: leaf),
    "in a program": lambda tx, state: jax.jit(tx.update_and_apply)(GRADS, state, PARAMS),
}


@pytest.mark.parametrize("step", STEPPED.values(), ids=STEPPED)
def test_transformation_and_its_closures_are_freed_after_a_step(step):
    def stepped():
        closed_over = jnp.full(1000, 3.0)
        times = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: leaf * closed_over[0], updates))
        tx = jls.loss_scaled(optax.chain(scale_by_extra(), times), LOSS_SCALES["dynamic"])
        step(tx, tx.init(PARAMS))
        return weakref.ref(tx.update.__self__), weakref.ref(closed_over)

    references = [reference for _ in range(4) for reference in stepped()]
    gc.collect()
    assert [reference() for reference in references] == [None] * 8


def test_eager_step_is_differentiable_with_respect_to_closed_over_values():
    def after(rate, grads):
        tx = jls.loss_scaled(optax.sgd(rate), 8.0)
        params, _ = tx.update_and_apply(grads, tx.init(PARAMS), PARAMS, value=1.0)
        return params["bias"]

    assert jax.grad(after)(0.1, GRADS) == -0.5
    assert jax.grad(after)(0.1, {**GRADS, "bias": 2 * GRADS["bias"]}) == -1.0


@pytest.mark.parametrize("setting", ["nesterov", jnp.float16, jnp.negative], ids=["string", "dtype", "function"])
def test_inner_optimizer_state_may_contain_leaves_that_are_not_arrays(setting):
    def update(updates, state, params=None):
        assert state["setting"] is setting
        return updates, {**state, "steps": state["steps"] + 1}

    inner = optax.GradientTransformation(lambda params: {"setting": setting, "steps": jnp.zeros((), int)}, update)
    tx = jls.loss_scaled(inner, 8.0)
    params, state = tx.update_and_apply(GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(params, {"kernel": jnp.array([2.0, 0.0]), "bias": jnp.float32(1.0)})
    assert state.inner_state["setting"] is setting
    assert state.inner_state["steps"] == 1
