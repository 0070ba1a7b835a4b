"""Effect of the initial skipped steps on a run of 200 steps that trains a hidden Markov model.

`docs/accuracy.md` contains the results of ``python tools/short_run.py``, which depend on the processor.
"""

import jax
import jax.numpy as jnp
import optax

import jax_lossscale as jls

STATES, SYMBOLS, LENGTH, BATCH_SIZE, BATCHES, STEPS = 16, 32, 100, 32, 7, 200


def sequences(key):
    """Sample ``int32[sequences, length]`` from a random hidden Markov model.

    The last batch is held out for evaluation.
    """
    keys = jax.random.split(key, 3)
    transition = jax.nn.log_softmax(3 * jax.random.normal(keys[0], (STATES, STATES)))
    emission = jax.nn.log_softmax(3 * jax.random.normal(keys[1], (STATES, SYMBOLS)))

    def step(state, key):
        of_state, of_symbol = jax.random.split(key)
        state = jax.random.categorical(of_state, transition[state])
        return state, jax.random.categorical(of_symbol, emission[state])

    def sequence(key):
        return jax.lax.scan(step, 0, jax.random.split(key, LENGTH))[1]

    return jax.vmap(sequence)(jax.random.split(keys[2], BATCH_SIZE * (BATCHES + 1)))


def loss_fn(params, x):
    """Return the mean negative log-likelihood per symbol, computed by the forward algorithm."""
    transition, emission, first = (jax.nn.softmax(params[name]) for name in ("transition", "emission", "first"))

    def normalized(belief):
        total = belief.sum(-1, keepdims=True)
        return belief / total, jnp.log(total[:, 0])

    def step(belief, symbols):
        return normalized((belief @ transition) * emission[:, symbols].T)

    belief, log_first = normalized(first[None] * emission[:, x[:, 0]].T)
    _, logs = jax.lax.scan(step, belief, x[:, 1:].T)
    return -(log_first + logs.sum(0)).mean() / LENGTH


def train(seed, loss_fn_of_run, loss_scale):
    """Train for 200 steps and return the loss on the held-out batch and the number of skipped steps."""
    data = sequences(jax.random.key(seed))
    keys = jax.random.split(jax.random.key(seed + 100), 3)
    params = {
        "transition": 0.1 * jax.random.normal(keys[0], (STATES, STATES)),
        "emission": 0.1 * jax.random.normal(keys[1], (STATES, SYMBOLS)),
        "first": jnp.zeros(STATES),
    }
    tx = jls.loss_scaled(optax.adam(3e-2), loss_scale)

    def train_step(carry, number):
        params, opt_state = carry
        batch = jax.lax.dynamic_slice_in_dim(data, (number % BATCHES) * BATCH_SIZE, BATCH_SIZE)
        loss, grads = jls.value_and_scaled_grad(loss_fn_of_run, opt_state)(params, batch)
        return tx.update_and_apply(grads, opt_state, params, value=loss), None

    (params, opt_state), _ = jax.lax.scan(train_step, (params, tx.init(params)), jnp.arange(STEPS))
    return float(loss_fn(params, data[BATCHES * BATCH_SIZE :])), int(opt_state.skipped_steps)


def main():
    print("| loss scale | seed | skipped steps | loss above float32 |")
    print("|---|---|---|---|")
    for loss_scale in ("auto", "dynamic"):
        for seed in range(3):
            exact, _ = train(seed, loss_fn, None)
            reached, skipped = train(seed, jls.autocast(loss_fn), loss_scale)
            print(f"| {loss_scale} | {seed} | {skipped} | {reached / exact - 1:.2%} |", flush=True)


if __name__ == "__main__":
    main()
