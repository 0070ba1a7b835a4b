"""Random float32 programs: operations in a row, put into everything that JAX puts around operations.

A program is a function of weights, ``(6, 6)``, and a state, ``(3, 6)``, to a state. Magnitudes stay near 1: weights
have a norm of about 1, and a `tanh` follows what could grow.
"""

import functools

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import jax_lossscale as jls

PRODUCTS = {
    "product": lambda w, x: x @ w,
    "einsum": lambda w, x: jnp.einsum("bi,ji->bj", x, w),
    "attention": lambda w, x: jax.nn.softmax((x @ w) @ x.T) @ x,
    "batched": lambda w, x: jnp.matmul(x.reshape(3, 2, 3), jnp.stack([w[:3, :3]] * 3)).reshape(3, 6),
    "convolution": lambda w, x: jax.lax.conv_general_dilated(x[:, None], w[:3, None, :3], (1,), "SAME").mean(axis=1),
    "kept": jls.keep_float32(lambda w, x: x @ w),
}
ARITHMETIC = {
    "sin": lambda w, x: jnp.sin(2 * x),
    "tanh": lambda w, x: jnp.tanh(x) + 0.1,
    "gelu": lambda w, x: jax.nn.gelu(x),
    "norm": lambda w, x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1),
    "residual": lambda w, x: 0.5 * x + jnp.cos(w[:3]),
    "maximum": lambda w, x: jnp.maximum(x, 0.3 * x),
    "cumulative sum": lambda w, x: jnp.cumsum(x, axis=1) / 3,
    "logarithm": lambda w, x: jnp.log1p(jnp.exp(x)),
    "sum": lambda w, x: x + x.sum(axis=0, keepdims=True) / 3,
}
MOVES = {
    "reverse": lambda w, x: x[::-1, ::-1],
    "roll": lambda w, x: jnp.roll(x, 2, axis=1),
    "reshape": lambda w, x: x.reshape(6, 3).T,
    "gather": lambda w, x: x[:, jnp.array([0, 2, 2, 5, 1, 1])],
    "scatter": lambda w, x: x.at[jnp.array([0, 0, 2])].add(0.1 * x),
    "choose": lambda w, x: jnp.where(w[:3] > 0, x, 0.0),
    "update": lambda w, x: jax.lax.dynamic_update_slice(x, w[:1, :2], (1, 2)),
    "join": lambda w, x: jnp.concatenate([x[:, 3:], w[:3, :3]], axis=1),
    "broadcast": lambda w, x: jnp.broadcast_to(x[:1], (3, 6)) + 0.0 * x,
}
OPERATIONS = PRODUCTS | ARITHMETIC | MOVES


@jax.custom_vjp
def bounded(x):
    """tanh, by a rule of its own."""
    return jnp.tanh(x)


def _forward(x):
    y = jnp.tanh(x)
    return y, (x, y)


bounded.defvjp(_forward, lambda kept, cotangent: (cotangent * (1 - kept[1] ** 2),))


def in_jit(body, w, x):
    return jax.jit(body)(w, x)


def in_remat(body, w, x):
    return jax.checkpoint(body)(w, x)


def in_remat_that_keeps_products(body, w, x):
    return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(w, x)


def in_scan(body, w, x):
    def step(x, bias):
        x = bounded(body(w, x) + bias)
        return x, 2 * x

    x, stacked = jax.lax.scan(step, x, jnp.stack([x / 4, x[::-1] / 4]))
    return x + stacked.mean(axis=0)


def in_scan_over_weights(body, w, x):
    return jax.lax.scan(lambda x, w: (bounded(body(w, x)), None), x, jnp.stack([w, w.T]))[0]


def in_fori(body, w, x):
    return jax.lax.fori_loop(0, 2, lambda _, x: bounded(body(w, x)), x)


def in_while(body, w, x):
    w, x = jax.lax.stop_gradient((w, x))
    state = (jnp.int32(0), x)
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, bounded(body(w, s[1]))), state)[1]


def in_cond(body, w, x):
    return jax.lax.cond(w[0, 0] > 0, body, lambda w, x: jnp.sin(x), w, x)


def in_cond_the_other_branch(body, w, x):
    return jax.lax.cond(w[0, 0] > 0, lambda w, x: x, body, w, x)


def in_vmap(body, w, x):
    return jax.vmap(body, (None, 0))(w, jnp.stack([x, x[::-1]])).mean(axis=0)


def in_custom_jvp(body, w, x):
    function = jax.custom_jvp(body)
    function.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return function(w, x)


def in_custom_vjp(body, w, x):
    function = jax.custom_vjp(body)
    function.defvjp(lambda w, x: jax.vjp(body, w, x), lambda pull_back, cotangent: pull_back(cotangent))
    return function(w, x)


def twice(body, w, x):
    compiled = jax.jit(body)
    return compiled(w, bounded(compiled(w, x)))


def in_gradient(body, w, x):
    return jnp.tanh(jax.grad(lambda x: jnp.sum(jnp.sin(body(w, x))))(x))


STRUCTURES = {
    function.__name__: function
    for function in (
        *(in_jit, in_remat, in_remat_that_keeps_products, in_scan, in_scan_over_weights, in_fori, in_while, in_cond),
        *(in_cond_the_other_branch, in_vmap, in_custom_jvp, in_custom_vjp, twice, in_gradient),
    )
}


def run(program, w, x):
    """The state after all steps of a program: names of operations, and pairs of a structure and what is in it."""
    for step in program:
        if isinstance(step, str):
            x = OPERATIONS[step](w, x)
            x = bounded(x) if step in PRODUCTS else x
        else:
            structure, inside = step
            x = STRUCTURES[structure](functools.partial(run, inside), w, x)
    return x


def loss_of(program):
    """The program as a loss of two arrays, and integers."""

    def loss(w, x):
        x = run(program, w, x)
        return jnp.mean((x @ w - 0.5) ** 2), {"state": x, "largest": jnp.argmax(x, axis=1), "positive": x > 0}

    return loss


def number_of_products(program):
    """How many products a program computes."""
    repeated = {"in_scan": 2, "in_scan_over_weights": 2, "in_fori": 2, "in_while": 2, "in_vmap": 2, "twice": 2}
    return sum(
        (2 if step == "attention" else 1) * (step in PRODUCTS)
        if isinstance(step, str)
        else repeated.get(step[0], 1) * number_of_products(step[1])
        for step in program
    )


names = st.one_of(*(st.sampled_from(list(kind)) for kind in (PRODUCTS, ARITHMETIC, MOVES)))
_steps = st.recursive(
    st.lists(names, min_size=1, max_size=3),
    lambda inside: st.lists(
        st.one_of(names, st.tuples(st.sampled_from(list(STRUCTURES)), inside)), min_size=1, max_size=3
    ),
    max_leaves=4,
)


@st.composite
def programs(draw):
    """Some steps, then a product inside of some structure inside of another, then some steps."""
    inner = [draw(st.sampled_from(list(PRODUCTS))), *draw(_steps)]
    for _ in range(draw(st.integers(1, 2))):
        inner = [*draw(st.lists(names, max_size=1)), (draw(st.sampled_from(list(STRUCTURES))), inner)]
    return [*inner, *draw(st.lists(names, max_size=2))]


PROGRAMS = programs()
