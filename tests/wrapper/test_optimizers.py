"""Every optimizer of optax, wrapped: it steps as the bare one does, and a bad step leaves it untouched.

The scale is a power of two, so the wrapped chain sees the very same gradients. What remains is rounding: two programs
of XLA may contract a product and a sum differently.
"""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

PARAMS = {
    "kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32),
    "bias": jnp.asarray([0.5, -1.0, 2.0], jnp.float32),
}
SCALE = 2.0**10
STEPS = 5
BAD_STEP = 2  # counted from 0

RATE = {"learning_rate": 1e-2}
# Of what is random; before optax 0.2.5 the argument was another.
SEED = {"key": 0} if "key" in inspect.signature(optax.add_noise).parameters else {"seed": 0}
# The arguments of every public transformation of `optax` and `optax.contrib` that needs no function of the user's.
OPTIMIZERS = {
    optax: {
        **dict.fromkeys(
            "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion "
            "noisy_sgd novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd "
            "sign_sgd signum sm3 yogi".split(),
            RATE,
        ),
        **dict.fromkeys(
            "add_decayed_weights centralize identity keep_params_nonnegative normalize_by_update_norm polyak_sgd "
            "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief "
            "scale_by_distance_over_gradients scale_by_lbfgs scale_by_lion scale_by_novograd "
            "scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms scale_by_polyak "
            "scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio "
            "scale_by_yogi set_to_zero zero_nans".split(),
            {},
        ),
        "adaptive_grad_clip": {"clipping": 0.1},
        "add_noise": {"eta": 0.01, "gamma": 0.55, **SEED},
        "clip": {"max_delta": 0.1},
        "clip_by_block_rms": {"threshold": 0.1},
        "clip_by_global_norm": {"max_norm": 0.1},
        "ema": {"decay": 0.9},
        "freeze": {"mask": {"kernel": True, "bias": False}},
        "noisy_sgd": {**RATE, **SEED},
        "scale": {"step_size": 0.1},
        "scale_by_learning_rate": RATE,
        "scale_by_rprop": RATE,
        "trace": {"decay": 0.9},
    },
    optax.contrib: {
        **dict.fromkeys(
            "acprop ademamix adopt cocob dadapt_adamw galore madgrad momo momo_adam muon prodigy schedule_free_adamw "
            "schedule_free_sgd simplified_ademamix".split(),
            {},
        ),
        **dict.fromkeys(
            "normalize reduce_on_plateau scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
            "scale_by_simplified_ademamix".split(),
            {},
        ),
        **dict.fromkeys(
            ("acprop", "ademamix", "adopt", "madgrad", "muon", "simplified_ademamix", "scale_by_madgrad"), RATE
        ),
        "galore": {"learning_rate": 1e-2, "rank": 2},
        "scale_by_galore": {"rank": 2},
    },
}
EXCLUDED = {
    "needs another transformation, a function or a mask": (
        "apply_if_finite chain conditionally_mask conditionally_transform flatten inject_hyperparams "
        "inject_stateful_hyperparams lookahead masked measure_with_ema mechanize multi_transform named_chain partition "
        "sam scale_by_schedule schedule_free selective_transform split_real_and_imaginary stateless "
        "stateless_with_tree_map with_extra_args_support"
    ),
    "emits an update every k steps only; accumulation has tests of its own": "apply_every",
    "deprecated": "optimistic_adam maybe_update",
    "fails bare: its masks do not fit a bias (optax 0.2.8)": "scale_by_muon",
    "needs `grad` and `value_fn` at every step: a line search": (
        "lbfgs scale_by_backtracking_linesearch scale_by_zoom_linesearch"
    ),
    "needs the gradients of each example": "differentially_private_aggregate dpsgd",
    "needs `obj_fn` at every step": "sophia",
    "keeps what a function of the user's says": "snapshot",
}
# L-BFGS divides by differences of gradients, which magnifies rounding.
LOOSER = {"scale_by_lbfgs": 1e-3}
# One of each sort of state. The others are run by ``-m slow``.
REPRESENTATIVE = {
    *("adafactor", "adam", "lamb", "lion", "polyak_sgd", "scale_by_lbfgs", "sgd"),
    *("reduce_on_plateau", "schedule_free_adamw"),
}
CASES = [
    pytest.param(
        *(module, name, arguments),
        id=f"{module.__name__}.{name}",
        marks=() if name in REPRESENTATIVE else pytest.mark.slow,
    )
    for module, table in OPTIMIZERS.items()
    for name, arguments in table.items()
    if hasattr(module, name)  # some came after the oldest optax that is supported
]


def transformations_of(module):
    for name, function in vars(module).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            returned = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in returned:
                yield name


def test_the_table_is_complete():
    excluded = {name for names in EXCLUDED.values() for name in names.split()}
    for module, table in OPTIMIZERS.items():
        assert set(transformations_of(module)) - set(table) - excluded == set()
    assert len(CASES) > 50


def grads_at(step):
    """Gradients of a size that differs from leaf to leaf and from step to step."""
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), PARAMS)


def comparable(tree):
    """Random keys as their data, which NumPy can compare."""
    return jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree
    )


@pytest.fixture(autouse=True)
def optax_may_broadcast():
    """GaLore broadcasts ranks, which the rest of the suite forbids."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("module", "name", "arguments"), CASES)
def test_a_wrapped_optimizer_steps_like_the_bare_one_and_survives_a_bad_step(module, name, arguments):
    inner = optax.with_extra_args_support(getattr(module, name)(**arguments))
    tx = jls.loss_scaled(inner, jls.DynamicLossScale(SCALE, min_loss_scale=SCALE))

    @jax.jit
    def bare(grads, state, params, value):
        updates, state = inner.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def by_update(scaled_grads, state, params, value):
        updates, state = tx.update(scaled_grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def fused(scaled_grads, state, params, value):
        return tx.update_and_apply(scaled_grads, state, params, value=value)

    params, inner_state = PARAMS, inner.init(PARAMS)
    results = {by_update: (PARAMS, tx.init(PARAMS)), fused: (PARAMS, tx.init(PARAMS))}
    for step in range(STEPS):
        grads, value = grads_at(step), jnp.float32(1 / (step + 1))
        scaled = jax.tree.map(lambda leaf: leaf * SCALE, grads)
        is_bad = step == BAD_STEP
        if is_bad:
            scaled["bias"] = scaled["bias"].at[1].set(jnp.inf)
        else:
            params, inner_state = bare(grads, inner_state, params, value)
        for wrapped, (before, state) in results.items():
            after, new_state = wrapped(scaled, state, before, value)
            results[wrapped] = after, new_state
            if is_bad:
                chex.assert_trees_all_equal(comparable(after), comparable(before))
                chex.assert_trees_all_equal(comparable(new_state.inner_state), comparable(state.inner_state))

    rtol = LOOSER.get(name, 2e-5)
    assert [wrapped._cache_size() for wrapped in results] == [1, 1]
    for after, state in results.values():
        assert (int(state.applied_steps), int(state.skipped_steps)) == (STEPS - 1, 1)
        chex.assert_trees_all_close(
            comparable((after, state.inner_state)), comparable((params, inner_state)), rtol=rtol, atol=1e-6
        )
