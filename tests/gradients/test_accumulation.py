"""`accumulate_gradients`: the gradients of the whole batch, one verdict and one move of the loss scale per window."""

import gc
import math
import warnings
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

import jax_lossscale as jls

NAN, INF = np.nan, np.inf
DROPS = ["window", "microbatch"]
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
    return jax.tree.map(lambda leaf: leaf[index::number], batch)


def with_bad_example(batch, index, value=INF):
    return {**batch, "x": batch["x"].at[index, 0].set(value)}


# The mean over all micro-batches is the whole batch.


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("number", [1, 2, 3, 24])
def test_the_window_is_the_whole_batch(number, drop, compiled):
    params, batch = make_params(), make_batch()
    function = jls.accumulate_gradients(loss_fn, SCALE, number, drop=drop)
    window = (jax.jit(function) if compiled else function)(params, batch)
    value, grads = VALUE_AND_GRAD(params, batch)
    np.testing.assert_allclose(window.value, value, rtol=1e-6)
    for name, whole in grads.items():
        np.testing.assert_allclose(np.asarray(window.grads[name]) / SCALE, whole, rtol=2e-6, atol=1e-6)
    assert (window.parts_finite, window.kept.sum(), window.aux) == (True, number, None)


def test_the_sum_is_made_in_float32_bit_for_bit():
    """The oracle is the loop, in the same order."""
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
def test_without_a_loss_scale_the_sum_is_made_in_float32_too(dtype):
    window = jls.accumulate_gradients(lambda w, x: jnp.mean(w * x), jls.NoOpLossScale(), 4096)(
        jnp.ones([], dtype), jnp.ones(4096, dtype)
    )
    assert (window.grads, window.grads.dtype) == (1.0, jnp.float32)


@pytest.mark.parametrize("exponent", [0, 15, 100, 126])
def test_no_scale_is_too_large_for_the_sum(exponent):
    """Scaled gradients just below the top of float32, of which two would not add up."""
    window = jls.accumulate_gradients(lambda w, x: jnp.mean(w * x), 2.0**exponent, 4)(
        jnp.float32(1.0), jnp.full(4, 1.5, jnp.float32)
    )
    assert window.grads == 1.5 * 2.0**exponent


def test_the_calling_convention():
    def fun(scale, params, batch, extra, *, offset):
        residual = params["w"] * batch["x"] * scale + offset + extra
        return jnp.mean(residual**2), {"mean": residual.mean()}

    window = jls.accumulate_gradients(fun, 8.0, 2, argnums=(1, 0), batch_argnums=(2,), has_aux=True)(
        2.0, {"w": 3.0}, {"x": jnp.arange(4.0)}, 1.0, offset=0.5
    )
    expected = jax.grad(fun, argnums=(1, 0), has_aux=True)(2.0, {"w": 3.0}, {"x": jnp.arange(4.0)}, 1.0, offset=0.5)[0]
    jax.tree.map(lambda ours, whole: np.testing.assert_allclose(ours / 8, whole, rtol=1e-6), window.grads, expected)
    np.testing.assert_allclose(window.aux["mean"], [6 * 1 + 1.5, 6 * 2 + 1.5])  # of examples 0 and 2, of 1 and 3


def test_several_arguments_may_be_the_batch_and_random_keys_may_be_among_them():
    def fun(w, x, keys):
        return jnp.mean(w * x * jax.vmap(jax.random.uniform)(keys))

    x, keys = jnp.arange(6.0), jax.random.split(jax.random.key(3), 6)
    window = jls.accumulate_gradients(fun, 4.0, 3, batch_argnums=(1, 2))(2.0, x, keys)
    np.testing.assert_allclose(window.grads / 4, jax.grad(fun)(2.0, x, keys), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("argnums", [0, (0,), (0, 2)])
def test_integers_have_float0_gradients(argnums, compiled):
    def fun(params, x, steps):
        return jnp.mean(params["w"] * x) * params["n"] * steps["m"]

    args = {"w": jnp.float32(3.0), "n": jnp.int32(2)}, jnp.arange(4.0), {"m": jnp.arange(1), "none": None}
    function = jls.accumulate_gradients(lambda *args: fun(*args).sum(), 8.0, 2, argnums=argnums, allow_int=True)
    window = (jax.jit(function) if compiled else function)(*args)
    expected = jax.grad(lambda *args: 8 * fun(*args).sum(), argnums, allow_int=True)(*args)
    assert jax.tree.structure(window.grads) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(window.grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    with pytest.raises(TypeError, match="int"):
        jls.accumulate_gradients(fun, 8.0, 2)(*args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize(
    ("loss_scale", "drop"),
    [(8, "window"), (jls.DynamicLossScale(8), "microbatch"), (jls.NoOpLossScale(), "window")],
    ids=["number", "dynamic", "none"],
)
def test_strict_promotion(loss_scale, dtype, drop):
    def fun(w, x):
        return jnp.mean(jnp.abs(w * x) ** 2).astype("float32" if dtype != "float64" else dtype)

    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        w, x = jnp.ones([], dtype), jnp.ones(4, dtype)
        window = jls.accumulate_gradients(fun, loss_scale, 2, drop=drop)(w, x)
        assert (window.value, window.grads / float(jls.get(loss_scale)())) == (1, 2)
        assert window.grads.dtype == ("float32" if dtype in ("float16", "bfloat16") else dtype)


@pytest.mark.parametrize(
    ("loss_scale", "warns"),
    [(2.0**17, 1), (8.0, 0), (jls.DynamicLossScale(8), 1), (jls.FixedLossScale(2.0**17), 1)],
    ids=["large number", "small number", "dynamic", "fixed"],
)
def test_a_float16_loss_is_warned_of_where_the_scale_is_known_to_pass_it(loss_scale, warns):
    def fun(w, x):
        return jnp.mean(w * x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jls.accumulate_gradients(fun, loss_scale, 2)(jnp.float16(1), jnp.ones(4, jnp.float16))
    assert ["The loss is float16" in str(warning.message) for warning in caught] == [True] * warns


# Called outside `jax.jit`.


def squares_times(factor):
    return lambda w, x: factor * jnp.mean((w * x) ** 2)


class Model:
    """One object, whose attribute changes between calls."""

    factor = 1.0

    def __call__(self, w, x):
        return squares_times(self.factor)(w, x)


MODEL = Model()
FACTOR = 1.0


def with_global(w, x):
    return squares_times(FACTOR)(w, x)


def rebound():
    """A function that names a variable of its surroundings, and one that binds this anew."""
    factor = 1.0

    def function(w, x):
        return squares_times(factor)(w, x)

    def bind(value):
        nonlocal factor
        factor = value

    return function, bind


CLOSURE, BIND = rebound()
CHANGING = {
    "object": (MODEL, partial(setattr, MODEL, "factor")),
    "partial of an object": (partial(MODEL), partial(setattr, MODEL, "factor")),
    "bound method": (MODEL.__call__, partial(setattr, MODEL, "factor")),
    "closure": (CLOSURE, BIND),
    "global": (with_global, lambda value: globals().update(FACTOR=value)),
}


@pytest.mark.parametrize(("fun", "change"), CHANGING.values(), ids=CHANGING)
def test_each_eager_call_sees_what_the_function_refers_to(fun, change):
    values = []
    for factor in 1.0, 2.0, 4.0:
        change(factor)
        values.append(float(jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.5), jnp.arange(4.0)).value))
    assert values == [7.875, 15.75, 31.5]


def test_numpy_scalars_may_steer_python_code():
    def fun(w, x, power, *, flag):
        assert type(power) is np.int64
        return jnp.mean(w * x) ** power * (3 if flag else 1)

    window = jls.accumulate_gradients(fun, 8.0, 2)(np.float32(1), np.ones(4, np.float32), np.int64(2), flag=np.True_)
    assert window.grads / 8 == 6


def test_nothing_is_kept_of_what_was_called_eagerly():
    class Function:
        def __call__(self, w, x):
            return jnp.mean(w * x)

    def called():
        fun = Function()
        jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.0), jnp.ones(4))
        return weakref.ref(fun)

    functions = [called() for _ in range(3)]
    gc.collect()
    assert [function() for function in functions] == [None] * 3


def test_what_steers_python_code_stays_what_it_is():
    def fun(w, x, power, *, name, flag):
        assert type(flag) in (bool, int)
        return jnp.mean(w * x) ** power * (3 if flag is True else 1) * len(name)

    def grads(*args, **kwargs):
        return jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.0), jnp.ones(4), *args, **kwargs).grads / 8

    assert grads(2, name="ab", flag=True) == 12
    assert grads(2, name="ab", flag=1) == 4  # equal to True, and something else
    assert grads(3, name="a", flag=True) == 9


def test_an_array_of_objects_is_handed_on():
    def fun(w, x, names):
        return jnp.mean(w * x) * len(names[0])

    names = np.array(["abc"], object)
    assert jls.accumulate_gradients(fun, 8.0, 2)(np.float32(1), np.ones(4, np.float32), names).value == 3


def test_a_function_may_name_what_is_assigned_later():
    def fun(w, x, late):
        return jnp.mean(w * x) * (assigned_later if late else 1)

    def value(late):
        return float(jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1), jnp.ones(4), late).value)

    assert value(False) == 1
    assigned_later = 3
    assert value(True) == 3


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (complex(0.0, 0.0), complex(0.0, -0.0))], ids=repr)
def test_zeros_of_different_signs_are_different_arguments(zeros):
    def sign(zero):
        return math.copysign(1.0, zero.imag if isinstance(zero, complex) else zero)

    def fun(w, x, zero):
        return jnp.mean(w * x) * sign(zero)

    window = jls.accumulate_gradients(fun, 8.0, 2)
    assert [window(jnp.float32(1.0), jnp.ones(4), zero).grads / 8 for zero in zeros] == [1, -1]


@pytest.mark.parametrize("dtype", [jnp.float32, np.float32, np.dtype(np.float32), "float32"], ids=repr)
def test_a_dtype_may_be_among_the_arguments(dtype):
    def fun(w, x, dtype, *, other):
        return jnp.mean(w * x.astype(dtype).astype(other))

    window = jls.accumulate_gradients(fun, 8.0, 2)
    assert window(jnp.float32(1.0), jnp.ones(4, jnp.float16), dtype, other=dtype).grads == 8


class Unhashable:
    __hash__ = None

    def __call__(self, w, x):
        return jnp.mean(w * x)


FUNCTIONS = {
    "unhashable": Unhashable(),
    "partial": partial(lambda factor, w, x: factor * jnp.mean(w * x), 1.0),
    "partial of an array": partial(lambda factor, w, x: factor * jnp.mean(w * x), jnp.float32(1.0)),
    "jitted": jax.jit(lambda w, x: jnp.mean(w * x)),
    "bound method": Unhashable().__call__,
}


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_whatever_can_be_called_is_welcome(fun):
    for _ in range(2):
        assert jls.accumulate_gradients(fun, 8.0, 2)(jnp.float32(1.0), jnp.ones(4)).grads == 8.0


@pytest.mark.ci
def test_a_function_may_close_over_what_is_traced():
    x = jnp.arange(4.0)

    def mean_gradient(factor):
        fun = lambda w, x: factor * jnp.mean(w * x)  # noqa: E731
        partially = partial(lambda factor, w, x: factor * jnp.mean(w * x), factor)
        window, other = (jls.accumulate_gradients(f, 8.0, 2)(jnp.float32(1.0), x) for f in (fun, partially))
        return window.grads + other.grads

    with jax.checking_leaks():
        assert jax.jit(jax.grad(mean_gradient))(2.0) == 2 * 8 * 1.5
        assert jax.jit(mean_gradient)(2.0) == 4 * 8 * 1.5


# What a bad micro-batch costs.


def test_dropping_the_window_leaves_it_to_update():
    params, batch = make_params(), with_bad_example(make_batch(), 5)
    tx = jls.loss_scaled(optax.adam(0.1), "dynamic")
    state = tx.init(params)
    window = jls.accumulate_gradients(loss_fn, state, 4)(params, batch)
    assert not window.parts_finite
    after, after_state = tx.update_and_apply(window.grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert (after_state.loss_scale(), after_state.skipped_steps) == (2.0**14, 1)


# One bad example: 5 is in micro-batch 1 of 4.
BAD_EXAMPLES = {
    # value of the example: does the loss scale go down?
    "an overflow of the gradients alone": ("overflow", True),
    "a loss that is not finite": (NAN, False),
}


def overflowing_loss(params, batch):
    """The loss is finite; its gradients are not where a flag says so."""
    loss = loss_fn(params, {"x": batch["x"], "y": batch["y"]})
    return loss + jax.lax.cond(batch["flag"].any(), _infinite_gradient, lambda w: 0.0, params["out"].sum())


@jax.custom_vjp
def _infinite_gradient(w):
    return 0.0 * w


_infinite_gradient.defvjp(lambda w: (0.0 * w, None), lambda _, cotangent: (cotangent * INF,))


@pytest.mark.parametrize(("bad", "backs_off"), BAD_EXAMPLES.values(), ids=BAD_EXAMPLES)
def test_dropping_a_microbatch_takes_the_mean_over_the_others(bad, backs_off):
    params, batch = make_params(), {**make_batch(), "flag": jnp.zeros(24, bool)}
    good = [microbatch(batch, index, 4) for index in (0, 2, 3)]
    if bad == "overflow":
        batch["flag"] = batch["flag"].at[5].set(True)
    else:
        batch = with_bad_example(batch, 5, bad)
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(SCALE, increment_period=1))
    state = tx.init(params)
    window = jax.jit(
        lambda state: jls.accumulate_gradients(overflowing_loss, state, 4, drop="microbatch")(params, batch)
    )(state)
    assert (window.kept.sum(), window.parts_finite) == (3, not backs_off)

    values, grads = zip(*(VALUE_AND_GRAD(params, kept) for kept in good), strict=True)
    if bad != "overflow":  # a loss that is finite counts, though its gradients were dropped
        np.testing.assert_allclose(window.value, np.mean(values), rtol=1e-6)
    assert np.isfinite(window.value)
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 3, *grads)
    jax.tree.map(
        lambda ours, mean: np.testing.assert_allclose(ours / SCALE, mean, rtol=2e-6, atol=1e-6), window.grads, expected
    )
    after, after_state = tx.update_and_apply(
        window.grads, state, params, value=window.value, parts_finite=window.parts_finite
    )
    assert after_state.applied_steps == 1
    assert after_state.loss_scale() == (SCALE / 2 if backs_off else SCALE * 2)
    assert after_state.grads_finite == (not backs_off)
    assert not (after["out"] == params["out"]).all()


def test_a_loss_that_is_not_finite_costs_its_microbatch_though_its_gradients_are():
    def loss_of_examples(w, x):
        return jnp.mean(w * x) + jnp.where(x.max() > 10, INF, 0.0)  # infinite, and constant

    window = jls.accumulate_gradients(loss_of_examples, SCALE, 2, drop="microbatch")(
        1.0, jnp.array([1.0, 20.0, 3.0, 4.0])
    )
    assert (window.kept.sum(), window.value, window.grads / SCALE, window.parts_finite) == (1, 2.0, 2.0, True)


def test_where_all_are_bad_the_window_is_skipped():
    params, batch = make_params(), {**make_batch(), "flag": jnp.ones(24, bool)}
    tx = jls.loss_scaled(optax.sgd(0.1), "dynamic")
    state = tx.init(params)
    for spoiled, scale in (batch, 2.0**14), ({**batch, "x": batch["x"] * NAN}, 2.0**15):
        window = jls.accumulate_gradients(overflowing_loss, state, 4, drop="microbatch")(params, spoiled)
        assert window.kept.sum() == 0
        after, after_state = tx.update_and_apply(
            window.grads, state, params, value=window.value, parts_finite=window.parts_finite
        )
        jax.tree.map(np.testing.assert_array_equal, after, params)
        assert (after_state.skipped_steps, after_state.loss_scale()) == (1, scale)


def test_a_window_moves_the_scale_once():
    params, batch = make_params(), make_batch()
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(SCALE, increment_period=3))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        window = jls.accumulate_gradients(loss_fn, state, 4, drop="microbatch")(params, batch)
        return tx.update_and_apply(window.grads, state, params, value=window.value, parts_finite=window.parts_finite)

    scales = []
    for _ in range(4):
        params, state = step(params, state)
        scales.append(float(state.loss_scale()))
    assert scales == [SCALE, SCALE, 2 * SCALE, 2 * SCALE]
    assert state.applied_steps == 4


# `parts_finite` of `update`: the table of `loss_scaled`, with a column more.

VERDICTS = {
    # gradients, parts finite, loss, skip_if: applied, scale (of 8; doubles on a good step)
    "all good": (1.0, True, 1.0, False, True, 16.0),
    "a part was dropped": (1.0, False, 1.0, False, True, 4.0),
    "all were bad": (NAN, False, 1.0, False, False, 4.0),
    "bad, and not told": (NAN, True, 1.0, False, False, 4.0),
    "a part was dropped, the loss is bad": (1.0, False, NAN, False, False, 8.0),
    "a part was dropped, and skipped on condition": (1.0, False, 1.0, True, False, 4.0),
    "skipped on condition": (1.0, True, 1.0, True, False, 8.0),
}


@pytest.mark.parametrize("method", ["update", "update_and_apply"])
@pytest.mark.parametrize(("grad", "parts", "value", "skip_if", "applied", "scale"), VERDICTS.values(), ids=VERDICTS)
def test_a_dropped_part_lowers_the_scale_of_a_step_that_is_applied(grad, parts, value, skip_if, applied, scale, method):
    tx = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(8.0, 1))
    params = jnp.float32(1.0)
    _, state = getattr(tx, method)(
        jnp.float32(grad), tx.init(params), params, value=value, skip_if=skip_if, parts_finite=jnp.array(parts)
    )
    assert (state.applied_steps, state.loss_scale()) == (int(applied), scale)
    assert state.grads_finite == (parts and np.isfinite(grad))


def test_without_a_loss_scale_nothing_is_checked():
    tx = jls.loss_scaled(optax.sgd(0.1), None)
    _, state = tx.update(jnp.float32(1.0), tx.init(jnp.float32(1.0)), parts_finite=False)
    assert (state.applied_steps, state.grads_finite) == (1, True)


def test_explain_tells_of_a_dropped_microbatch():
    tx = jls.loss_scaled(optax.sgd(0.1), "dynamic")
    _, state = tx.update(jnp.float32(1.0), tx.init(jnp.float32(1.0)), parts_finite=False)
    assert "a micro-batch overflowed, and was left out" in jls.diagnostics.explain(state)


# On many devices.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_batch_sharded_over_devices_is_used_where_it_lies(axis_type):
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
    assert window.parts_finite


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_under_shard_map_the_devices_agree_which_microbatches_are_kept(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, batch = make_params(), with_bad_example(make_batch(32), 5, NAN)  # device 1, its micro-batch 1 of 4

    def local(params, batch):
        if check_vma:
            params = pcast(params, "data", to="varying")  # or jax would sum the gradients itself
        window = jls.accumulate_gradients(loss_fn, SCALE, 4, drop="microbatch", axis_name="data")(params, batch)
        return jax.lax.pmean(window.grads, "data"), window.kept.sum()[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")), check_vma=check_vma)
    grads, kept = jax.jit(mapped)(params, batch)
    assert kept.tolist() == [3] * 8
    good = jax.tree.map(lambda leaf: jnp.delete(leaf, jnp.arange(1, 32, 4), axis=0), batch)
    for name, expected in VALUE_AND_GRAD(params, good)[1].items():
        np.testing.assert_allclose(grads[name] / SCALE, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drop", DROPS)
def test_under_shard_map_over_some_axes_of_a_mesh(drop):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, batch = make_params(), make_batch(32)

    def local(params, batch):
        params = pcast(params, "data", to="varying")
        window = jls.accumulate_gradients(loss_fn, SCALE, 4, drop=drop, axis_name="data")(params, batch)
        return jax.lax.pmean(window.grads, "data")

    with set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
        grads = jax.jit(mapped)(params, batch)
    for name, expected in VALUE_AND_GRAD(params, batch)[1].items():
        np.testing.assert_allclose(grads[name] / SCALE, expected, rtol=1e-5, atol=1e-5)


# Bad input.

BATCH = {"x": jnp.ones((6, 4)), "y": jnp.ones((6, 1))}
REFUSED = {
    "no integer": ({"num_microbatches": 2.5}, (BATCH,), "num_microbatches.*2.5"),
    "a bool": ({"num_microbatches": True}, (BATCH,), "num_microbatches.*True"),
    "none": ({"num_microbatches": 0}, (BATCH,), "num_microbatches.*0"),
    "drop": ({"drop": "both"}, (BATCH,), "drop.*'both'"),
    "no loss scale": ({"loss_scale": "dynamic"}, (BATCH,), r"accumulate_gradients\(loss_scale=...\).*'dynamic'"),
    "uneven": ({"num_microbatches": 4}, (BATCH,), "must divide the 6 examples"),
    "empty": ({}, ({"x": jnp.ones((0, 4)), "y": jnp.ones((0, 1))},), "must divide the 0 examples"),
    "different sizes": ({}, ({"x": jnp.ones((6, 4)), "y": jnp.ones((4, 1))},), "same number of examples"),
    "a scalar": ({}, ({"x": jnp.ones((6, 4)), "y": 1.0},), "same number of examples"),
    "no arrays": ({}, (None,), "same number of examples"),
    "differentiated and split": ({"argnums": (0, 1)}, (BATCH,), "have arguments in common"),
    "differentiated and split, from the end": ({"argnums": -1}, (BATCH,), "have arguments in common"),
    "split, from the end, and differentiated": (
        {"argnums": 1, "batch_argnums": -1},
        (BATCH,),
        "have arguments in common",
    ),
    "no such argument": ({"batch_argnums": 3}, (BATCH,), "Pass the batch by position"),
}


@pytest.mark.parametrize(("options", "batch", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_by_name(options, batch, message):
    options = {"loss_scale": 8.0, "num_microbatches": 2} | options
    with pytest.raises(ValueError, match=message):
        jls.accumulate_gradients(loss_fn, **options)(make_params(), *batch)


@pytest.mark.parametrize(
    ("argnums", "message"),
    [
        ({"argnums": 5}, r"argnums=5\)` names arguments that were not given: .* 2 positional"),
        ({"argnums": (0, -3)}, r"argnums=\(0, -3\)\)` names arguments that were not given"),
        ({"argnums": "x"}, r"argnums=...\)` must be an integer.*'x'"),
        ({"batch_argnums": 1.0}, r"batch_argnums=...\)` must be an integer.*1.0"),
    ],
    ids=str,
)
def test_argnums_of_nothing_are_refused_by_name(argnums, message):
    with pytest.raises(ValueError, match=message):
        jls.accumulate_gradients(loss_fn, 8.0, 2, **argnums)(make_params(), BATCH)


def separate_loss(params, x, y, *, weight=None):
    error = x @ params["hidden"] @ params["out"] - y
    return jnp.mean(error**2 if weight is None else weight * error**2)


def test_a_batch_in_two_arguments_of_which_one_stays_whole_is_told_of():
    params, batch = make_params(), make_batch(24)
    x, y = batch["x"], batch["y"]
    accumulate = jls.accumulate_gradients(separate_loss, 8.0, 4)
    with pytest.raises(ValueError, match=r"batch_argnums=1\)`.*leaves argument 2 whole, 24 along") as info:
        accumulate(params, x, y)
    assert isinstance(info.value.__cause__, TypeError)
    assert str(info.value.__cause__) in str(info.value)
    both = jls.accumulate_gradients(separate_loss, 8.0, 4, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match=r"leaves `weight=` whole"):
        both(params, x, y, weight=jnp.ones((24, 1)))
    assert both(params, x, y).kept.all()
    with pytest.raises(TypeError, match="incompatible shapes"):  # nothing is as long as the batch: the user's own error
        both(params, x, y, weight=jnp.ones((5, 1)))


@pytest.mark.parametrize("number", [2, 4])
def test_micro_batches_of_one_example_would_broadcast(number):
    params, batch = make_params(), make_batch(number)
    with pytest.warns(UserWarning, match="leaves argument 2 whole.*broadcasts") as caught:
        jls.accumulate_gradients(separate_loss, 8.0, number)(params, batch["x"], batch["y"])
    assert caught[0].filename == __file__


def test_a_batch_of_one_example_is_not_split():
    params, batch = make_params(), make_batch(1)
    assert jls.accumulate_gradients(separate_loss, 8.0, 1)(params, batch["x"], batch["y"]).kept.all()  # and no warning


def test_what_is_as_long_as_the_batch_by_chance_is_welcome():
    def fun(w, x, statistics):
        return jnp.mean(w * (x - statistics["mean"][None]))

    for number in (1, 2):
        window = jls.accumulate_gradients(fun, 8.0, number)(1.0, jnp.ones((4, 4)), {"mean": jnp.zeros(4)})
        assert window.grads == 8.0


def test_a_verdict_that_is_no_boolean_is_refused():
    tx = jls.loss_scaled(optax.sgd(0.1), "dynamic")
    with pytest.raises(ValueError, match=r"update\(parts_finite=...\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), parts_finite=jnp.array([True, True]))


def test_a_method_sees_what_its_object_holds_now():
    class Trainer:
        target = 0.0

        def loss(self, w, x):
            return jnp.mean((w * x - self.target) ** 2)

    trainer, x = Trainer(), jnp.ones(4)
    first = jls.accumulate_gradients(trainer.loss, 8.0, 2)(1.0, x)
    trainer.target = 1.0
    second = jls.accumulate_gradients(trainer.loss, 8.0, 2)(1.0, x)
    assert (first.value, second.value) == (1.0, 0.0)
