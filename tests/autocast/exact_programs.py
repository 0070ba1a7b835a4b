"""Random float32 programs whose values float16 represents exactly, so that `autocast` must not change their results.

A program maps weights of shape ``(4, 4)`` and a state of shape ``(2, 4)`` to a new state. All values are small
integers, or fractions with a few binary digits. A program is a tuple whose elements are names of operations, or pairs
of a structure and the program inside it. Only the operations in `FLOAT32` leave the range of float16, so `autocast`
must compute them in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import random_programs
from jax.sharding import AxisType, NamedSharding, reshard

import jax_lossscale as jls


def float32(function):
    """Mark a function whose values may leave the range of half precision."""
    return jax.named_scope("float32_range")(function)


@jax.custom_jvp
def doubled(w, x):
    return 2 * (x @ w)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * (primals[1] @ tangents[0] + tangents[1] @ primals[0])))

MATMULS = {
    "product": lambda w, x: x @ w,
    "einsum": lambda w, x: jnp.einsum("bi,ji->bj", x, w),
    "attention": lambda w, x: jax.nn.softmax(float32(lambda y: 128 * y)(x @ w @ x.T)) @ x,
    "batched": lambda w, x: jnp.matmul(x.reshape(2, 2, 2), jnp.stack([w[:2, :2], w[2:, 1:3]])).reshape(2, 4),
    "convolution": lambda w, x: jax.lax.conv_general_dilated(x[:, None], w[:4, None, :3], (1,), "SAME").sum(axis=1),
    "of both": lambda w, x: (x @ w) @ (w + w.T),
    "bias": lambda w, x: x @ w + w[:1],
    "kept": jls.keep_float32(lambda w, x: x @ w),
    "marked": lambda w, x: jnp.matmul(x, w, precision="highest"),
    "with a large constant": float32(lambda w, x: x @ (2.0**20 * np.eye(4, k=1, dtype=np.float32)) / 2.0**20),
    "by its own rule": doubled,
}
# The matmuls that stay in float32. bfloat16 can represent the large constant.
EXCEPTIONS = {"float16": ("kept", "marked", "with a large constant"), "bfloat16": ("kept", "marked")}
ARITHMETIC = {
    "add": lambda w, x: x + w[:2],
    "subtract": lambda w, x: 1 - x,
    "halve": lambda w, x: x / 2,
    "square": lambda w, x: x * jnp.clip(x, -1, 1),
    "integers": lambda w, x: x + jnp.argmax(x, axis=1, keepdims=True).astype(jnp.float32),
    "sum": lambda w, x: x + x.sum(axis=0, keepdims=True),
    "mean": lambda w, x: x - x.mean(axis=1, keepdims=True),
    "cumulative sum": lambda w, x: jnp.cumsum(x, axis=1),
    "scatter": lambda w, x: x.at[jnp.array([0, 0, 1])].add(x[jnp.array([1, 0, 1])]),
}
FLOAT32 = {
    "far away": float32(lambda w, x: jnp.maximum(x + 70_000, 0) - 70_000),
    "masked": lambda w, x: float32(lambda y: jnp.where(w[:2] > 0, y, 7e4) - jnp.where(w[:2] > 0, 0, 7e4))(x @ w),
    "tiny": float32(lambda w, x: (x * 2.0**-40)[::-1] * 2.0**40),
    "large": float32(lambda w, x: jnp.concatenate([x * 2.0**30, w[:2] * 2.0**30])[1:3] / 2.0**30),
}
DATA_MOVEMENT = {
    "reverse": lambda w, x: x[::-1, ::-1],
    "roll": lambda w, x: jnp.roll(x, 1, axis=1),
    "turn": lambda w, x: x.reshape(4, 2).T,
    "gather": lambda w, x: x[:, jnp.array([0, 2, 2, 1])],
    "choose": lambda w, x: jnp.where(w[:2] > 0, x, 0.0),
    "update": lambda w, x: jax.lax.dynamic_update_slice(x, w[:1, :2], (1, 2)),
    "join": lambda w, x: jnp.concatenate([x[:, 2:], w[:2, :2]], axis=1),
    "pad": lambda w, x: jnp.pad(x, ((0, 0), (1, 1)))[:, :4],
    "broadcast": lambda w, x: jnp.broadcast_to(x[:1], (2, 4)),
}
SELECTIONS = {
    "relu": lambda w, x: jax.nn.relu(x),
    "maximum": lambda w, x: jnp.maximum(x, w[:2]),
    "clip": lambda w, x: jnp.clip(x, -2, 2),
    "clamp": lambda w, x: jax.lax.clamp(-1.0, x, 3.0),
    "largest": lambda w, x: x - jnp.max(x, axis=0, keepdims=True),
    "pool": lambda w, x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME"),
    "sort": lambda w, x: jnp.sort(x, axis=1),
}
OPERATIONS = MATMULS | ARITHMETIC | FLOAT32 | DATA_MOVEMENT | SELECTIONS


def bounded(x):
    return jnp.clip(x, -2, 2)


def shared(name):
    """Return a structure of `random_programs` that makes no random choice."""
    return lambda body, w, x: random_programs.STRUCTURES[name](body, w, x, None)


in_custom_jvp, in_custom_vjp = shared("custom_jvp"), shared("custom_vjp")


def in_remat(body, w, x):
    return jax.checkpoint(body)(w, x)


def in_remat_that_saves_matmuls(body, w, x):
    return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(w, x)


def in_scan(body, w, x):
    def step(x, bias):
        x = bounded(body(w, x) + bias)
        return x, 2 * x

    x, stacked = jax.lax.scan(step, x, jnp.stack([x, x[::-1]]))
    return x + stacked.mean(axis=0)


def in_scan_over_weights(body, w, x):
    return jax.lax.scan(lambda x, w: (bounded(body(w, x)), None), x, jnp.stack([w, w.T]))[0]


def in_fori(body, w, x):
    return jax.lax.fori_loop(0, 2, lambda _, x: bounded(body(w, x)), x)


def in_while(body, w, x):
    start = (jnp.int32(0), jax.lax.stop_gradient(x))
    w = jax.lax.stop_gradient(w)
    return x + jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, bounded(body(w, s[1]))), start)[1]


def in_cond(body, w, x):
    return jax.lax.cond(w[0, 0] > 0, body, lambda w, x: 2 * x, w, x)


def in_cond_the_other_branch(body, w, x):
    return jax.lax.cond(w[0, 0] > 0, lambda w, x: x @ w, body, w, x)


def in_cond_beside_a_far_branch(body, w, x):
    is_near = w[0, 0] > 0
    x = jax.lax.cond(is_near, body, float32(lambda w, x: x + 70_000), w, x)
    return float32(lambda x: jnp.where(is_near, x, x - 70_000))(x)


def in_switch(body, w, x):
    return jax.lax.switch(jnp.argmax(x[0]) % 3, [body, lambda w, x: x, lambda w, x: body(w, x[::-1])], w, x)


def in_vmap(body, w, x):
    return jax.vmap(body, (None, 0))(w, jnp.stack([x, x[::-1]])).sum(axis=0)


def twice(body, w, x):
    compiled = jax.jit(body)
    return compiled(w, bounded(compiled(w, x)))


def beside(body, w, x):
    return body(w, x) + x


def in_gradient(body, w, x):
    return bounded(jax.grad(lambda x: jnp.sum(body(w, x) * w[:2]))(x))


def in_layer(body, w, x):
    with jax.named_scope("layer"):
        return body(w, x)


def in_shard_map(axis_type, check_vma, body, w, x):
    """Evaluate the body on a mesh with one device. The state is sharded, and the weights are replicated."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    if "data" in jax.sharding.get_abstract_mesh().manual_axes:  # This `jax.shard_map` is inside another one.
        return body(w, x)
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    function = jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)
    if axis_type == AxisType.Auto:
        return function(w, x)
    w, x = (reshard(array, NamedSharding(mesh, spec)) for array, spec in zip((w, x), specs["in_specs"], strict=True))
    return reshard(function(w, x), NamedSharding(mesh, jax.P()))


STRUCTURES = {
    function.__name__: function
    for function in (
        *(in_remat, in_remat_that_saves_matmuls, in_scan, in_scan_over_weights, in_fori, in_while, in_cond),
        *(in_cond_the_other_branch, in_cond_beside_a_far_branch, in_switch, in_vmap, twice, beside, in_gradient),
        in_layer,
    )
} | {
    f"in_shard_map_{axes}{'' if check_vma else '_unchecked'}": functools.partial(in_shard_map, axis_type, check_vma)
    for axes, axis_type in {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}.items()
    for check_vma in (True, False)
}
STRUCTURES |= {"in_jit": shared("jit"), "in_custom_jvp": in_custom_jvp, "in_custom_vjp": in_custom_vjp}


def run(program, w, x):
    """Return the state after all operations of a program."""
    for step in program:
        if isinstance(step, str):
            x = OPERATIONS[step](w, x)
        else:
            structure, inside = step
            x = STRUCTURES[structure](functools.partial(run, inside), w, x)
    return x


def loss_of(program):
    """Return a loss function of two arrays, with auxiliary results: integers, a weakly typed array, and an argument."""

    def loss(w, x):
        y = run(program, w, x)
        aux = {"state": y, "largest": jnp.argmax(y, axis=1), "positive": y > 0, "weak": 2.0 * jnp.asarray(1.0), "x": x}
        return jnp.sum(jnp.where(x > 0, 1.0, -1.0) * (y @ w)), aux

    return loss


def arrays(seed):
    """Return random weights and a random state."""
    random = np.random.default_rng(seed)
    shapes = (4, 4), (2, 4)
    return [jnp.asarray(random.choice([-1, 0, 0, 1, 1], shape), jnp.float32) for shape in shapes]


def tangents_of(loss, w, x):
    return jax.jvp(loss, (w, x), (jnp.flip(w), jnp.flip(x)), has_aux=True)


def gradients_of(loss, w, x):
    return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)


# Functions that are computed from a loss `f`. The argument `cast` is `autocast` or the identity.
MODES = {
    "value": lambda cast, f: cast(f),
    "grad": lambda cast, f: functools.partial(gradients_of, cast(f)),
    "jvp": lambda cast, f: functools.partial(tangents_of, cast(f)),
    "linearize": lambda cast, f: lambda w, x: jax.linearize(cast(f), w, x, has_aux=True)[1](w[::-1], -x),
    "hvp": lambda cast, f: lambda w, x: jax.jvp(functools.partial(gradients_of, cast(f)), (w, x), (w[::-1], -x)),
    "vmap": lambda cast, f: jax.vmap(functools.partial(gradients_of, cast(f)), (None, 0)),
    "under vmap": lambda cast, f: cast(jax.vmap(f, (None, 0))),
    "remat": lambda cast, f: functools.partial(gradients_of, jax.checkpoint(cast(f))),
    "of the gradient": lambda cast, f: cast(functools.partial(gradients_of, f)),
}


KINDS = (MATMULS, MATMULS, ARITHMETIC, DATA_MOVEMENT, SELECTIONS, FLOAT32)


def program_of(random, structures, outermost):
    """Return a random program: one or two nested structures around a matmul and a few other operations."""

    def some(most):
        return [random.choice(list(random.choice(KINDS))) for _ in range(random.randint(0, most))]

    inside = [*some(1), random.choice(list(MATMULS)), *some(2)]
    if random.random() < 0.5:
        inside = [*some(1), (random.choice(structures), tuple(inside)), *some(1)]
    return (*some(1), (outermost, tuple(inside)), *some(1))
