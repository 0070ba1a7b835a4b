"""Differences between the log probabilities of a sampler and of a trainer in half precision.

`docs/guide/rl.md` shows the results. Run this file in an environment with `google-tunix`::

    python tools/sampler_and_trainer.py

A small Llama 3 of tunix is trained in float32. The trainer then computes the log probabilities of the tokens in the
loss function, together with the gradients. The sampler computes them in one pass over the sequence (prefill), or token
by token with a key-value cache (decoding). All programs are compiled with `jax.jit`.

In the last setup of each dtype, the attention of both programs adds the terms of its matrix multiplications in the same
order, and XLA cannot omit the rounding of their results. In float16, this shows how much of the difference is caused by
the order of the additions.
"""

import sys
from functools import partial, reduce
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig

import jax_lossscale as jls

LENGTH, BATCH, VOCABULARY = 32, 64, 64
CONFIG = ModelConfig(
    num_layers=4,
    vocab_size=VOCABULARY,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
GRAPH, STATE = nnx.split(Llama3(CONFIG, rngs=nnx.Rngs(0)))


def with_random_mlps(state):
    """Return the parameters with random numbers instead of the zeros with which tunix initializes the MLPs.

    If all kernels of an MLP are zero, all of their gradients are zero, and the MLP does not learn.
    """
    keys = iter(jax.random.split(jax.random.key(9), 3 * CONFIG.num_layers))
    return jax.tree.map(
        lambda leaf: leaf if leaf.any() else jax.random.normal(next(keys), leaf.shape) / len(leaf) ** 0.5, state
    )


def apply(state, tokens, positions, cache, mask):
    return nnx.merge(GRAPH, state)(tokens, positions, cache, mask)


def manual_cast(dtype):
    """Return `apply` with parameters that are cast to a dtype."""

    def cast_and_apply(state, *args):
        return apply(jax.tree.map(lambda leaf: leaf.astype(dtype), state), *args)

    return cast_and_apply


def einsum_in_order(spec, *operands):
    """Return `jnp.einsum` of two operands, with the terms of each sum added one after the other.

    The products of numbers in half precision are exact in float32, so only the additions round.
    """
    inputs, output = spec.split("->")
    subscripts = inputs.split(",")
    (summed,) = set(subscripts[0]) & set(subscripts[1]) - set(output)
    order = output + summed
    aligned = []
    for letters, operand in zip(subscripts, operands, strict=True):
        operand = operand.transpose([letters.index(letter) for letter in order if letter in letters])
        aligned.append(jnp.expand_dims(operand, [axis for axis, letter in enumerate(order) if letter not in letters]))
    products = aligned[0] * aligned[1]
    return reduce(jnp.add, [products[..., index] for index in range(products.shape[-1])])


def attention_in_order(dtype):
    """Return `apply` with attention that uses `einsum_in_order`, with operands and results rounded to a dtype."""
    einsum, info = jnp.einsum, jnp.finfo(dtype)

    def rounded(x):  # In contrast to a cast, XLA never omits this rounding.
        return jax.lax.reduce_precision(x, info.nexp, info.nmant)

    def replacement(spec, *operands):
        if spec not in ("BTHGD,BSHD->BHGTS", "BHGTS,BSHD->BTHGD"):
            return einsum(spec, *operands)
        return rounded(einsum_in_order(spec, *map(rounded, operands)))

    def apply_in_order(*args):
        with mock.patch.object(jnp, "einsum", replacement):
            return apply(*args)

    return apply_in_order


def log_probabilities(logits, tokens):
    """Return the log probabilities of the tokens after the first, computed in float32."""
    log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]


def whole_sequence(apply, state, tokens, cache=None):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (len(tokens), LENGTH, LENGTH))
    return apply(state, tokens, positions, cache, mask)[0]


def empty_cache(dtype):
    shape = (BATCH, LENGTH, CONFIG.num_kv_heads, CONFIG.head_dim)
    layer = {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype), "end_index": jnp.zeros(BATCH, jnp.int32)}
    return {f"layer_{number}": layer for number in range(CONFIG.num_layers)}


def prefill(apply, state, tokens, dtype):
    return log_probabilities(whole_sequence(apply, state, tokens, empty_cache(dtype)), tokens)


def decoding(apply, state, tokens, dtype):
    def one_token(cache, position):
        positions = jnp.full((BATCH, 1), position)
        mask = jnp.broadcast_to(jnp.arange(LENGTH) <= position, (BATCH, 1, LENGTH))
        token = jax.lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)
        logits, cache = apply(state, token, positions, cache, mask)
        return cache, logits[:, 0]

    logits = jax.lax.scan(one_token, empty_cache(dtype), jnp.arange(LENGTH))[1]
    return log_probabilities(jnp.swapaxes(logits, 0, 1), tokens)


def loss_fn(apply, state, tokens):
    log_p = log_probabilities(whole_sequence(apply, state, tokens), tokens)
    return -jnp.mean(log_p), log_p


def batch_of(key):
    first, step = jax.random.randint(key, (2, BATCH, 1), 0, VOCABULARY)
    return (first + step * jnp.arange(LENGTH)) % VOCABULARY


def trained(state, steps=300):
    """Return the parameters after a training in float32: the model learns to count in steps of a constant size."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def train_step(state, opt_state, key):
        grads = jax.grad(lambda state: loss_fn(apply, state, batch_of(key))[0])(state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(state, updates), opt_state

    opt_state = optimizer.init(state)
    for key in jax.random.split(jax.random.key(0), steps):
        state, opt_state = train_step(state, opt_state, key)
    return state


def main():
    state, tokens = trained(with_random_mlps(STATE)), batch_of(jax.random.key(1))
    # The first half of each sequence is a prompt. Some of the remaining tokens are random.
    noise = jax.random.randint(jax.random.key(2), tokens.shape, 0, VOCABULARY)
    tokens = jnp.where((jnp.arange(LENGTH) < LENGTH // 2) | (noise % 4 > 0), tokens, noise)
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}\n")
    print("| setup | dtype | prefill: mean | prefill: maximum | decoding: mean | decoding: maximum |")
    print("|---|---|---|---|---|---|")
    setups = [("everything in float32", jnp.float32, lambda fun: fun, apply, apply)]
    for dtype in map(jnp.dtype, sys.argv[1:] or ["float16", "bfloat16"]):
        half = jls.autocast(apply, dtype)
        in_order = jls.autocast(attention_in_order(dtype), dtype)
        setups += [
            ("(a) wrapped loss function", dtype, partial(jls.autocast, dtype=dtype), apply, apply),
            ("(b) wrapped model", dtype, lambda fun: fun, half, half),
            ("(a) and (b)", dtype, partial(jls.autocast, dtype=dtype), half, half),
            ("(c) manual cast", dtype, lambda fun: fun, manual_cast(dtype), manual_cast(dtype)),
            ("(b) with fixed order and rounding in attention", dtype, lambda fun: fun, in_order, in_order),
        ]
    for name, dtype, wrap_loss, of_trainer, of_sampler in setups:
        half_loss = wrap_loss(partial(loss_fn, of_trainer))
        (_, expected), _ = jax.jit(jax.value_and_grad(half_loss, has_aux=True))(state, tokens)
        cells = []
        for sample in (prefill, decoding):
            cache_dtype = dtype if name.startswith("(c)") else jnp.float32
            found = jax.jit(partial(sample, of_sampler, dtype=cache_dtype))(state, tokens)
            differences = jnp.abs(found - expected)
            cells += [f"{value:.1e}" if value else "0" for value in (differences.mean(), differences.max())]
        print(f"| {name} | {jnp.dtype(dtype).name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
