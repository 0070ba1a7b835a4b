"""Compare random programs under `autocast` with float32 and with manual casts.

    python tools/random_programs.py --dtype bfloat16 --programs 1000 --results FILE.jsonl   resumes an interrupted run
    python tools/random_programs.py --dtype float16 --programs 100 --no-jit --results FILE.jsonl
    python tools/random_programs.py --dtype float16 --show 12      one program, shortened as long as it differs
    python tools/random_programs.py --dtype float32 --programs 9   the plan for float16, executed in float32

The seed of a program determines the operations and structures (`scan`, `cond`, `vmap`, ...) that it consists of. Each
program and its gradients are traced three times: in float32, under `autocast`, and with manual casts. For the manual
casts, the operands and results of all matmuls in the float32 jaxpr are rounded with `reduce_precision`. XLA cannot
remove this rounding. The tree structure, shapes, dtypes and weak types under `autocast` must be the same as in float32.
An array differs if its error exceeds

    FACTOR * (error of manual casts + sensitivity + epsilon * largest magnitude of the array) + SMALLEST * largest

where `largest` is at least 1 and at least the largest magnitude of all arrays, because float32 sums of these magnitudes
may cancel.

An error under `autocast` counts as "as with jit" if `jax.jit` in its place also raises an error or changes the results.
The sensitivity is the largest change in the array, in float32 or with manual casts, when each element of the
floating-point arguments is multiplied by 1 + epsilon / 2 or 1 - epsilon / 2 at random. It is large near discontinuities
(`sort`, comparisons, `floor`). If an array differs, the program is evaluated again with more changes, and with other
numbers of bits in the manual casts, before the difference counts.
"""

import argparse
import collections
import functools
import itertools
import json
import random
import traceback
import zlib
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

import jax_lossscale as jls
from jax_lossscale._autocast import transform
from jax_lossscale._autocast.rewrite import Rewriting

FACTOR = 2
SMALLEST = 1e-6
# For each dtype, the number of exponent bits and the number of mantissa bits. For float32, the plan for float16 is
# executed in float32. Because sums may then be computed in another order, five bits are ignored.
BITS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 18)}
# Options for all jaxprs except those under `autocast`. `xla_allow_excess_precision` keeps XLA from omitting the casts
# of the program. The other options shorten the compilation; jax 0.12 does not have the last one.
REFERENCE = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
REFERENCE |= {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
EXPLAINED = ("same", "sensitive", "rounding", "as with jit", "invalid")
OUTCOMES = (*EXPLAINED, "types", "crash", "differs")
PRIMITIVES = ("dot_general", "conv_general_dilated", "ragged_dot_general")


# --- Operations ---


class Inputs:
    """Everything that an operation may use: random choices, weights, indices, a condition and a key."""

    def __init__(self, place, weights, given):
        self.place, self.weights, self.given = place, weights, given
        self.random, self.count = random.Random(place), itertools.count()

    def weight(self, *shape):
        """Return the next weight of this operation. If the program runs for the first time, create the weight."""
        name = f"{self.place}/{next(self.count)}"
        if name not in self.weights:
            numbers = np.random.default_rng(zlib.crc32(name.encode()))
            CREATED[name] = (numbers.normal(size=shape) / max(1, np.prod(shape[:-1])) ** 0.5).astype(np.float32)
        return (self.weights if name in self.weights else CREATED)[name]

    def choose(self, *values):
        return self.random.choice(values)

    def several(self, number, *values):
        return self.random.choices(values, k=number)


CREATED = {}


def ranked(x, rank):
    """Reshape an array to ``rank`` axes. The first axes are merged, or axes of size 1 are inserted."""
    if x.ndim > rank:
        x = x.reshape(-1 if x.size else 0, *x.shape[x.ndim - rank + 1 :]) if rank else x.mean()
    return limited(x.reshape((1,) * (rank - x.ndim) + x.shape))


def limited(x, size=6):
    return x[tuple(slice(0, size) for _ in x.shape)] if max(x.shape, default=0) > size else x


def fitted(y, x):
    return jnp.resize(y, x.shape).astype(x.dtype)


def rank(number):
    """Decorate an operation so that its argument always has a certain number of axes."""
    return lambda function: lambda x, i: function(ranked(x, number), i)


def along(function):
    """Decorate an operation so that a random axis of the array is passed as the argument `axis`."""
    return lambda x, i: function(x := ranked(x, max(1, x.ndim)), axis=i.random.randrange(x.ndim))


def dot_general(x, i):
    axis, is_batched = i.choose(1, 2), i.choose(True, False)
    other = i.weight(*x.shape[:1] * is_batched, x.shape[axis], 3)
    numbers = ((axis,), (int(is_batched),)), ((0,), (0,)) if is_batched else ((), ())
    return lax.dot_general(x, other, numbers, preferred_element_type=i.choose(None, jnp.float32))


def attention(x, i):
    return jax.nn.softmax(x @ i.weight(x.shape[1], x.shape[1]) @ x.T / 2) @ x


def convolution(x, i):
    axes, (groups, batches) = i.choose(1, 2), i.choose((1, 1), (1, 1), (2, 1), (1, 2))
    x = jnp.concatenate([ranked(x, axes + 2)[:3, :3]] * batches, 0)
    x = jnp.concatenate([x] * groups, 1)
    kernel = i.weight(2 * groups * batches, x.shape[1] // groups, *i.several(axes, 1, 2, 3)).astype(x.dtype)
    padding = i.choose("SAME", "VALID", [(1, 2)] * axes, [(2, 0)] * axes)
    options = {} if isinstance(padding, str) else {"lhs_dilation": i.several(axes, 1, 1, 2)}
    options |= {"rhs_dilation": i.several(axes, 1, 1, 2), "batch_group_count": batches, "feature_group_count": groups}
    return lax.conv_general_dilated(x, kernel, i.several(axes, 1, 2, 3), padding, **options)


def pool(x, i):
    x = ranked(x, i.choose(2, 3))
    initial, function = i.choose((-jnp.inf, lax.max), (jnp.inf, lax.min), (0.0, lax.add))
    window, strides, dilation = (i.several(x.ndim, 1, 2, 3) for _ in range(3))
    options = {"window_dilation": dilation} if function is lax.add and i.choose(True, False) else {}
    padding = i.choose("SAME", "VALID", [(1, 2)] * x.ndim)
    return lax.reduce_window(x, initial, function, window, strides, padding, **options)


def indexed(x, i, mode, is_unique=False):
    """Return an indexed array for methods such as `.get()` and `.add()`. Some indices may be out of bounds."""
    rows, columns = (i.given["indices"][:3] % (size + 2) - 1 for size in x.shape)
    if mode == "promise_in_bounds":
        rows, columns = jnp.clip(rows, 0, x.shape[0] - 1), jnp.clip(columns, 0, x.shape[1] - 1)
    if is_unique:
        rows, columns = jnp.array([0, 2, 9]), jnp.array([1, 0, 9])
    return x.at[i.choose(rows, (slice(None), columns), (rows, columns), (rows[:, None], columns))]


def gather(x, i):
    mode = i.choose("fill", "clip", "promise_in_bounds")
    fill_value = i.choose(None, 0, -2.0) if mode == "fill" else None
    return indexed(x, i, mode).get(mode=mode, fill_value=fill_value) if x.size else x


def take_along_axis(x, axis, i):
    index = jnp.resize(i.given["indices"], (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    one = jnp.take_along_axis(x, index, axis, mode=i.choose("fill", "clip"), fill_value=0) if x.size else x
    return i.choose(one, jnp.take_along_axis(x, jnp.argsort(x, axis), axis))


def scatter(x, i):
    mode, method = i.choose("drop", "clip", "promise_in_bounds"), i.choose("add", "set", "mul", "min", "max", "add")
    is_unique = method in ("set", "mul")  # The result, or the derivative, is undefined if an index occurs twice.
    at = indexed(x, i, mode := "drop" if is_unique else mode, is_unique)
    values = i.choose(0.5, jnp.sum(x), i.weight(1))
    return getattr(at, method)(values, mode=mode, unique_indices=is_unique) if x.size else x


def cumulative(x, axis, i):
    functions = lax.cumsum, lax.cummax, lax.cummin, lax.cumlogsumexp, lax.cumprod
    return i.choose(*functions)(x, axis=axis, reverse=i.choose(True, False))


def sort_with_keys(x, i):
    order = jnp.sin(7.0 * jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return lax.sort((order, x, jnp.cos(x)), dimension=i.choose(0, 1), num_keys=i.choose(1, 2))[i.choose(1, 2)]


def slices(x, i):
    start, sizes = i.given["indices"][:2], [max(0, size - 1) for size in x.shape]
    part = lax.dynamic_slice(x, start, sizes)
    return i.choose(part, lax.dynamic_update_slice(x, part * 2, start[::-1]), x[::2, 1:])


def empty(x, i):
    nothing = x[:, :0] @ i.weight(0, x.shape[1]) + x
    return i.choose(nothing, jnp.concatenate([x, x[:0] @ i.weight(*x.shape[1:] * 2)]), x + x[:0].sum(), x[:0])


def solve(x, i):
    matrix = jnp.eye(x.shape[0]) * 2 + x @ x.T / 4
    with_rule = lax.custom_linear_solve(lambda y: y * 3, x, lambda _, b: b / 3, lambda _, b: b / 3)
    return i.choose(jnp.linalg.solve(matrix, x), jnp.linalg.cholesky(matrix) @ x, with_rule)


def integers(x, i):
    whole = (jnp.clip(jnp.nan_to_num(x), -9, 9) * 3).astype(jnp.int32)
    return x + i.choose((whole @ whole.T % 5).sum(), whole % 3, lax.population_count(whole)) / 10


def weak(x, i):
    return i.choose(2.0 * jnp.asarray(1.0) * x, x + jnp.sum(1.0), jnp.asarray(1.0) - x / 2, lax.sin(0.5) * x)


def cast(x, i):
    return x.astype(i.choose(jnp.float16, jnp.bfloat16, jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)) + 1


FUNCTIONS = [
    *(jnp.sin, jnp.tanh, lax.logistic, lax.erf, jax.nn.softplus, jnp.square, jnp.arctan, jnp.sign, jnp.round),
    *(lambda x: jnp.exp(-jnp.abs(x)), lambda x: jnp.log1p(jnp.square(x)), lambda x: jnp.sqrt(jnp.abs(x) + 0.1)),
    *(lambda x: lax.integer_pow(jnp.clip(x, -2, 2), 3), lambda x: (0.1 + jnp.abs(x)) ** 0.7, lambda x: x / (1 + x * x)),
]
MATMULS = {
    "dot": rank(2)(lambda x, i: x @ i.weight(x.shape[1], 4)),
    "dot with its transpose": rank(2)(lambda x, i: x @ x.T / 2),
    "dot of vectors": rank(1)(lambda x, i: x @ i.weight(x.shape[0])),
    "dot with vector": rank(3)(lambda x, i: x @ i.weight(x.shape[-1])),
    "dot_general": rank(3)(dot_general),
    "outer product": rank(1)(lambda x, i: x[:, None] @ i.weight(1, 5)),
    "dense": rank(2)(lambda x, i: jax.nn.gelu(x @ i.weight(x.shape[1], 5) + i.weight(1, 5))),
    "exact dot": rank(2)(lambda x, i: jnp.matmul(x, i.weight(x.shape[1], 3), precision="highest")),
    "dot with a constant": rank(2)(lambda x, i: x @ np.tri(x.shape[1], dtype=np.float32) / 3),
    "embedding": rank(2)(lambda x, i: jax.nn.one_hot(i.given["indices"], 5) @ i.weight(5, 3) + x.sum()),
    "attention": rank(2)(attention),
    "convolution": convolution,
}
OPERATIONS = MATMULS | {
    # Arithmetic
    "function": lambda x, i: i.choose(*FUNCTIONS)(x),
    "another function": lambda x, i: i.choose(*FUNCTIONS)(x) + i.choose(*FUNCTIONS)(x),
    "add": lambda x, i: x + i.weight(*x.shape),
    "multiply": lambda x, i: x * i.weight(*x.shape[-1:]).reshape((1,) * (x.ndim - 1) + x.shape[-1:]),
    "subtract": lambda x, i: x - x[..., ::-1] if x.ndim else 1 - x,
    "softmax": along(jax.nn.softmax),
    "logsumexp": along(jax.nn.logsumexp),
    "normalize": along(lambda x, axis: jax.nn.standardize(x, axis, epsilon=0.1) if x.size else x),
    "standard deviation": lambda x, i: x / jnp.sqrt(jnp.var(x) + 0.1) if x.size else x,
    "cumulative": lambda x, i: along(functools.partial(cumulative, i=i))(x / 2, i),
    "product": along(lambda x, axis: jnp.prod(jnp.clip(x, 0.5, 1.5), axis)),
    "sum": along(jnp.sum),
    "segment sum": rank(2)(lambda x, i: jax.ops.segment_sum(x, jnp.arange(x.shape[0]) % 3, 3)),
    "fft": rank(1)(lambda x, i: jnp.abs(jnp.fft.rfft(x) + 1) if x.size else x),
    "large": lambda x, i: (x * 1e5 + 3e4) / 1e5,
    "tiny": lambda x, i: (x * 1e-7)[..., None] * 1e7,
    "dropout": lambda x, i: jnp.where(jax.random.bernoulli(i.given["key"], 0.7, x.shape), x / 0.7, 0),
    "random": lambda x, i: x + 0.1 * jax.random.normal(i.given["key"], x.shape, x.dtype),
    "ragged dot": rank(2)(lambda x, i: lax.ragged_dot(x, i.weight(2, x.shape[1], 3), jnp.array([1, x.shape[0]]))),
    "integers": rank(2)(integers),
    "solve": rank(2)(solve),
    # Selections
    "relu": lambda x, i: jax.nn.relu(x),
    "maximum": lambda x, i: i.choose(jnp.maximum, jnp.minimum)(x, i.weight(*x.shape)),
    "clip": lambda x, i: jnp.clip(x, -0.5, i.weight()),
    "largest": along(functools.partial(jnp.max, initial=-3.0)),
    "argmax": along(lambda x, axis: x - jnp.argmax(x, axis, keepdims=True) if x.size else x),
    "where": lambda x, i: jnp.where(i.choose(x > 0.1, x < i.weight(), jnp.isfinite(x)), x, i.choose(0.0, 2 * x)),
    "pool": pool,
    "sort": along(jnp.sort),
    "sort with keys": rank(2)(sort_with_keys),
    "top k": rank(2)(lambda x, i: lax.top_k(x, min(2, x.shape[1]))[0]),
    # Data movement
    "transpose": lambda x, i: jnp.transpose(x, i.random.sample(range(x.ndim), x.ndim)),
    "reshape": lambda x, i: ranked(x, i.choose(1, 2, 3, 4)),
    "scalar": lambda x, i: ranked(x, 0) if x.size else x.sum(),
    "reverse": along(lambda x, axis: lax.rev(x, (axis,))),
    "roll": along(lambda x, axis: jnp.roll(x, 1, axis)),
    "slice": rank(2)(slices),
    "concatenate": along(lambda x, axis: jnp.concatenate([x, -x, x], axis)),
    "pad": rank(2)(lambda x, i: lax.pad(x, i.weight().astype(x.dtype), [(i.choose(-1, 1), 1, 0), (0, -1, 1)])),
    "broadcast": lambda x, i: jnp.broadcast_to(x, (2, *x.shape[-3:])) if x.ndim < 4 else x[0],
    "repeat": along(lambda x, axis: jnp.repeat(x, 2, axis)),
    "gather": rank(2)(gather),
    "take along axis": lambda x, i: along(functools.partial(take_along_axis, i=i))(x, i),
    "scatter": rank(2)(scatter),
    "diagonal": rank(2)(lambda x, i: jnp.diagonal(x)),
    "triangle": rank(2)(lambda x, i: jnp.tril(x)),
    "empty": rank(2)(empty),
    # Types
    "cast": cast,
    "weak": weak,
    "stop_gradient": lambda x, i: x + lax.stop_gradient(jnp.cos(x)),
    "barrier": lambda x, i: lax.optimization_barrier((x, jnp.sin(x)))[0],
    "bits": lambda x, i: x + lax.bitcast_convert_type(lax.stop_gradient(x), f"int{8 * x.dtype.itemsize}") % 2,
}


# --- Structures, which evaluate a part of the program ---


def in_scan(body, inputs, x, i):
    def step(carry, row):
        out = body(inputs, carry + row)
        return fitted(out, carry), out

    rows = i.choose(jnp.stack([x, x / 2, -x]), jnp.linspace(-1.0, 1.0, 3, dtype=x.dtype))
    return i.choose(*lax.scan(step, x, rows, reverse=i.choose(True, False), unroll=i.choose(1, 1, 2)))


def in_while(body, inputs, x, i):
    inputs, start = lax.stop_gradient((inputs, x))
    step = lambda state: (state[0] + 1, fitted(body(inputs, state[1]), x))  # noqa: E731
    return x + lax.while_loop(lambda state: state[0] < inputs[1]["steps"], step, (0, start))[1]


def in_cond(body, inputs, x, i):
    condition = i.choose(inputs[1]["flag"], ~inputs[1]["flag"], jnp.sum(x) > 0.1)
    return lax.cond(condition, body, lambda inputs, x: body(inputs, jnp.sin(x)), inputs, x)


def in_switch(body, inputs, x, i):
    branches = [lambda x: x, lambda x: fitted(body(inputs, x), x), jnp.sin, jnp.zeros_like]
    return lax.switch(inputs[1]["indices"][0] % 4, branches, x)


def in_vmap(body, inputs, x, i):
    x = ranked(x, max(1, x.ndim))
    axes = [n for n in range(x.ndim) if x.shape[n]]
    return jax.vmap(body, (None, i.choose(*axes)), i.choose(0, -1))(inputs, x) if axes else body(inputs, x)


def in_custom_jvp(body, inputs, x, i):
    function = jax.custom_jvp(body)
    function.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return function(inputs, x)


def in_custom_vjp(body, inputs, x, i):
    function = jax.custom_vjp(body)
    function.defvjp(lambda *given: jax.vjp(body, *given), lambda pull_back, cotangent: pull_back(cotangent))
    return function(inputs, x)


def in_checkpoint(body, inputs, x, i):
    names = "everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
    policy = i.choose(None, *(getattr(jax.checkpoint_policies, name) for name in names))
    return jax.checkpoint(body, policy=policy, prevent_cse=i.choose(True, False))(inputs, x)


def in_shard_map(body, inputs, x, i):
    """Evaluate a part of the program on two devices."""
    x = ranked(x, max(1, x.ndim))
    if jax.sharding.get_abstract_mesh().manual_axes or jax.device_count() < 2:
        return body(inputs, x)
    combined = i.choose(lambda y: y, lambda y: y - lax.pmean(y, "data"), lambda y: lax.ppermute(y, "data", [(0, 1)]))
    inside = lambda inputs, x: combined(ranked(y := body(inputs, x), max(1, y.ndim)))  # noqa: E731
    mesh, specs = jax.sharding.Mesh(jax.devices()[:2], ("data",)), (jax.P(), jax.P("data"))
    function = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=i.choose(True, False))
    return function(inputs, jnp.concatenate([x, x / 2]))


STRUCTURES = {
    "jit": lambda body, inputs, x, i: jax.jit(body)(inputs, x),
    "fori_loop": lambda body, inputs, x, i: lax.fori_loop(0, 2, lambda n, x: fitted(body(inputs, x + n), x), x),
    "map": lambda body, inputs, x, i: lax.map(functools.partial(body, inputs), jnp.stack([x, -x])),
    "residual": lambda body, inputs, x, i: x + fitted(body(inputs, x), x),
    "twice": lambda body, inputs, x, i: (compiled := jax.jit(body))(inputs, fitted(compiled(inputs, x), x)),
    "grad": lambda body, inputs, x, i: jax.grad(lambda x: jnp.sum(jnp.sin(body(inputs, x))).astype(x.dtype))(x),
    "jvp": lambda body, inputs, x, i: jax.jvp(functools.partial(body, inputs), (x,), (jnp.cos(x),))[1],
    **{"scan": in_scan, "while": in_while, "cond": in_cond, "switch": in_switch, "vmap": in_vmap},
    **{"custom_jvp": in_custom_jvp, "custom_vjp": in_custom_vjp, "checkpoint": in_checkpoint},
    "shard_map": in_shard_map,
}


# --- Programs ---


def random_part(numbers, size, depth=0):
    """Return a tuple of operation names and of pairs that contain a structure and the part of the program inside it."""
    part = []
    while size > 0:
        if depth < 2 and numbers.random() < 0.3:
            inside = random_part(numbers, numbers.randint(1, min(size, 3)), depth + 1)
            part.append((numbers.choice(list(STRUCTURES)), inside))
            size -= len(inside)
        else:
            part.append(numbers.choice(numbers.choice([[*MATMULS], [*OPERATIONS], [*OPERATIONS]])))
            size -= 1
    return tuple(part)


def run(part, place, inputs, x):
    """Apply a part of a program to an array. `inputs` contains the weights and the other arguments."""
    for n, step in enumerate(part):
        name, inside = (step, None) if isinstance(step, str) else step
        here = f"{place}/{name} {part[:n].count(step)}"  # If other steps are removed, the choices remain the same.
        if inside is None:
            x = OPERATIONS[name](x, Inputs(here, *inputs))
        else:
            x = STRUCTURES[name](functools.partial(run, inside, here), inputs, x, Inputs(here, *inputs))
        x = limited(x)
    return x


def loss_of(part, seed):
    """Return a loss function of the weights, an array and other arguments. The loss is a weighted sum of the result."""

    def loss(weights, x, given):
        y = run(part, f"{seed}", (weights, given), x)
        signs = (np.arange(y.size).reshape(y.shape) * 5 % 8 - 2.5) / 4
        others = {"y": y, "weak": 2.0 * jnp.asarray(1.0), "indices": given["indices"]}
        return jnp.sum(y * signs.astype(y.dtype)).astype(jnp.float32), others

    return loss


def gradient(loss):
    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def forward(function, weights, x, given):
    return jax.jvp(lambda *args: function(*args, given), (weights, x), jax.tree.map(jnp.cos, (weights, x)))


# The functions of a loss function that are compared, such as its gradient. The argument `cast` is `autocast` or the
# identity.
MODES = {
    "gradient": lambda cast, loss: gradient(cast(loss)),
    "of the gradient": lambda cast, loss: cast(gradient(loss)),
    "forward": lambda cast, loss: functools.partial(forward, cast(loss)),
    "vmap": lambda cast, loss: jax.vmap(gradient(cast(loss)), (None, 0, None)),
    "of vmap": lambda cast, loss: cast(jax.vmap(gradient(loss), (None, 0, None))),
    "second derivative": lambda cast, loss: functools.partial(forward, gradient(cast(loss))),
}


def rounded(value, bits, is_rounded):
    """If a parameter of an equation is a jaxpr, round the operands and results of some of its float32 operations."""
    if isinstance(value, ClosedJaxpr) and not isinstance(value, Jaxpr):  # Since jax 0.11, both are the same class.
        return ClosedJaxpr(rounded(value.jaxpr, bits, is_rounded), value.consts)
    if isinstance(value, tuple):
        items = [rounded(item, bits, is_rounded) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, Jaxpr):
        return value
    eqns, new = [], core.gensym()
    for eqn in value.eqns:
        eqn = eqn.replace(params={name: rounded(param, bits, is_rounded) for name, param in eqn.params.items()})
        old = [atom for atom in (*eqn.invars, *eqn.outvars) if getattr(atom.aval, "dtype", None) == np.float32]
        if not is_rounded(eqn) or eqn.effects or list(core.jaxprs_in_params(eqn.params)):
            eqns.append(eqn)
            continue
        params = dict(zip(("exponent_bits", "mantissa_bits"), bits, strict=True))
        rounding = functools.partial(eqn.replace, primitive=lax.reduce_precision_p, params=params)
        half = {id(atom): new(atom.aval) for atom in old}
        eqns += [rounding(invars=[x], outvars=[half[id(x)]]) for x in eqn.invars if id(x) in half]
        eqns += [eqn.replace(**{k: [half.get(id(x), x) for x in getattr(eqn, k)] for k in ("invars", "outvars")})]
        eqns += [rounding(invars=[half[id(x)]], outvars=[x]) for x in eqn.outvars if id(x) in half]
    return value.replace(eqns=eqns)


# --- Comparison ---


class InFloat32(Rewriting):
    """Interpreter that executes a plan for float16 in float32."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtype = jnp.dtype(jnp.float32)


def in_float32(fun):
    """Return the function under `autocast`, with the plan for float16 executed in float32."""
    autocast = jls.autocast(fun)

    @functools.wraps(fun)
    def executed(*args, **kwargs):
        with mock.patch.object(transform, "Rewriting", InFloat32):
            return autocast(*args, **kwargs)

    return executed


class Reference:
    """The results of a jaxpr in float32 and with manual casts, for given and for slightly changed arguments."""

    def __init__(self, jaxpr, args, dtype):
        self.jaxpr, self.args, self.dtype, self.epsilon = jaxpr, args, dtype, 2.0 ** -BITS[dtype][1]
        self.known = self.results(4, [self.rounded()])

    def rounded(self, more_bits=0, is_rounded=lambda eqn: eqn.primitive.name in PRIMITIVES):
        exponent, mantissa = BITS[self.dtype]
        return rounded(self.jaxpr, (exponent, mantissa + more_bits), is_rounded)

    def results(self, changes, manual):
        """Return the results of the jaxpr and of jaxprs with manual casts, for the given and for changed arguments."""
        programs = lambda *args: [jaxpr_as_fun(program)(*args) for program in (self.jaxpr, *manual)]  # noqa: E731
        programs = jax.jit(programs, compiler_options=REFERENCE)
        args = [self.args, *(changed(self.args, self.epsilon / 2, n) for n in range(changes))]
        return [[*map(on_host, result)] for each in args for result in programs(*each)]

    def compared(self, found):
        """Return a record with the outcome and the errors for each result that `autocast` computes."""
        records = self.judged(found, self.known)
        if any(record["outcome"] == "differs" for record in records):
            manual = [self.rounded(more) for more in (-2, -1, 0, 1, 2)]
            records = self.judged(found, self.results(30, manual))
        if any(record["outcome"] == "differs" for record in records):
            everything = [self.rounded(more, is_rounded=lambda eqn: True) for more in (-1, 0, 1)]
            for record, other in zip(records, self.judged(found, self.results(4, everything)), strict=True):
                if record["outcome"] == "differs" and other["outcome"] != "differs":
                    record["outcome"] = "rounding"
        return records

    @np.errstate(all="ignore")
    def judged(self, found, results):
        """Compare results with the first of several known results. The other known results show the noise."""
        floats = [x for x in results[0] if jnp.issubdtype(x.dtype, jnp.inexact)]
        largest = max([1.0, *(np.nanmax(abs(x.astype(complex)), initial=0, where=np.isfinite(x)) for x in floats)])
        records = []
        for half, plain, *others in zip(found, *results, strict=True):
            if not jnp.issubdtype(plain.dtype, jnp.inexact):
                half, others = np.where(np.array_equal(plain, half), 0.0, np.inf), []
                plain = np.zeros(())
            half, plain, *others = (x.astype(complex if x.dtype.kind == "c" else float) for x in (half, plain, *others))
            counts = np.all([np.isfinite(x) & (abs(x) < 6e4) for x in (plain, *others)], axis=0)
            noise = np.max([abs(x - plain)[counts] for x in others], initial=0)
            scale = np.max(abs(plain[counts]), initial=SMALLEST)
            error = np.max(np.where(np.isfinite(half), abs(half - plain), np.inf)[counts], initial=0)
            ratio = error / (FACTOR * (noise + self.epsilon * scale) + SMALLEST * largest)
            outcome = "differs" if ratio > 1 else "sensitive" if noise > scale / 2 else "same"
            numbers = {"ratio": ratio, "error": error, "noise": noise, "scale": scale}
            records.append({"outcome": outcome} | {key: float(f"{x:.3g}") for key, x in numbers.items()})
        return records


class Comparison:
    """Comparison of a program under `autocast` with the program in float32 and with manual casts."""

    def __init__(self, seed, dtype, part=None):
        numbers = random.Random(seed)
        self.dtype, self.mode = dtype, numbers.choice(["gradient", "gradient", "gradient", *MODES])
        self.part = random_part(numbers, numbers.randint(3, 8))
        self.part = self.part if part is None else part
        self.x64 = numbers.random() < 0.1
        shape = [numbers.randint(1, 5) for _ in range(numbers.choice([0, 1, 2, 2, 2, 3, 3, 4]))]
        with jax.enable_x64(self.x64):
            values = np.random.default_rng(numbers.randrange(10**6))
            x = values.normal(size=shape).astype(values.choice(["float32", "float64"]) if self.x64 else "float32")
            given = {"indices": values.integers(-9, 9, 4, np.int32), "flag": values.random() < 0.5}
            given |= {"key": jax.random.key(0), "steps": jnp.int32(2)}
            self.loss = loss_of(self.part, seed)
            CREATED.clear()
            jax.eval_shape(self.loss, {}, x, given)
            x = np.stack([x, -x]) if "vmap" in self.mode else x
            self.args = jax.tree.map(jnp.asarray, (dict(CREATED), x, given))
            self.plain, self.shapes = self.traced(lambda loss: loss)

    def traced(self, cast):
        return jax.make_jaxpr(MODES[self.mode](cast, self.loss), return_shape=True)(*self.args)

    def run(self, is_jitted=True):
        """Return the outcome of the comparison, and the errors of the result with the largest relative error."""
        with jax.enable_x64(self.x64):
            # If the program fails in float32, this line raises an error.
            reference = Reference(self.plain, jax.tree.leaves(self.args), self.dtype)
            try:
                cast = in_float32 if self.dtype == "float32" else functools.partial(jls.autocast, dtype=self.dtype)
                half, shapes = self.traced(cast)
                if difference := self.difference(half, shapes):
                    return {"outcome": "types", "detail": difference}
                jitted = lambda *args: jax.jit(jaxpr_as_fun(half))(*jax.tree.leaves(args))  # noqa: E731
                function = jitted if is_jitted else MODES[self.mode](cast, self.loss)
                found = [*map(on_host, jax.tree.leaves(function(*self.args)))]
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                detail = f"{type(error).__name__}: {str(error)[:300]} ({Path(frame.filename).name}:{frame.lineno})"
                return {"outcome": "as with jit" if self.is_wrong_with_jit(reference) else "crash", "detail": detail}
            return worst(record | {"result": n} for n, record in enumerate(reference.compared(found)))

    def is_wrong_with_jit(self, reference):
        """Return whether `jax.jit` in place of `autocast` also raises an error or changes the results."""
        try:
            function = jax.jit(jaxpr_as_fun(self.traced(jax.jit)[0]))
            records = reference.compared([*map(on_host, function(*reference.args))])
        except Exception:
            return True
        return worst(records)["ratio"] > 1

    def difference(self, half, shapes):
        """Describe the first difference between the structures or types, or return an empty string if there is none."""
        if jax.tree.structure(shapes) != jax.tree.structure(self.shapes):
            return f"{jax.tree.structure(self.shapes)} became {jax.tree.structure(shapes)}"
        pairs = zip(map(str, self.plain.out_avals), map(str, half.out_avals), strict=True)
        return next((f"{old} became {new}" for old, new in pairs if old != new), "")


def worst(records):
    return max(records, key=lambda record: (max(1, OUTCOMES.index(record["outcome"])), record["ratio"]))


def on_host(x):
    """Convert an array to a NumPy array. Random keys are replaced with their data."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def changed(args, unit, seed):
    """Multiply each element of the floating-point arrays by 1 + unit or 1 - unit at random."""
    numbers = np.random.default_rng(seed)

    def change(x):
        factor = numbers.choice([1 - unit, 1 + unit], x.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.device_put(x * factor.astype(x.dtype), x.sharding if x.committed else None)

    return list(map(change, args))


def compared(seed, dtype, is_jitted, part=None):
    """Return the record of a program. Programs that fail in float32 are invalid."""
    try:
        comparison = Comparison(seed, dtype, part)
        record = comparison.run(is_jitted)
    except Exception as error:
        return {"seed": seed, "outcome": "invalid", "detail": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"seed": seed, **record, "mode": comparison.mode, "x64": comparison.x64, "part": comparison.part}


def shorter(part):
    """Yield the variants of a program that have one operation or one structure fewer."""
    for n, step in enumerate(part):
        before, after = part[:n], part[n + 1 :]
        yield (*before, *after)
        if not isinstance(step, str):
            yield (*before, *step[1], *after)
            yield from ((*before, (step[0], inside), *after) for inside in shorter(step[1]) if inside)


def shortest(part, fails):
    """Return the shortest part of a program that still fails."""
    return next((shortest(each, fails) for each in shorter(part) if fails(each)), part)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=list(BITS), default="float16")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--no-jit", action="store_true", help="evaluate the program under `autocast` without `jax.jit`")
    parser.add_argument("--results", type=Path, help="the file of the known results")
    parser.add_argument("--show", type=int, metavar="SEED", help="show and shorten one program")
    given = parser.parse_args()
    compare = functools.partial(compared, dtype=given.dtype, is_jitted=not given.no_jit)
    if given.show is not None:
        record = compare(given.show)
        fails = lambda part: compare(given.show, part=part)["outcome"] == record["outcome"]  # noqa: E731
        part = shortest(record["part"], fails)
        print(json.dumps(record), json.dumps(compare(given.show, part=part)), sep="\n")
        return
    known = given.results.read_text().splitlines() if given.results and given.results.exists() else []
    records = {record["seed"]: record for record in map(json.loads, known)}
    seed = valid = 0
    while valid < given.programs:
        if seed not in records:
            records[seed] = compare(seed)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(records[seed]) + "\n")
        valid += records[seed]["outcome"] != "invalid"
        seed += 1
        if seed % 50 == 0:
            jax.clear_caches()
    counts = collections.Counter(record["outcome"] for record in records.values())
    print(*(f"{outcome:10} {counts[outcome]:5}" for outcome in OUTCOMES), sep="\n")
    unexplained = [seed for seed, record in records.items() if record["outcome"] not in EXPLAINED]
    print(f"Unexplained differences: {len(unexplained)} (seeds {unexplained})")


if __name__ == "__main__":
    main()
