"""The gradient of a gather of one position per batch element is a mask. Other gathers keep their scatter-add."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import needs_jax, set_mesh, skip_before
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reading import distance, equations

import jax_lossscale as jls

W = jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (4, 8))
INDEX = jnp.array([3, 0, 7, 3])


def along(y, index, axis=1, **options):
    return jnp.take_along_axis(y, jnp.expand_dims(index, axis), axis, **options)


def in_a_cube(y, index):
    cube = y[:, None, :] * jnp.arange(1.0, 4.0)[None, :, None]
    return cube[jnp.arange(4)[:, None], jnp.arange(3)[None], jnp.stack([index, 7 - index, index], 1)]


PARTS = jax.lax.GatherDimensionNumbers(
    offset_dims=(1,),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
MASKED = {
    "take_along_axis": along,
    "take_along_axis on the first axis": lambda y, index: along(y.T, index, 0),
    "take_along_axis, clip": lambda y, index: along(y, index + 3, mode="clip"),
    "take_along_axis, fill": lambda y, index: along(y, index + 3, mode="fill", fill_value=0),
    "take_along_axis, promise_in_bounds": lambda y, index: along(y, index, mode="promise_in_bounds"),
    "negative indices": lambda y, index: along(y, index - 8),
    "arange": lambda y, index: y[jnp.arange(4), index],
    "arange in the second dimension": lambda y, index: y.T[index, jnp.arange(4)],
    "arange, clip": lambda y, index: y.at[jnp.arange(4), index + 3].get(mode="clip"),
    "arange, drop": lambda y, index: y.at[jnp.arange(4), index + 3].get(mode="fill", fill_value=0),
    "two aranges": lambda y, index: in_a_cube(y, index),
    "two indices per batch element": lambda y, index: y.reshape(4, 2, 4)[jnp.arange(4), index % 2, index % 4],
    "a diagonal": lambda y, index: y[jnp.arange(4), jnp.arange(4)],
    "whole slices": lambda y, index: y.reshape(4, 4, 2)[jnp.arange(4), index % 4],
    "whole slices before the index": lambda y, index: jax.vmap(lambda y, n: y[:, n])(y.reshape(4, 2, 4), index % 4),
    "vmap": lambda y, index: jax.vmap(lambda y, n: y[n])(y, index),
    "vmap over the last axis": lambda y, index: jax.vmap(lambda y, n: y[n], in_axes=(1, 0))(y.T, index),
    "vmap of a dynamic slice": lambda y, index: jax.vmap(lambda y, n: jax.lax.dynamic_slice(y, (n,), (1,)))(y, index),
    "optax": lambda y, index: optax.softmax_cross_entropy_with_integer_labels(y, index),
}
NOT_MASKED = {
    "an embedding lookup": lambda y, index: y[index % 4],
    "a lookup of columns": lambda y, index: y[:, index],
    "two positions per batch element": lambda y, index: (
        along(y, jnp.stack([index, index], 1)[..., 0]) * jnp.take_along_axis(y, jnp.stack([index, index], 1), 1)
    ),
    "a slice of two positions": lambda y, index: jax.vmap(lambda y, n: jax.lax.dynamic_slice(y, (n,), (2,)))(y, index),
    "a batch of one element": lambda y, index: jnp.take_along_axis(y[:1], index[:1, None], 1),
    "a row of some rows": lambda y, index: y[jnp.arange(3), index[:3]],
    "parts of rows": lambda y, index: jax.lax.gather(y.reshape(4, 4, 2), index[:, None] % 4, PARTS, (1, 1, 1)),
    "a permutation": lambda y, index: y[3 - jnp.arange(4), index],
}


def sum_of(select):
    def loss(w, x, index):
        selected = select(x @ w, index)
        return jnp.sum(jnp.sin(selected) * jnp.arange(1.0, 1 + selected.size).reshape(selected.shape))

    return loss


def largest_scatter_add(function, *args):
    """Return the number of elements of the largest array to which a function adds values at some positions."""
    eqns = equations(jax.make_jaxpr(function)(*args))
    sums = [eqn for eqn in eqns if eqn.primitive.name in ("scatter-add", "scatter_add")]
    return max((eqn.outvars[0].aval.size for eqn in sums), default=0)


@pytest.mark.parametrize("name", [*MASKED, *NOT_MASKED])
def test_only_the_gradient_of_a_gather_of_one_position_is_a_mask(name):
    if name == "a lookup of columns":
        skip_before("0.8.0", "the compiled float32 gradient on a CPU is wrong")
    loss = sum_of((MASKED | NOT_MASKED)[name])
    half = jls.autocast(loss)
    expected, found = (largest_scatter_add(jax.grad(f), W, X, INDEX) for f in (loss, half))
    assert found <= 4 if name in MASKED else found == expected > 4

    def derivatives(f):
        gradients = jax.grad(f, (0, 1))(W, X, INDEX)
        return gradients, jax.jvp(lambda w, x: f(w, x, INDEX), (W, X), (W.T, X[::-1]))[1]

    (gradients, tangent), (half_gradients, half_tangent) = jax.jit(lambda: [derivatives(f) for f in (loss, half)])()
    assert distance(gradients, half_gradients) < 1e-2
    assert distance(tangent, half_tangent) < 2e-2


def cross_entropy(w, x, index):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ w, index))


TRANSFORMED = {
    "vmap": lambda f: (
        lambda w, x, index: jax.vmap(f, (None, 0, 0))(w, jnp.stack([x, 2 * x]), jnp.stack([index, 7 - index]))
    ),
    "a second derivative": lambda f: lambda w, x, index: jax.jvp(lambda w: jax.grad(f)(w, x, index), (w,), (w.T,))[1],
    "jit": jax.jit,
    "a scan": lambda f: (
        lambda w, x, index: jax.lax.scan(lambda total, _: (total + f(w, x, index), None), 0.0, length=2)[0]
    ),
    "a checkpoint": jax.checkpoint,
    "jax.shard_map": lambda f: jax.shard_map(
        lambda *args: jax.lax.pmean(f(*args), "data"),
        mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
    ),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_masks_under_transformations(transformed):
    plain, half = (
        lambda *args, f=f: jnp.sum(jnp.square(10 * transformed(f)(*args)))
        for f in (cross_entropy, jls.autocast(cross_entropy))
    )
    assert largest_scatter_add(jax.grad(half), W, X, INDEX) <= 8
    assert distance(jax.grad(plain, (0, 1))(W, X, INDEX), jax.grad(half, (0, 1))(W, X, INDEX)) < 1e-2


@pytest.mark.parametrize(
    ("axis_type", "spec"),
    [(AxisType.Auto, P(None, "data")), (AxisType.Auto, P("data", None)), (AxisType.Explicit, P("data", None))],
    ids=["vocabulary", "rows", "explicit"],
)
def test_masks_on_a_mesh(axis_type, spec):
    """With explicit axes, JAX supports logits that are sharded over the batch, but not over the vocabulary."""
    if axis_type is AxisType.Explicit:
        skip_before("0.10.0", "the gradient of this matmul needs an `out_sharding`")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    over_batch = P("data") if axis_type is AxisType.Explicit else P()

    def loss(w, x, index):
        logits = x @ w
        if axis_type is AxisType.Auto:
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, spec))
        return -jnp.mean(along(jax.nn.log_softmax(logits), index))

    with set_mesh(mesh):
        x, index = (jax.device_put(array, NamedSharding(mesh, over_batch)) for array in (X, INDEX))
        half = jax.jit(jax.grad(jls.autocast(loss)))
        assert largest_scatter_add(half, W, x, index) == 0
        assert distance(jax.jit(jax.grad(loss))(W, x, index), half(W, x, index)) < 1e-2


@needs_jax("0.10.0", "`.at[...].get` does not support these indices")
@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
@pytest.mark.parametrize(("dtype", "length"), [("int8", 300), ("int16", 70_000)])
def test_dtype_of_the_index_need_not_represent_all_positions(dtype, length, mode):
    labels = jnp.array([5, 6], dtype)

    def loss(x, w):
        selected = jax.vmap(lambda row, label: row.at[label].get(mode=mode))(jax.nn.log_softmax(x), labels)
        return -selected.sum() + (w @ w).sum()

    x, w = jnp.zeros((2, length)), jnp.ones((2, 2))
    np.testing.assert_array_equal(jax.grad(jls.autocast(loss))(x, w), jax.grad(loss)(x, w))
