"""Skipped steps of `loss_scaled`, its inner optimizer, and its use inside other transformations."""

import contextlib
import functools
import platform
import re
from pathlib import Path

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import needs_optax
from programs.starting import run_python

import jax_lossscale as jls
import jax_lossscale.interop.flax

# "auto" is equivalent to one of these, depending on the platform (see `test_lowering.py`).
SKIPS = ["cond", "select"]
PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.asarray([0.25, -0.5])}
# The gradients are scaled by 8.
GRADS = {"kernel": jnp.asarray([[8.0, 16.0], [-4.0, 2.0]]), "bias": jnp.asarray([4.0, -8.0])}
BAD_GRADS = {**GRADS, "bias": jnp.asarray([4.0, jnp.nan])}
INFINITE_GRADS = {**GRADS, "bias": jnp.asarray([4.0, -jnp.inf])}
SCALE = jls.DynamicLossScale(8.0, increment_period=3)


AUTO = jls.AutoLossScale(8.0)


@functools.cache
def adam(skip, loss_scale):
    """Return one cached transformation per argument, so that tests with the same arguments share compiled steps."""
    return jls.loss_scaled(optax.adam(0.1), loss_scale, skip=skip)


def stepped(tx, grads=GRADS, params=PARAMS, state=None, **extra):
    """Return parameters and state after a step of `update`, and check that `update_and_apply` agrees."""
    state = tx.init(params) if state is None else state
    updates, after = jax.jit(tx.update)(grads, state, params, **extra)
    params_after = optax.apply_updates(params, updates)
    fused = jax.jit(tx.update_and_apply)(grads, state, params, **extra)
    chex.assert_trees_all_equal(fused[1].loss_scale, after.loss_scale)
    chex.assert_trees_all_equal_structs(fused, (params_after, after))
    chex.assert_trees_all_close(fused, (params_after, after), rtol=1e-6)
    return fused


# The columns are the gradients, `value`, `skip_if`, whether the step is applied, and the step's effect on the scale.
STEP_TABLE = {
    "finite step": (GRADS, 1.0, False, True, "good"),
    "without value and skip_if": (GRADS, None, None, True, "good"),
    "skip_if": (GRADS, 1.0, True, False, "stays"),
    "overflow": (BAD_GRADS, 1.0, False, False, "bad"),
    "overflow without value and skip_if": (INFINITE_GRADS, None, None, False, "bad"),
    "overflow and skip_if": (INFINITE_GRADS, 1.0, True, False, "bad"),
    "NaN loss": (GRADS, jnp.nan, False, False, "stays"),
    "infinite loss": (GRADS, -jnp.inf, None, False, "stays"),
    "NaN loss and NaN gradients": (BAD_GRADS, jnp.nan, False, False, "stays"),
}


@pytest.mark.parametrize(("skip", "loss_scale"), [("cond", SCALE), ("select", SCALE), ("cond", AUTO)])
@pytest.mark.parametrize(("grads", "value", "skip_if", "applied", "moves"), STEP_TABLE.values(), ids=STEP_TABLE)
def test_skipped_steps_and_scale_changes(skip, loss_scale, grads, value, skip_if, applied, moves):
    tx = adam(skip, loss_scale)
    params, before = stepped(tx)
    extra = {} if value is None else {"value": jnp.float32(value)}
    extra |= {} if skip_if is None else {"skip_if": jnp.array(skip_if)}
    after, state = stepped(tx, grads, params, before, **extra)

    largest = 16 / before.loss_scale()
    measured = {"largest": largest} if loss_scale is AUTO else {}
    expected = {
        "good": before.loss_scale.adjust(True, **measured),
        "bad": before.loss_scale.adjust(False),
        "stays": before.loss_scale,
    }
    chex.assert_trees_all_close(state.loss_scale, expected[moves], rtol=1e-6)
    assert (state.applied_steps, state.skipped_steps) == (1 + applied, 1 - applied)
    assert state.consecutive_skips == 1 - applied
    assert state.grads_finite == (grads is GRADS)
    if loss_scale is AUTO:
        np.testing.assert_equal(float(state.monitoring.largest), float(largest) if grads is GRADS else np.nan)
    if applied:
        assert (after["bias"] != params["bias"]).all()
        assert state.inner_state[0].count == 2
    else:
        chex.assert_trees_all_equal((after, state.inner_state), (params, before.inner_state))


@pytest.mark.parametrize("loss_scale", [SCALE, "auto"], ids=["dynamic", "auto"])
@pytest.mark.parametrize("skip", ["auto", "select"])
def test_all_skip_options_give_the_same_result(skip, loss_scale):
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    tx, reference = (jls.loss_scaled(inner, loss_scale, skip=how) for how in (skip, "cond"))
    state = expected = (PARAMS, tx.init(PARAMS))
    for grads in GRADS, BAD_GRADS, GRADS, GRADS:
        state = jax.jit(tx.update_and_apply)(grads, state[1], state[0])
        expected = jax.jit(reference.update_and_apply)(grads, expected[1], expected[0])
    chex.assert_trees_all_close(state, expected, rtol=1e-6)


@pytest.mark.ci
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flag names an x86 instruction set")
def test_fused_step_is_bitwise_equal_to_a_simple_implementation():
    # With fused multiply-add, XLA may round the same arithmetic differently in two programs. AVX has no fused
    # multiply-add.
    flags = "--xla_cpu_max_isa=AVX"
    script = Path(__file__).parents[1] / "programs" / "straightforward.py"
    # Without optimizations, the results are bitwise equal in any case.
    output = run_python(script, XLA_FLAGS=flags, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    assert output.splitlines() == [
        f"{dtype} {skip}: equal" for dtype in ("float32", "float16") for skip in ("auto", "cond", "select")
    ]


def test_consecutive_skips_reset_after_an_applied_step():
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    params, state, counts = PARAMS, tx.init(PARAMS), []
    for grads in BAD_GRADS, BAD_GRADS, GRADS, BAD_GRADS:
        params, state = tx.update_and_apply(grads, state, params)
        counts.append((int(state.applied_steps), int(state.skipped_steps), int(state.consecutive_skips)))
    assert counts == [(0, 1, 1), (0, 2, 2), (1, 2, 0), (1, 3, 1)]


def test_counters_saturate_at_the_largest_int32():
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    full = jnp.int32(2**31 - 1)
    state = tx.init(PARAMS)._replace(applied_steps=full, skipped_steps=full, consecutive_skips=full)
    _, after = tx.update_and_apply(BAD_GRADS, state, PARAMS)
    assert (after.skipped_steps, after.consecutive_skips) == (full, full)
    _, after = tx.update_and_apply(GRADS, state, PARAMS)
    assert (after.applied_steps, after.consecutive_skips) == (full, 0)


# --- The inner optimizer ---


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda inner: inner, id=""),
        pytest.param(
            lambda inner: optax.MultiSteps(inner, 2),
            marks=needs_optax("0.2.5", "`MultiSteps` does not accept strings as extra arguments"),
            id="MultiSteps",
        ),
    ],
)
def test_value_and_extra_arguments_are_passed_to_the_inner_optimizer(wrap):
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = jls.loss_scaled(wrap(inner), SCALE)
    tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(3.0), label="a", skip_if=False)
    assert set(seen) == {"value", "label"}
    assert seen["value"] == 3.0
    tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_line_search_receives_the_loss_function_and_unscaled_gradients():
    def loss_fn(params):
        return jnp.sum((params - 1) ** 2)

    tx = jls.loss_scaled(optax.lbfgs(), SCALE)

    @jax.jit
    def step(params, state):
        value, grads = jls.value_and_scaled_grad(loss_fn, state)(params)
        true_grads = state.loss_scale.unscale(grads)
        return tx.update_and_apply(grads, state, params, value=value, grad=true_grads, value_fn=loss_fn)

    params, state = jnp.zeros(3), tx.init(jnp.zeros(3))
    for _ in range(3):
        params, state = step(params, state)
    chex.assert_trees_all_close(params, jnp.ones(3), rtol=1e-4)


def test_schedule_does_not_advance_on_a_skipped_step():
    tx = jls.loss_scaled(optax.sgd(optax.linear_schedule(1.0, 0.0, 10)), SCALE)
    state = tx.init(PARAMS)
    sizes = []
    for grads in GRADS, BAD_GRADS, jax.tree.map(lambda leaf: leaf / 2, GRADS):
        updates, state = tx.update(grads, state, PARAMS)
        sizes.append(float(updates["bias"][0]))
    np.testing.assert_allclose(sizes, [-0.5, 0.0, -0.45], rtol=1e-6)


@pytest.mark.parametrize("skip", SKIPS)
def test_skipped_updates_have_the_dtypes_of_applied_ones(skip):
    in_bfloat16 = optax.stateless(lambda g, p: jls.cast_floating(g, jnp.bfloat16))
    inner = optax.chain(optax.scale(1.0), in_bfloat16)
    tx = jls.loss_scaled(inner, SCALE, skip=skip)
    good, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    bad, _ = tx.update(BAD_GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(good, bad)
    chex.assert_trees_all_equal(bad, jax.tree.map(jnp.zeros_like, good))
    # The sum of -0.0 and any parameter, including -0.0, is the parameter.
    assert all(jnp.signbit(leaf).all() for leaf in jax.tree.leaves(bad))


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")])
def test_half_precision_parameters_keep_their_dtype_and_have_float32_moments(dtypes):
    params = {name: PARAMS[name].astype(dtype) for name, dtype in zip(("bias", "kernel"), dtypes, strict=True)}
    received = set()

    def recorded(updates, params):
        received.update(leaf.dtype.name for leaf in jax.tree.leaves((updates, params)))
        return updates

    tx = jls.loss_scaled(optax.chain(optax.stateless(recorded), optax.adamw(0.1)), SCALE)
    step = jax.jit(tx.update_and_apply)
    state = tx.init(params)
    for grads in GRADS, BAD_GRADS, GRADS:
        params, after = step(jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        state = after
    assert tuple(leaf.dtype.name for leaf in params.values()) == dtypes
    assert received == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.inner_state)} == {"float32", "int32"}
    assert step._cache_size() == 1
    assert state.applied_steps == 2


@pytest.mark.parametrize("skip", SKIPS)
def test_state_keeps_its_dtypes_if_the_inner_optimizer_changes_them(skip):
    def update(updates, state, params=None):
        return updates, {"weak": state["weak"] + 1.0, "narrowed": state["narrowed"].astype(jnp.bfloat16)}

    inner = optax.GradientTransformation(lambda params: {"weak": 0.0, "narrowed": jnp.ones(2)}, update)
    for loss_scale in SCALE, 8.0:
        tx = jls.loss_scaled(inner, loss_scale, skip=skip)
        step = jax.jit(tx.update)
        state = tx.init(PARAMS)
        for _ in range(3):
            _, after = step(GRADS, state, PARAMS)
            chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
            state = after
        assert state.inner_state["weak"] == 3.0
        assert step._cache_size() == 1


def keeps_everything_twice():
    def init(params):
        key = jax.random.key(0)
        return {"keys": [key, key], "params": [params, params], "gradients": [params, params]}

    def update(updates, state, params):
        return updates, {**state, "params": [params, params], "gradients": [updates, updates]}

    return optax.GradientTransformation(init, update)


def test_initial_state():
    state = jls.loss_scaled(optax.sgd(0.1), "auto").init(PARAMS)
    counters = (state.applied_steps, state.skipped_steps, state.consecutive_skips)
    assert (*counters, state.grads_finite, state.monitoring.last_bad_step) == (0, 0, 0, True, None)
    assert np.isnan(state.monitoring.largest)


@pytest.mark.parametrize(
    ("inner", "loss_scale"),
    [(optax.scale_by_lbfgs(), None), (optax.contrib.cocob(), SCALE), (keeps_everything_twice(), "auto")],
    ids=["L-BFGS", "COCOB", "everything twice"],
)
def test_initial_state_can_be_donated_for_any_inner_optimizer(inner, loss_scale):
    tx = jls.loss_scaled(inner, loss_scale)
    expected = jax.jit(tx.update_and_apply)(GRADS, tx.init(PARAMS), PARAMS)
    donating = jax.jit(tx.update_and_apply, donate_argnums=(1, 2))
    after = donating(GRADS, tx.init(PARAMS), jax.tree.map(jnp.copy, PARAMS))
    chex.assert_trees_all_equal(after, expected)
    params = jax.tree.map(jnp.copy, PARAMS)
    chex.assert_trees_all_equal(donating(GRADS, tx.init(params), params), expected)


def test_donating_a_state_does_not_delete_the_loss_scale_of_the_transformation():
    # After `adjust`, the leaves are JAX arrays. The leaves of a new loss scale are NumPy scalars.
    loss_scale = SCALE.adjust(True)
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale)
    for _ in range(2):
        _, state = jax.jit(tx.update_and_apply, donate_argnums=1)(GRADS, tx.init(PARAMS), PARAMS)
        assert (state.loss_scale(), state.loss_scale.num_good_steps) == (8.0, 2)


def test_initial_state_has_no_weakly_typed_leaves():
    """A weakly typed leaf could become strongly typed in the first step, and the second step would be traced again."""
    # A user-defined loss scale may have weakly typed leaves.
    weak = jax.tree.map(lambda leaf: jnp.asarray(leaf.item()), SCALE)
    state = jls.loss_scaled(optax.sgd(0.1), weak).init(PARAMS)
    assert [leaf.weak_type for leaf in jax.tree.leaves(state)] == [False] * 7


def test_parameters_are_optional_if_the_inner_optimizer_does_not_need_them():
    tx = jls.loss_scaled(optax.sgd(0.5), SCALE)
    updates, _ = tx.update(GRADS, tx.init(PARAMS))
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: -g / 16, GRADS))
    no_gradients = {"count": np.zeros((), jax.dtypes.float0), "frozen": None}
    beside, _ = tx.update({**GRADS, **no_gradients}, tx.init({**PARAMS, "count": jnp.int32(3), "frozen": None}))
    assert beside["count"] is no_gradients["count"]
    chex.assert_trees_all_equal({name: beside[name] for name in updates}, updates)


def instructions(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return sorted(re.findall(r"= \S+ ([a-z-]+)\(", text))


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
def test_program_without_a_loss_scale_equals_that_of_the_inner_optimizer():
    for params, grads in (PARAMS, GRADS), (jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, GRADS))):
        inner = optax.adamw(0.1)
        tx = jls.loss_scaled(inner, None)
        state = tx.init(params)

        def bare(grads, state, params, inner=inner):
            updates, inner_state = inner.update(grads, state.inner_state, params)
            return optax.apply_updates(params, updates), inner_state

        def wrapped(grads, state, params, tx=tx):
            params, state = tx.update_and_apply(grads, state, params, value=jnp.float32(1.0))
            return params, state.inner_state

        assert instructions(wrapped, grads, state, params) == instructions(bare, grads, state, params)
        scaled = jls.loss_scaled(inner, SCALE)
        assert "is-finite" in instructions(scaled.update, GRADS, scaled.init(PARAMS), PARAMS)


def test_vmap_skips_the_steps_of_members_separately():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), GRADS, BAD_GRADS, GRADS)
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), PARAMS)
    for skip in SKIPS:
        tx = adam(skip, SCALE)
        after, states = jax.jit(jax.vmap(tx.update_and_apply))(stacked, jax.vmap(tx.init)(members), members)
        assert states.loss_scale().tolist() == [8, 4, 8]
        assert (after["bias"] == members["bias"]).all(axis=-1).tolist() == [False, True, False]


def test_flax_rejects_the_state_of_another_configuration():
    state = flax.serialization.to_state_dict(jls.DynamicLossScale(hysteresis=2))
    with pytest.raises(ValueError, match="same configuration"):
        flax.serialization.from_state_dict(jls.DynamicLossScale(), state)


SCALED = {"bf16": jnp.ones(2, jnp.bfloat16), "f16": jnp.ones(2, jnp.float16)}
WARNS = {  # whether `init` warns that updates of 16-bit parameters are lost
    "bfloat16": (lambda: jls.loss_scaled(optax.adam(0.1), None), "bf16", True),
    "float16": (lambda: jls.loss_scaled(optax.adam(0.1)), "f16", True),
    "float16 without a loss scale": (lambda: jls.loss_scaled(optax.adam(0.1), None), "f16", True),
    "only the state is rounded": (
        lambda: jls.loss_scaled(jls.half_precision_state(optax.adam(0.1)), None),
        "bf16",
        True,
    ),
    "a trainer": (lambda: jls.MixedPrecision(optax.adam(0.1), None, dtype=jnp.bfloat16).optimizer, "bf16", True),
    "master weights": (lambda: jls.loss_scaled(jls.master_weights(optax.adam(0.1)), None), "bf16", False),
    "frozen": (lambda: jls.loss_scaled(optax.set_to_zero(), None), "bf16", False),
    "no state": (lambda: jls.loss_scaled(optax.sgd(0.1)), "f16", False),
}


@pytest.mark.parametrize(("make", "name", "warns"), WARNS.values(), ids=WARNS)
def test_init_warns_of_16_bit_parameters_whose_updates_are_lost(make, name, warns):
    share = {"f16": 4096, "bf16": 512}[name]
    # Only parameters of the reported dtype are counted.
    params = {"a": SCALED[name], "b": jnp.ones(2), **SCALED}
    message = rf"got 2 {SCALED[name].dtype} parameters, the first at \"\['a'\]\", so updates that are smaller than "
    message += rf"1/{share} of .*jls\.master_weights.*jls\.stochastic_rounding"
    with pytest.warns(UserWarning, match=message) if warns else contextlib.nullcontext():
        make().init(params)


def with_counter(inner):
    return optax.GradientTransformation(lambda params: (inner.init(params), jnp.zeros(())), inner.update)


CHAINS = {  # the inner optimizer, and whether the wrapper is the last transformation that changes its updates
    "last": (lambda wrap: optax.chain(optax.clip(1.0), wrap(optax.adam(0.1))), True),
    "outermost": (lambda wrap: wrap(optax.chain(optax.adam(0.1), optax.scale(0.5))), True),
    "state with an array": (lambda wrap: with_counter(wrap(optax.adam(0.1))), True),
    "of different parameters": (
        lambda wrap: optax.chain(*(optax.masked(wrap(optax.adam(0.1)), {"bf16": of}) for of in (True, False))),
        True,
    ),
    "inside": (lambda wrap: optax.chain(optax.chain(optax.clip(1.0), wrap(optax.adam(0.1)), optax.scale(0.5))), False),
    "in a named chain": (lambda wrap: optax.named_chain(("b", wrap(optax.adam(0.1))), ("a", optax.scale(0.5))), False),
    "in a partition": (
        lambda wrap: optax.transforms.partition({"a": wrap(optax.adam(0.1)), "b": optax.set_to_zero()}, {"bf16": "a"}),
        True,
    ),
}


@pytest.mark.parametrize("wrap", [jls.master_weights, jls.stochastic_rounding])
@pytest.mark.parametrize(("make", "is_last"), CHAINS.values(), ids=CHAINS)
def test_a_transformation_after_a_rounding_wrapper_is_rejected(make, is_last, wrap):
    params = {"bf16": SCALED["bf16"]}
    for tx in jls.loss_scaled(make(wrap), None), jls.MixedPrecision(make(wrap), None, dtype=jnp.bfloat16).optimizer:
        with (
            contextlib.nullcontext() if is_last else pytest.raises(ValueError, match=r"`optax.chain\(...\)`, in which")
        ):
            tx.init(params)


def test_step_without_gradients_counts_as_finite():
    tx = jls.loss_scaled(optax.sgd(1.0), jls.DynamicLossScale(8.0, 1))
    params, state = tx.update_and_apply({"kernel": None}, tx.init({"kernel": None}), {"kernel": None})
    assert (params, state.loss_scale(), state.applied_steps) == ({"kernel": None}, 16.0, 1)


# --- Masks around the wrapper ---

MASK = {"kernel": True, "bias": False}
AROUND = {
    "masked": lambda tx: optax.masked(tx, MASK),
    "in a partition": lambda tx: optax.transforms.partition(
        {"a": tx, "b": optax.sgd(0.1)}, {"kernel": "a", "bias": "b"}
    ),
}


@pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND)
def test_mask_around_the_wrapper_is_rejected(wrap):
    """The gradients of masked-out leaves would stay scaled."""
    with pytest.raises(ValueError, match=r"init\(params=.*loss_scaled\(optax.masked\(inner, mask\)\)"):
        wrap(jls.loss_scaled(optax.sgd(0.1), SCALE)).init(PARAMS)
    unscaled = wrap(jls.loss_scaled(optax.sgd(1.0), None))
    updates, _ = unscaled.update(GRADS, unscaled.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates["kernel"], -GRADS["kernel"])
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    masked = {**GRADS, "bias": optax.MaskedNode()}
    with pytest.raises(ValueError, match=r"update\(updates=.*MaskedNode"):
        tx.update(masked, tx.init(PARAMS), PARAMS)


def test_extra_argument_may_be_the_same_array_as_a_gradient():
    tx = jls.loss_scaled(optax.sgd(0.1), SCALE)
    _, state = tx.update_and_apply(GRADS, tx.init(PARAMS), PARAMS, batch=GRADS["kernel"])
    assert state.applied_steps == 1
