"""`accumulate_gradients`: gradients of the whole batch, with one finiteness check and one scale update per step."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, pcast, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kinds import assert_same_bits

import jax_lossscale as jls

NAN, INF = np.nan, np.inf
SCALE = 2.0**10


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


VALUE_AND_GRAD = jax.jit(jax.value_and_grad(loss_fn))


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(keys[0], (4, 8), dtype),
        "out": jax.random.normal(keys[1], (8, 1), dtype),
    }


def make_batch(size=24, dtype=jnp.float32):
    x = jax.random.normal(jax.random.key(1), (size, 4), dtype)
    return {"x": x, "y": jnp.sin(x.sum(axis=1, keepdims=True))}


def microbatch(batch, index, number):
    """Return the micro-batch that consists of every ``number``-th example, starting at ``index``."""
    return jax.tree.map(lambda leaf: leaf[index::number], batch)


# --- Comparison with the gradients of the whole batch ---


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("number", [1, 2, 3, 24])
def test_mean_over_microbatches_equals_the_whole_batch(number, compiled):
    params, batch = make_params(), make_batch()
    function = jls.accumulate_gradients(loss_fn, SCALE, number)
    window = (jax.jit(function) if compiled else function)(params, batch)
    value, grads = VALUE_AND_GRAD(params, batch)
    np.testing.assert_allclose(window.value, value, rtol=1e-6)
    for name, whole in grads.items():
        np.testing.assert_allclose(np.asarray(window.grads[name]) / SCALE, whole, rtol=2e-6, atol=1e-6)
    assert window.aux is None


def test_float16_gradients_are_summed_in_float32():
    """The reference is a Python loop that adds the micro-batches in the same order."""
    params, batch = make_params(jnp.float16), make_batch(16, jnp.float16)
    loss_scale = jls.FixedLossScale(SCALE)
    window = jls.accumulate_gradients(loss_fn, loss_scale, 4)(params, batch)
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    for index in range(4):
        scaled_grads = jax.jit(jls.scaled_grad(loss_fn, loss_scale))(params, microbatch(batch, index, 4))
        assert scaled_grads["out"].dtype == jnp.float16
        total = jax.tree.map(jnp.add, total, loss_scale.unscale(scaled_grads))
    for name, grads in window.grads.items():
        assert grads.dtype == jnp.float32
        np.testing.assert_array_equal(grads, total[name] / 4 * SCALE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_without_a_loss_scale_are_summed_in_float32(dtype):
    accumulated = jls.accumulate_gradients(lambda w, x: jnp.mean(w * x), jls.NoOpLossScale(), 4096)
    grads = accumulated(jnp.ones([], dtype), jnp.ones(4096, dtype)).grads
    assert (grads, grads.dtype) == (1.0, jnp.float32)


@pytest.mark.parametrize("exponent", [0, 15, 100, 126])
def test_sum_does_not_overflow_at_the_largest_scales(exponent):
    """The scaled gradients are just below the largest float32, so the sum of two of them would overflow."""
    accumulated = jls.accumulate_gradients(lambda w, x: jnp.mean(w * x), 2.0**exponent, 4)
    assert accumulated(jnp.float32(1.0), jnp.full(4, 1.5, jnp.float32)).grads == 1.5 * 2.0**exponent


def test_argnums_batch_argnums_aux_and_keyword_arguments():
    def fun(scale, params, batch, extra, *, offset):
        residual = params["w"] * batch["x"] * scale + offset + extra
        return jnp.mean(residual**2), {"mean": residual.mean()}

    args = 2.0, {"w": 3.0}, {"x": jnp.arange(4.0)}, 1.0
    accumulated = jls.accumulate_gradients(fun, 8.0, 2, argnums=(1, 0), batch_argnums=(2,), has_aux=True)
    window = accumulated(*args, offset=0.5)
    expected, _ = jax.grad(fun, argnums=(1, 0), has_aux=True)(*args, offset=0.5)
    jax.tree.map(lambda ours, whole: np.testing.assert_allclose(ours / 8, whole, rtol=1e-6), window.grads, expected)
    # The entries are means over examples 0 and 2, and over examples 1 and 3.
    np.testing.assert_allclose(window.aux["mean"], [6 * 1 + 1.5, 6 * 2 + 1.5])


def test_batch_may_consist_of_several_arguments_and_random_keys():
    def fun(w, x, keys):
        return jnp.mean(w * x * jax.vmap(jax.random.uniform)(keys))

    x, keys = jnp.arange(6.0), jax.random.split(jax.random.key(3), 6)
    window = jls.accumulate_gradients(fun, 4.0, 3, batch_argnums=(1, 2))(2.0, x, keys)
    np.testing.assert_allclose(window.grads / 4, jax.grad(fun)(2.0, x, keys), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("argnums", [0, (0,), (0, 2)])
def test_integer_leaves_have_float0_gradients(argnums, compiled):
    def fun(params, x, steps):
        return jnp.mean(params["w"] * x) * params["n"] * steps["m"]

    args = {"w": jnp.float32(3.0), "n": jnp.int32(2)}, jnp.arange(4.0), {"m": jnp.arange(1), "none": None}
    function = jls.accumulate_gradients(lambda *args: fun(*args).sum(), 8.0, 2, argnums=argnums, allow_int=True)
    window = (jax.jit(function) if compiled else function)(*args)
    expected = jax.grad(lambda *args: 8 * fun(*args).sum(), argnums, allow_int=True)(*args)
    assert_same_bits(window.grads, expected)
    with pytest.raises(TypeError, match="int"):
        jls.accumulate_gradients(fun, 8.0, 2)(*args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("loss_scale", [8, jls.DynamicLossScale(8), None], ids=["number", "dynamic", "none"])
def test_accumulation_under_strict_promotion(loss_scale, dtype):
    def fun(w, x):
        return jnp.mean(jnp.abs(w * x) ** 2).astype("float32" if dtype != "float64" else dtype)

    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        w, x = jnp.ones([], dtype), jnp.ones(4, dtype)
        window = jls.accumulate_gradients(fun, loss_scale, 2)(w, x)
        assert (window.value, window.grads / float(jls.get(loss_scale)())) == (1, 2)
        assert window.grads.dtype == ("float32" if dtype in ("float16", "bfloat16") else dtype)


# --- Eager calls, outside `jax.jit` ---


class Scaled:
    """An unhashable callable object whose attribute `factor` changes between calls."""

    __hash__ = None
    factor = 1.0

    def __call__(self, w, x):
        return self.factor * jnp.mean(w * x)


@pytest.mark.parametrize("kind", [lambda fun: fun, partial, lambda fun: fun.__call__])
def test_eager_calls_use_the_current_attributes_of_the_function(kind):
    scaled = Scaled()
    for factor in 1.0, 2.0, 4.0:
        scaled.factor = factor
        window = jls.accumulate_gradients(kind(scaled), 8.0, 2)(jnp.float32(1.0), jnp.ones(4))
        assert (window.value, window.grads) == (factor, 8 * factor)


def test_eager_calls_keep_no_reference_to_the_function():
    def called():
        fun = Scaled()
        jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.0), jnp.ones(4))
        return weakref.ref(fun)

    functions = [called() for _ in range(3)]
    gc.collect()
    assert [function() for function in functions] == [None] * 3


STEERING = [2, True, np.True_, np.int64(2), "ab", np.dtype(np.float32), np.array([len], object)]


@pytest.mark.parametrize("steer", STEERING, ids=repr)
def test_arguments_outside_the_batch_are_passed_unchanged(steer):
    def fun(w, x, argument, *, named):
        assert argument is steer
        assert named is steer
        return jnp.mean(w * x)

    assert jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.0), jnp.ones(4), steer, named=steer).grads == 8.0


@pytest.mark.ci
def test_function_may_close_over_tracers():
    def mean_gradient(factor):
        fun = jax.jit(lambda w, x: factor * jnp.mean(w * x))
        partially = partial(lambda factor, w, x: factor * jnp.mean(w * x), factor)
        window, other = (jls.accumulate_gradients(f, 8.0, 2)(jnp.float32(1.0), jnp.ones(4)) for f in (fun, partially))
        return window.grads + other.grads

    with jax.checking_leaks():
        assert jax.jit(jax.grad(mean_gradient))(2.0) == 2 * 8
        assert jax.jit(mean_gradient)(2.0) == 4 * 8


# --- A nonfinite micro-batch skips the whole step. Only nonfinite gradients lower the scale. ---


@pytest.mark.parametrize(
    ("spoil", "scale"),
    [({}, 2 * SCALE), ({"w": INF}, SCALE / 2), ({"x": NAN}, SCALE)],
    ids=["none", "grads", "loss"],
)
def test_nonfinite_microbatch_skips_the_step_and_adjusts_the_scale_once(spoil, scale):
    @jax.custom_vjp
    def times(w, x):
        return w * x

    # The gradient overflows in one example, although the loss of that example is finite.
    times.defvjp(lambda w, x: (w * x, x), lambda x, cotangent: (cotangent * jnp.where(x == 3, spoil.get("w", 1), 1), x))
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(SCALE, 1))
    params = jnp.float32(1.0)
    state = tx.init(params)
    batch = jnp.arange(8.0).at[5].set(spoil.get("x", 5.0))
    mean = jls.accumulate_gradients(lambda w, x: jnp.mean(jax.vmap(times, (None, 0))(w, x)), state, 4)(params, batch)
    after, after_state = tx.update_and_apply(mean.grads, state, params, value=mean.value)
    assert after_state.loss_scale() == scale
    assert (after_state.applied_steps, after_state.skipped_steps) == ((0, 1) if spoil else (1, 0))
    assert (after == params) == bool(spoil)


# --- Sharded batches ---


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_batch_is_not_gathered(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    params, batch = make_params(), make_batch(32)
    expected = jls.accumulate_gradients(loss_fn, SCALE, 4)(params, batch)
    with set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("data"))), batch)
        params = jax.device_put(params, NamedSharding(mesh, P()))
        compiled = jax.jit(jls.accumulate_gradients(loss_fn, SCALE, 4)).lower(params, placed).compile()
        text = compiled.as_text()
        assert not any(f" {gather}" in text for gather in ("all-gather", "all-to-all", "collective-permute"))
        window = compiled(params, placed)
    for name, grads in window.grads.items():
        np.testing.assert_allclose(grads, expected.grads[name], rtol=1e-5, atol=1e-3)


def test_shard_map_over_some_axes_of_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, batch = make_params(), make_batch(32)

    def local(params, batch):
        params = pcast(params, "data", to="varying")
        window = jls.accumulate_gradients(loss_fn, SCALE, 4)(params, batch)
        return jax.lax.pmean(window.grads, "data")

    with set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
        grads = jax.jit(mapped)(params, batch)
    for name, expected in VALUE_AND_GRAD(params, batch)[1].items():
        np.testing.assert_allclose(grads[name] / SCALE, expected, rtol=1e-5, atol=1e-5)


# --- Invalid arguments ---

BATCH = {"x": jnp.ones((6, 4)), "y": jnp.ones((6, 1))}
REFUSED = {
    "empty": ({}, ({"x": jnp.ones((0, 4)), "y": jnp.ones((0, 1))},), "got a batch of 0 examples"),
    "different sizes": ({}, ({"x": jnp.ones((6, 4)), "y": jnp.ones((4, 1))},), "same number of examples"),
    "a scalar": ({}, ({"x": jnp.ones((6, 4)), "y": 1.0},), "same number of examples"),
    "differentiated and split, from the end": ({"argnums": -1}, (BATCH,), "must not differentiate with respect to"),
    "split, from the end": ({"argnums": 1, "batch_argnums": -1}, (BATCH,), "must not differentiate with respect to"),
    "no such argument": ({"batch_argnums": 3}, (BATCH,), "Pass the batch"),
    "no such argument from the end": ({"argnums": (0, -3)}, (BATCH,), r"\(0, -3\)\)` refers to arguments that were"),
}


@pytest.mark.parametrize(("options", "batch", "message"), REFUSED.values(), ids=REFUSED)
def test_error_names_the_invalid_argument(options, batch, message):
    options = {"loss_scale": 8.0, "num_microbatches": 2} | options
    with pytest.raises(ValueError, match=message):
        jls.accumulate_gradients(loss_fn, **options)(make_params(), *batch)
