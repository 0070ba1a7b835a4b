"""On a mesh, data moves between devices in half precision, and sums keep the dtype of the source."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import needs_jax, pcast, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kinds import slow_except
from reading import distance, equations, matmul_dtypes, matmul_dtypes_in, result_dtypes

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users]

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (32, 16))


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


def loss_fn(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))


def fully_sharded(w, x):
    """Compute the loss from sharded weights, which are gathered. Their gradients are reduce-scattered."""

    def shard(w, x):
        w = jax.lax.all_gather(w, "data", axis=0, tiled=True)
        return jax.lax.pmean(loss_fn(w, x), "data")

    return jax.shard_map(shard, mesh=mesh_of(), in_specs=(P("data"), P("data")), out_specs=P())(w, x)


def moved(function, name):
    eqns = equations(jax.make_jaxpr(function)(W, X))
    return {eqn.invars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name.startswith(name)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_shard_map_gathers_weights_and_scatters_gradients_in_half_precision(dtype):
    half = jax.value_and_grad(jls.autocast(fully_sharded, dtype))
    assert moved(jax.value_and_grad(fully_sharded), "all_gather") == {"float32"}
    assert moved(half, "all_gather") == {jnp.dtype(dtype).name}
    assert moved(half, "reduce_scatter") == {jnp.dtype(dtype).name}
    assert moved(half, "psum") == {"float32"}
    assert set(matmul_dtypes(half, W, X)) == {jnp.dtype(dtype).name}
    rounding = 4e-3 if dtype == jnp.float16 else 3e-2
    assert distance(jax.value_and_grad(fully_sharded)(W, X), jax.jit(half)(W, X)) < rounding


def over_shards(function, axis_type=AxisType.Auto, check_vma=True):
    over = P("data")
    return jax.shard_map(function, mesh=mesh_of(axis_type), in_specs=(P(), over), out_specs=over, check_vma=check_vma)


def times_its_number(w, x):
    return x @ (2 * jnp.eye(16)) @ w @ (jax.lax.axis_index("data") * jnp.eye(16))


def clipped(w, x):
    return jnp.clip(x @ w, -1, 1) @ w


def penalized(branches):
    """Return a function that adds the gradient of a function with branches to the result of a matmul."""
    return lambda w, x: x @ w + jax.grad(lambda x: jnp.sum(jnp.sin(branches(w, x))))(x)


ON_A_SHARD = {
    "its number": (times_its_number, {"float16", "float32"}),  # The axis index may be any int32.
    "clip": (clipped, {"float16"}),
    "hard_tanh": (lambda w, x: jax.nn.hard_tanh(x @ w) @ w, {"float16"}),
    "a gradient of cond": (
        penalized(lambda w, x: jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: x, x)),
        {"float16"},
    ),
    "a gradient of switch": (
        penalized(lambda w, x: jax.lax.switch(jnp.int32(jnp.sum(x)) % 3, [lambda x: x @ w, jnp.sin, jnp.cos], x)),
        {"float16"},
    ),
    "a gradient by platform": (
        penalized(lambda w, x: jax.lax.platform_dependent(x, cpu=lambda x: x @ w, default=jnp.sin)),
        {"float16"},
    ),
}


@pytest.mark.parametrize("check_vma", slow_except([True], [True, False]))
@pytest.mark.parametrize(("function", "dtypes"), ON_A_SHARD.values(), ids=ON_A_SHARD)
def test_functions_with_constants_inside_shard_map_are_supported(function, dtypes, check_vma):
    sharded = over_shards(function, check_vma=check_vma)
    expected = jax.jit(sharded)(W, X)
    with set_mesh(mesh_of()):
        for dtype, found, error in ((jnp.float16, dtypes, 5e-3), (jnp.bfloat16, {"bfloat16"}, 5e-2)):
            half = jls.autocast(sharded, dtype)
            assert set(matmul_dtypes(half, W, X)) == found
            assert distance(expected, jax.jit(half)(W, X)) < error


@pytest.mark.parametrize(
    "axis_type",
    [
        AxisType.Auto,
        pytest.param(AxisType.Explicit, marks=needs_jax("0.8.0", "an abstract mesh with explicit axes is not lowered")),
    ],
)
def test_training_step_can_be_lowered_for_an_abstract_mesh(axis_type):
    mesh = jax.sharding.AbstractMesh((64,), ("data",), axis_types=(axis_type,))
    tx = jls.loss_scaled(optax.adam(1e-3))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def loss(w, x):
        return loss_fn(w, jnp.clip(x @ (2 * jnp.eye(16)), -1, 1))

    def step(w, state, x):
        value, grads = jls.value_and_scaled_grad(jls.autocast(loss), state)(w, x)
        return tx.update_and_apply(grads, state, w, value=value)

    with jax.sharding.use_abstract_mesh(mesh):
        w, x = array(P(), 16, 16), array(P("data"), 256, 16)
        state = jax.eval_shape(tx.init, w)
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(w, state, x)
        assert set(matmul_dtypes_in(traced.jaxpr)) == {"float16"}
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mhlo.num_partitions = 64" in text
    # The buffers of the weights and of Adam's two moments are donated.
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") >= 3


COLLECTIVE = re.compile(r"= \(?(\w+)\[[^\]]*\][^=]* (all-gather|all-reduce|reduce-scatter)(?:-start)?\(")


def collectives(compiled):
    return {(kind, dtype) for dtype, kind in COLLECTIVE.findall(compiled.as_text())}


def test_function_in_auto_axes_is_cast():
    with set_mesh(mesh_of(AxisType.Explicit)):
        w, x = jax.device_put(W, P(None, "data")), jax.device_put(X, P("data"))
        loss = jax.sharding.auto_axes(loss_fn, axes=("data",), out_sharding=P())
        half = jax.value_and_grad(jls.autocast(loss))
        assert set(matmul_dtypes(half, w, x)) == {"float16"}
        assert distance(jax.jit(jax.value_and_grad(loss))(w, x), jax.jit(half)(w, x)) < 4e-3


def test_data_parallel_gradients_are_reduced_in_half_precision():
    """Manual casts have the same effect. A dynamic loss scale handles overflow in both cases."""
    mesh = mesh_of()
    w, x = jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))
    compiled = jax.jit(jax.grad(jls.autocast(loss_fn))).lower(w, x).compile()
    assert ("all-reduce", "f16") in collectives(compiled)
    np.testing.assert_allclose(compiled(w, x), jax.grad(jls.autocast(loss_fn))(W, X), atol=1e-4)


def reduced_outside(loss):
    return lambda w, x: loss(jax.sharding.reshard(w, P(reduced={"data"})), x)


def varying_outside(loss):
    def mean_over_devices(w, x):
        return jax.lax.pmean(loss(pcast(w, "data", to="varying"), x), "data")

    return jax.shard_map(mean_over_devices, in_specs=(P(), P("data")), out_specs=P())


@pytest.mark.parametrize("spec", [P(), P("data")])
@pytest.mark.parametrize(
    ("axis_type", "recipe"),
    [
        (AxisType.Auto, varying_outside),
        pytest.param(AxisType.Explicit, reduced_outside, marks=needs_jax("0.8.0", "products forget what is reduced")),
    ],
)
def test_gradients_of_weights_replicated_outside_are_summed_in_float32(axis_type, recipe, spec):
    """There are eight summands of 40,000. The sum of any two of them overflows in float16."""
    mesh = mesh_of(axis_type)
    half = jls.autocast(lambda w, x: 8 * jnp.mean(x @ w))

    def shared(w, x):
        return half(jax.sharding.reshard(w, P()) if axis_type is AxisType.Explicit else w, x)

    with set_mesh(mesh):
        w, x = jax.device_put(jnp.ones((16, 1)), spec), jax.device_put(jnp.full((32, 16), 40_000.0), P("data"))
        for function, dtype, expected in ((shared, "f16", np.inf), (recipe(half), "f32", 320_000)):
            compiled = jax.jit(jax.grad(function)).lower(w, x).compile()
            assert {found for kind, found in collectives(compiled) if kind != "all-gather"} == {dtype}
            np.testing.assert_array_equal(compiled(w, x), np.full((16, 1), expected))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_half_keeps_the_sharding_of_its_arguments(axis_type):
    """Grouped-query attention with two query heads per key is batched by `jax.vmap`, and its examples are sharded."""

    def attend(q, k, v):
        seen = jax.nn.softmax(jnp.einsum("bqghd,bkgd->bghqk", q, k))
        return jnp.einsum("bghqk,bkgd->bqghd", seen, v)

    attention = jax.vmap(jls.in_half(attend))
    shapes = (2, 8, 4, 3, 2, 4), (2, 8, 4, 3, 4), (2, 8, 4, 3, 4)
    q, k, v = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
    mesh = mesh_of(axis_type)
    with set_mesh(mesh):
        q, k, v = (jax.device_put(each, NamedSharding(mesh, P(None, "data"))) for each in (q, k, v))

        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v)))

        half = jls.autocast(loss)
        assert set(matmul_dtypes(half, q, k, v)) == {"float16"}
        compiled = jax.jit(jax.grad(half, argnums=(0, 1, 2))).lower(q, k, v).compile()
        assert not collectives(compiled)
        assert distance(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v), compiled(q, k, v)) < 4e-3


def test_sharding_constraint_is_kept():
    mesh = mesh_of()

    def constrained(w, x):
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P(None, "data")))
        return jnp.mean((y @ w) ** 2)

    eqns = equations(jax.make_jaxpr(jls.autocast(constrained))(W, X))
    found = [eqn.params["sharding"].spec for eqn in eqns if eqn.primitive.name == "sharding_constraint"]
    assert found == [P(None, "data")]
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    half = jax.jit(jax.grad(jls.autocast(constrained)))(W, x)
    assert distance(jax.grad(constrained)(W, X), half) < 4e-3


def matmul_with_row_sums(w, x):
    return x @ w, jnp.sum(x @ w, axis=1)


def its_backward_rule(residuals, cotangents):
    (w, x), cotangent = residuals, cotangents[0] + cotangents[1][:, None]
    return x.T @ cotangent, cotangent @ w.T


def skip_connections(w, x):
    for _ in range(2):
        x = jax.nn.relu(x + jnp.tanh(x @ w))
    return x @ w


def with_an_unused_result(w, x):
    function = jax.custom_vjp(matmul_with_row_sums)
    function.defvjp(lambda w, x: (matmul_with_row_sums(w, x), (w, x)), its_backward_rule)
    return function(w, x)[0] ** 2


def with_a_relu(w, x):
    """The derivative of the relu contains names of mesh axes, which are only defined inside the `jax.shard_map`."""
    return jax.nn.relu(x @ w) @ w


@pytest.mark.parametrize("check_vma", slow_except([True], [True, False]))
@pytest.mark.parametrize("function", [with_a_relu, skip_connections, with_an_unused_result])
def test_gradients_of_functions_in_shard_map(function, check_vma):
    def shard(w, x):
        if check_vma and function is with_an_unused_result:  # Its backward rule does not sum over the mesh axis.
            w = pcast(w, "data", to="varying")
        return jax.lax.pmean(jnp.mean(function(w, x)), "data")

    loss = jax.shard_map(shard, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    half = jax.value_and_grad(jls.autocast(loss))
    assert set(matmul_dtypes(half, W, X)) == {"float16"}
    assert distance(jax.value_and_grad(loss)(W, X), jax.jit(half)(W, X)) < 4e-3
    if function is with_a_relu:  # A relu is a selection.
        assert set(result_dtypes(("max", "select_n"), half, W, X)) == {"float16"}


@pytest.mark.parametrize("is_differentiated", [False, True])
@pytest.mark.parametrize("check_vma", slow_except([True], [True, False]))
def test_custom_vjp_in_an_eager_shard_map_is_supported(is_differentiated, check_vma):
    """The forward rule calls the function itself, as in the documentation of JAX."""
    function = jax.custom_vjp(matmul_with_row_sums)
    function.defvjp(lambda w, x: (function(w, x), (w, x)), its_backward_rule)

    def results(around):
        def shard(w, x):
            w = pcast(w, "data", to="varying") if check_vma else w
            loss = around(lambda w, x: jnp.mean(function(w, x)[0] ** 2))
            value = jax.grad(loss)(w, x) if is_differentiated else loss(w, x)
            return jax.lax.pmean(value, "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.shard_map(shard, mesh=mesh_of(), **specs, check_vma=check_vma)(W, X)

    assert distance(results(lambda loss: loss), results(jls.autocast)) < 4e-3


def test_custom_vmap_in_shard_map_is_supported():
    function = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
    function.def_vmap(lambda axis_size, is_batched, w, x: (x @ w, True))

    def shard(w, x):
        rows = jax.vmap(jls.autocast(lambda w, x: function(w, x) @ w), (None, 0))(w, x)
        return jax.lax.pmean(jnp.mean(rows**2), "data")

    loss = jax.jit(jax.shard_map(shard, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P()))
    np.testing.assert_allclose(loss(W, X), jnp.mean((X @ W @ W) ** 2), rtol=4e-3)
