"""Ten thousand steps of a small float16 training run with random faults.

A skipped step must not change parameters or inner optimizer state. At the end, the loss must agree with that of float32
runs without faults, up to the noise between those runs. `test_properties.py` checks the result of each single step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds import HalvingLossScale

import jax_lossscale as jls

pytestmark = pytest.mark.slow  # `test_properties.py` checks each step in CI.

STEPS, MICROBATCHES, FEATURES = 10_000, 4, 8
FAULTS = (
    *["none"] * 12,
    *["nan", "inf", "-inf", "zeros", "subnormal", "huge", "lost_loss", "skip_if"],
    "lost_microbatch",
)
CODES = {name: code for code, name in enumerate(dict.fromkeys(FAULTS))}

# These loss scales never skip a step, so the user checks the gradients and passes `skip_if`.
LOOKED_AT_BY_THE_USER = ("fixed", "no_op")
# The dynamic scales grow every 50 steps, so they also overflow without a fault.
TRAINED = {
    "fixed": jls.FixedLossScale(2.0**10),
    "fixed_skipping": jls.FixedLossScale(2.0**10, skip_nonfinite=True),
    "no_op": jls.NoOpLossScale(),
    "auto": jls.AutoLossScale(2.0**10),
    "dynamic": jls.DynamicLossScale(2.0**12, 50),
    "hysteresis": jls.DynamicLossScale(2.0**12, 50, hysteresis=2, max_loss_scale=2.0**20, min_loss_scale=2.0**4),
    "users_own": HalvingLossScale(2.0**12),
}


def examples(seed, number):
    random = np.random.default_rng(seed)
    x = random.normal(size=(number, FEATURES)).astype(np.float32)
    y = np.sin(x @ np.linspace(-1, 1, FEATURES, dtype=np.float32)) + 0.1 * random.normal(size=number)
    return {"x": x, "y": y.astype(np.float32)}


def initial_params():
    random = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(random.normal(size=(FEATURES, 16)) / 3, jnp.float32),
        "bias": jnp.zeros(16),
        "readout": jnp.asarray(random.normal(size=16) / 4, jnp.float32),
    }


def loss_fn(params, batch, dtype=jnp.float16):
    compute, batch = jls.cast_floating((params, batch), dtype)
    hidden = jnp.tanh(batch["x"] @ compute["kernel"] + compute["bias"][None])
    return jnp.mean((hidden @ compute["readout"] - batch["y"]).astype(jnp.float32) ** 2)


# Huge gradients are finite and therefore applied, so the optimizer clips them. Adam is not used because its second
# moment would be affected for many steps.
SCHEDULE = optax.cosine_decay_schedule(0.05, STEPS)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(SCHEDULE, momentum=0.9))


def with_lost_microbatches(batch, fault):
    """Mark the examples of the micro-batch whose gradients must overflow."""
    number = jnp.arange(batch["y"].size) % MICROBATCHES
    is_lost = (fault == CODES["lost_microbatch"]) & (number == 1)
    return {**batch, "is_lost": is_lost.astype(jnp.float32)}


def loss_that_may_be_lost(params, batch):
    """Return the loss, with infinite gradients for marked examples."""
    return loss_fn(params, batch) + zero_of_infinite_slope(params["bias"], batch["is_lost"].max())


@jax.custom_jvp
def zero_of_infinite_slope(leaf, is_lost):
    return jnp.zeros([])


@zero_of_infinite_slope.defjvp
def _(primals, tangents):
    return jnp.zeros([]), jnp.sum(jnp.where(primals[1] > 0, jnp.inf, 0.0) * tangents[0])


def spoiled(grads, fault, position):
    """Return the scaled gradients after a fault. ``position`` is the index of the affected element."""
    single = {"nan": jnp.nan, "inf": jnp.inf, "-inf": -jnp.inf}
    every = {
        "zeros": lambda g: g * 0,
        "subnormal": lambda g: jnp.sign(g) * 2.0**-24,
        "huge": lambda g: jnp.sign(g) * 65504,
    }
    kernel = grads["kernel"].ravel()
    for name, value in single.items():
        kernel = jnp.where((fault == CODES[name]) & (jnp.arange(kernel.size) == position), value, kernel)
    grads = {**grads, "kernel": kernel.reshape(grads["kernel"].shape)}
    for name, change in every.items():
        grads = jax.tree.map(lambda g, change=change, name=name: jnp.where(fault == CODES[name], change(g), g), grads)
    return grads


def make_step(name):
    tx = jls.loss_scaled(OPTIMIZER, TRAINED[name])

    def step(carry, inputs):
        params, state = carry
        accumulated = jls.accumulate_gradients(loss_that_may_be_lost, state, MICROBATCHES)
        window = accumulated(params, with_lost_microbatches(inputs["batch"], inputs["fault"]))
        grads = spoiled(window.grads, inputs["fault"], inputs["position"])
        value = jnp.where(inputs["fault"] == CODES["lost_loss"], jnp.nan, window.value)
        skip_if = inputs["fault"] == CODES["skip_if"]
        is_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]).all()
        if name in LOOKED_AT_BY_THE_USER:
            skip_if |= ~is_finite | ~jnp.isfinite(value)
        kwargs = {"value": value, "skip_if": skip_if}
        new_params, new_state = tx.update_and_apply(grads, state, params, **kwargs)

        def same(a, b):
            return jnp.stack([jnp.all(x == y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]).all()

        seen = {
            "finite": jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(new_params)]).all(),
            "stood_still": same((params, state.inner_state), (new_params, new_state.inner_state)),
            **jls.metrics(new_state),
        }
        return (new_params, new_state), seen

    return tx, step


@functools.cache
def inputs(seed):
    """Return batches, faults and positions of the affected elements, which are the same for all loss scales."""
    random = np.random.default_rng(seed)
    rows, data = random.integers(0, 1024, (STEPS, 4 * MICROBATCHES)), examples(1, 1024)
    codes = np.array([CODES[name] for name in FAULTS], np.int32)
    return {
        "batch": {name: leaf[rows] for name, leaf in data.items()},
        "fault": random.choice(codes, STEPS),
        "position": random.integers(0, FEATURES * 16, STEPS),
    }


def final_loss(params):
    return float(loss_fn(params, examples(2, 4096), jnp.float32))


@functools.cache
def losses_without_faults():
    """Return the final losses of float32 runs without loss scale and faults, on different batches."""

    def step(carry, batch):
        params, state = carry
        grads = jax.grad(loss_fn)(params, batch, jnp.float32)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(batches):
        params = initial_params()
        return jax.lax.scan(step, (params, OPTIMIZER.init(params)), batches)[0][0]

    batches = [inputs(seed)["batch"] for seed in range(1, 7)]
    params = jax.jit(jax.vmap(run))(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))
    return [final_loss(jax.tree.map(lambda leaf, n=n: leaf[n], params)) for n in range(len(batches))]


@functools.cache
def by_scan(name):
    tx, step = make_step(name)
    params = initial_params()
    run = jax.jit(functools.partial(jax.lax.scan, step))
    return jax.device_get(run((params, tx.init(params)), inputs(0)))


@pytest.mark.parametrize("name", TRAINED)
def test_training_with_random_faults_reaches_the_float32_loss(name):
    (params, _), seen = by_scan(name)
    assert seen["finite"].all()
    assert (np.diff(seen["skipped_steps"], prepend=0) <= seen["stood_still"]).all()
    assert (seen["applied_steps"] + seen["skipped_steps"] == np.arange(1, STEPS + 1)).all()
    assert np.isfinite(seen["loss_scale"]).all()
    assert (np.frexp(seen["loss_scale"])[0] == 0.5).all()
    without = losses_without_faults()
    assert abs(final_loss(params) - np.mean(without)) < 6 * np.std(without, ddof=1), without


def test_each_fault_occurs_and_has_the_expected_effect():
    """Each fault occurs in at least 300 steps, and exactly the expected faults skip the step."""
    faults, seen = inputs(0)["fault"], by_scan("fixed_skipping")[1]
    skipped = np.diff(seen["skipped_steps"], prepend=0)
    for name, code in CODES.items():
        here = faults == code
        assert here.sum() > 300, name
        expected = name in ("nan", "inf", "-inf", "lost_loss", "skip_if", "lost_microbatch")
        assert (skipped[here] == expected).all(), name
