"""Invalid arguments raise a `ValueError` immediately. The message names the argument, its value and a fix.

This file contains the full text of each message. A new public function without a message here fails the test. Other
tests check that a configuration or a saved state can only build loss scales and has no other effect.
"""

import functools
import importlib.util
import inspect
import json
import pkgutil
import re
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_lossscale as jls
from jax_lossscale import diagnostics, interop, plotting

matplotlib.use("Agg")
# Each module requires the library after which it is named.
PEERS = [path.name for path in pkgutil.iter_modules(interop.__path__) if importlib.util.find_spec(path.name)]
MODULES = [jls, diagnostics, plotting, *(importlib.import_module(f"jax_lossscale.interop.{name}") for name in PEERS)]
PARAMS = jnp.ones(2)
TX = jls.loss_scaled(optax.sgd(0.1), "dynamic")
STATE = TX.init(PARAMS)
ADAM = jls.loss_scaled(optax.adam(0.1))
LOSS = jnp.float32(1)
DYNAMIC = jls.DynamicLossScale()
COMPILED = jax.jit


def square(x):
    return jnp.sum(x**2)


# Each call is followed by its message, either after an arrow or in the indented lines below the call.
REFUSED = """
jls.AutoLossScale(jax.random.key(0))
    `AutoLossScale(initial_loss_scale=...)` must be a number, got Array((), dtype=key<fry>) overlaying: [0 0].
jls.AutoLossScale(min_loss_scale=2.0**16)
    `AutoLossScale(initial_loss_scale=...)` must not be below `min_loss_scale` = 65536.0, got 256.0. Lower
    `min_loss_scale`.
jls.AutoLossScale().scale("x") -> `AutoLossScale.scale(tree=...)` must be a pytree of arrays, got 'x'.
jls.AutoLossScale().unscale("x") -> `AutoLossScale.unscale(tree=...)` must be a pytree of arrays, got 'x'.
jls.AutoLossScale().update("x") -> `AutoLossScale.update(grads=...)` must be a pytree of arrays, got 'x'.
jls.AutoLossScale().update(jnp.array(False))
    `AutoLossScale.update(grads=...)` must be the unscaled gradients, got Array(False, dtype=bool). To update the loss
    scale with a boolean, use `adjust`.
jls.AutoLossScale().adjust(1) -> `AutoLossScale.adjust(grads_finite=...)` must be a boolean scalar, got 1. REDUCE_IT
jls.AutoLossScale().adjust(True, largest="x") -> `AutoLossScale.adjust(largest=...)` must be a real scalar, got 'x'.
jls.AutoLossScale(log2_headroom=-1) -> `AutoLossScale(log2_headroom=...)` must be at least 0, got -1.
jls.AutoLossScale(log2_headroom=jnp.inf) -> `AutoLossScale(log2_headroom=...)` must be finite in float32, got inf.
jls.MixedPrecision(3)
    `MixedPrecision(optimizer=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got 3.
jls.MixedPrecision(optax.sgd(0.1), "fast") -> `MixedPrecision(loss_scale=...)` must be ACCEPTED; got 'fast'.
jls.MixedPrecision(optax.sgd(0.1), jnp.bfloat16)
    `MixedPrecision(loss_scale=...)` got the dtype <class 'jax.numpy.bfloat16'>. Pass it as `dtype=...`.
jls.MixedPrecision(optax.sgd(0.1), dtype=jnp.int8)
    `MixedPrecision(dtype=...)` must be float16, bfloat16 or float32 (which has no effect), got int8.
jls.MixedPrecision(optax.sgd(0.1), policy=3)
    `MixedPrecision(policy=...)` must be a `PrecisionPolicy` (such as `find_precision(...).policy`) or None, got 3.
jls.MixedPrecision(optax.sgd(0.1), skip="never")
    `MixedPrecision(skip=...)` must be 'auto', 'cond' or 'select', got 'never'.
jls.MixedPrecision(optax.sgd(0.1), record_bad_steps=3)
    `MixedPrecision(record_bad_steps=...)` must be True or False, got 3.
jls.MixedPrecision(optax.sgd(0.1), mesh=3) -> `MixedPrecision(mesh=...)` must be a `jax.sharding.Mesh` or None, got 3.
jls.MixedPrecision(optax.sgd(0.1)).loss(3)
    `MixedPrecision.loss(fun=...)` must be a function, got 3. Pass `mp.loss(loss_fn)` to the trainer instead of
    `mp.loss`.
jls.MixedPrecision(optax.sgd(0.1)).step(3) -> `MixedPrecision.step(train_step=...)` must be a function, got 3.
jls.cast_floating(PARAMS, jnp.float16, where="norm")
    `cast_floating(where=...)` must be a function, got 'norm'. The function receives the path and the leaf.
jls.DynamicLossScale(increment_period=0)
    `DynamicLossScale(increment_period=...)` must be at least 1 and fit in int32, got 0. To keep the scale fixed, use
    `FixedLossScale`.
jls.DynamicLossScale(max_loss_scale=4)
    `DynamicLossScale(initial_loss_scale=...)` must not be above `max_loss_scale` = 4.0, got 32768.0. Lower
    `initial_loss_scale`, or raise `max_loss_scale`.
jls.DynamicLossScale.from_config({"_rule_state": 1})
    `DynamicLossScale.from_config(config=...)` must contain the arguments of the constructor, got {'_rule_state': 1}:
    the state is not part of a configuration.
jls.DynamicLossScale().adjust(1)
    `DynamicLossScale.adjust(grads_finite=...)` must be a boolean scalar, got 1. REDUCE_IT
jls.DynamicLossScale().adjust({"kernel": PARAMS})
    `DynamicLossScale.adjust(grads_finite=...)` must be a boolean scalar, got PyTreeDef({'kernel': *}). REDUCE_IT
jls.DynamicLossScale(current_loss_scale=np.array([1, 0]))
    `DynamicLossScale(current_loss_scale=...)` must be a positive normal float32 (at least 1.18e-38), got np.int64(0).
jls.DynamicLossScale.from_config({"other": 1})
    `DynamicLossScale.from_config(config=...)` must contain the arguments of the constructor, got {'other': 1}:
    DynamicLossScale.__init__() got an unexpected keyword argument 'other'.
jls.FixedLossScale(0.5)
    `FixedLossScale(loss_scale_value=...)` must be at least 1, got 0.5. To disable scaling, use `NoOpLossScale`.
jls.PrecisionPolicy([{"precision": "float32", "layers": "a"}])
    `PrecisionPolicy(rules=...)` must contain `PrecisionRule` objects or dictionaries with their arguments, got
    {'precision': 'float32', 'layers': 'a'}: PrecisionRule.__init__() got an unexpected keyword argument 'layers'.
jls.PrecisionPolicy(rules=[3])
    `PrecisionPolicy(rules=...)` must contain `PrecisionRule` objects or dictionaries with their arguments, got 3:
    jax_lossscale._autocast.policy.PrecisionRule() argument after ** must be a mapping, not int.
jls.PrecisionPolicy(recompute=-1.0)
    `PrecisionPolicy(recompute=...)` must be True, False, or a positive number (the cost of saving a byte), got -1.0.
jls.PrecisionPolicy(rules=3)
    `PrecisionPolicy(rules=...)` must be a sequence of `PrecisionRule` objects, got 3. To pass a single rule, put it in
    a list.
jls.PrecisionPolicy({"precision": "float32"})
    `PrecisionPolicy(rules=...)` must be a sequence of `PrecisionRule` objects, got {'precision': 'float32'}. To pass a
    single rule, put it in a list.
jls.PrecisionPolicy(half_residual_stream=1) -> `PrecisionPolicy(half_residual_stream=...)` must be True or False, got 1.
jls.PrecisionRule("float32", layer="")
    `PrecisionRule(layer=...)` must be a pattern, such as 'a*', got ''. To match all operations, omit `layer`.
jls.PrecisionRule("float32", layer=3)
    `PrecisionRule(layer=...)` must be a pattern, such as 'a*', got 3. To match all operations, omit `layer`.
jls.accumulate_gradients(3, 8, 2) -> `accumulate_gradients(fun=...)` must be a function, got 3.
jls.accumulate_gradients(square, 8, 0)
    `accumulate_gradients(num_microbatches=...)` must be at least 1 and fit in int32, got 0. With `num_microbatches=1`,
    the batch is not split.
jls.accumulate_gradients(square, 8, 2, argnums=5)(PARAMS, PARAMS)
    `accumulate_gradients(argnums=(5,))` refers to arguments that were not passed: the function was called with 2
    positional arguments. Pass the batch and the differentiated arguments by position.
jls.accumulate_gradients(square, 8, 2, batch_argnums=0)(PARAMS)
    `accumulate_gradients(argnums=(0,), batch_argnums=(0,))` must not differentiate with respect to an argument
    that contains the batch, because such gradients cannot be summed over micro-batches. Use `value_and_scaled_grad`
    instead.
jls.accumulate_gradients(square, 8, 2)(PARAMS, jnp.ones(3))
    The number of examples must be a positive multiple of `accumulate_gradients(num_microbatches=2)`, got a batch of
    3 examples. Change the batch size, for example by omitting some examples.
jls.accumulate_gradients(square, 8, 2)(PARAMS, [])
    `accumulate_gradients` needs a batch of arrays with the same number of examples along their first axes, got
    ([],). Use `batch_argnums` to specify the arguments that contain the batch.
jls.autocast(3) -> `autocast(fun=...)` must be a function, got 3.
jls.autocast(None) -> `autocast(fun=...)` must be a function, got None.
jls.autocast(jnp.bfloat16, square)
    `autocast(fun=...)` must be a function, got the dtype <class 'jax.numpy.bfloat16'>. Call `autocast(fun, dtype)`, or
    use the decorator `@autocast(dtype=...)`.
jls.autocast(jnp.float8_e5m2)
    `autocast(dtype=...)` must be float16, bfloat16 or float32 (which has no effect), got float8_e5m2.
jls.autocast("cuda") -> `autocast(dtype=...)` must be a dtype, such as `jnp.float16`, got 'cuda'.
jls.autocast(dtype=jnp.bfloat16)(3) -> `autocast(fun=...)` must be a function, got 3.
jls.autocast(square, policy="fast")
    `autocast(policy=...)` must be a `PrecisionPolicy` (such as `find_precision(...).policy`) or None, got 'fast'.
jls.all_finite("x") -> `all_finite(tree=...)` must be a pytree of arrays, got 'x'.
jls.cast_floating(PARAMS, jnp.int32) -> `cast_floating(dtype=...)` must be a real floating dtype, got int32.
jls.cast_floating(PARAMS, {"kernel": PARAMS})
    `cast_floating(dtype=...)` must be a dtype, such as `jnp.float16`, got PyTreeDef({'kernel': *}).
jls.cast_floating(PARAMS, PARAMS) -> `cast_floating(dtype=...)` must be a dtype, such as `jnp.float16`, got float32[2].
jls.cast_floating("float16", PARAMS)
    `cast_floating(tree=...)` must be a pytree of arrays, got 'float16'. The order is `cast_floating(tree, dtype)`.
jls.cast_floating(jnp.dtype("float16"), {"kernel": PARAMS})
    `cast_floating(tree=...)` must be a pytree of arrays, got dtype('float16'). The order is `cast_floating(tree,
    dtype)`.
jls.get("other") -> `get(identifier=...)` must be ACCEPTED; got 'other'.
jls.get_loss_scale(STATE, path="nope")
    `get_loss_scale(opt_state=...)` must contain exactly one `LossScale` below the path 'nope', got 0. A `LossScale`
    exists at: .loss_scale. Pass a part of the state that contains only one `LossScale`, or pass a path to
    `get_loss_scale`.
jls.metrics(PARAMS) -> `metrics(opt_state=...)` STATE_EXPECTED; got float32[2].
diagnostics.explain(PARAMS) -> `explain(opt_state=...)` STATE_EXPECTED; got float32[2].
jls.in_half(3) -> `in_half(function=...)` must be a function, got 3.
diagnostics.in_precision(3, jnp.float32) -> `in_precision(fun=...)` must be a function, got 3.
jls.in_half(square, fallback=3) -> `in_half(fallback=...)` must be a function, got 3.
jls.keep_float32(3) -> `keep_float32(function=...)` must be a function, got 3.
jls.loss_scale_for(jnp.int32) -> `loss_scale_for(dtype=...)` must be float16, bfloat16, float32 or float64, got int32.
jls.loss_scaled(3) -> `loss_scaled(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got 3.
jls.loss_scaled({}) -> `loss_scaled(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got {}.
jls.loss_scaled(optax.sgd(0.1), skip="other")
    `loss_scaled(skip=...)` must be 'auto', 'cond' or 'select', got 'other'.
jls.loss_scaled(optax.sgd(0.1), record_bad_steps=1) -> `loss_scaled(record_bad_steps=...)` must be True or False, got 1.
jls.master_weights(3) -> `master_weights(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got 3.
jls.master_weights(optax.sgd(0.1)).update(PARAMS, (), PARAMS)
    `master_weights(...).update(state=...)` must be the state of this optimizer, got (). Pass the state that its `init`
    returned. The order is `update(grads, state, params)`.
jls.stochastic_rounding(3)
    `stochastic_rounding(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got 3.
jls.stochastic_rounding(optax.sgd(0.1), seed=-1)
    `stochastic_rounding(seed=...)` must be at least 0 and fit in int32, got -1.
jls.half_precision_state(3)
    `half_precision_state(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got 3.
jls.half_precision_state(optax.sgd(0.1), seed=0.5) -> `half_precision_state(seed=...)` must be an integer, got 0.5.
jls.half_precision_state(optax.sgd(0.1), exclude="nu")
    `half_precision_state(exclude=...)` must be a function, got 'nu'.
jls.float32_params(PARAMS, ())
    `float32_params(state=...)` must contain the state of a `master_weights` optimizer, got (). The order is
    `float32_params(params, state)`.
TX.update(PARAMS, STATE, PARAMS, value=jnp.ones(2))
    `update(value=...)` must be a real scalar, the unscaled loss, got float32[2]. If your loss function returns `(loss,
    aux)`, pass only `loss`.
TX.update(PARAMS, STATE, PARAMS, restore_from=PARAMS)
    `update(restore_from=...)` is supported only by `jax_lossscale.interop.flax.Optimizer`. To restore other values
    after a skipped step, use `select_tree(state.consecutive_skips == 0, new, old)`.
TX.update(PARAMS, STATE, PARAMS, grads_finite=1)
    `update(grads_finite=...)` must be a boolean scalar, got 1. REDUCE_IT
TX.update(PARAMS, STATE, PARAMS, skip_if=1) -> `update(skip_if=...)` must be a boolean scalar, got 1. REDUCE_IT
TX.update(PARAMS, STATE, PARAMS, skip_if=np.array("x"))
    `update(skip_if=...)` must be a boolean scalar, got array('x', dtype='<U1'). REDUCE_IT
TX.update(PARAMS, (), PARAMS)
    `update(state=...)` STATE_EXPECTED; got (). The order is `update(updates, state, params)`.
TX.update("x", STATE, PARAMS) -> `update(updates=...)` must be a pytree of arrays, got 'x'.
ADAM.update(((LOSS, {}), {"kernel": PARAMS}), ADAM.init({"kernel": PARAMS}), {"kernel": PARAMS})
    `update(updates=...)` must be the gradients, got a tuple of the value and the gradients. If you compute `value,
    grads = value_and_scaled_grad(...)(params)`, pass only `grads`.
TX.init(square) -> `init(params=...)` must be a pytree of arrays, got SQUARE.
TX.update_and_apply(STATE, PARAMS, PARAMS)
    `update_and_apply(state=...)` STATE_EXPECTED; got float32[2]. The order is `update_and_apply(scaled_grads, state,
    params)`.
TX.update_and_apply((LOSS, {"kernel": PARAMS}), STATE, {"kernel": PARAMS})
    `update_and_apply(scaled_grads=...)` must be the gradients, got a tuple of the value and the gradients. If you
    compute `value, grads = value_and_scaled_grad(...)(params)`, pass only `grads`.
TX.update_and_apply(PARAMS, STATE, "x") -> `update_and_apply(params=...)` must be a pytree of arrays, got 'x'.
TX.update_and_apply(PARAMS, STATE, None)
    `update_and_apply(params=...)` must be the parameters, got None. To compute updates without parameters, use
    `update`.
jls.raise_if_stuck(STATE, patience=0)
    `raise_if_stuck(patience=...)` must be at least 1 and fit in int32, got 0. `patience` is the number of consecutive
    skipped steps.
COMPILED(jls.raise_if_stuck)(STATE)
    `raise_if_stuck(opt_state=...)` got traced values, which are not known yet. Call this function outside `jax.jit`.
jls.scale_gradient(PARAMS, "8") -> `scale_gradient(scale=...)` must be ACCEPTED; got '8'.
jls.scale_gradient(square, 8)
    `scale_gradient(tree=...)` must be a pytree of arrays, got SQUARE. To scale the gradient of a function, apply
    `scale_gradient` to the result of the function.
jls.scaled_backward(3, 8) -> `scaled_backward(fun=...)` must be a function, got 3.
jls.scaled_grad(3, 8) -> `scaled_grad(fun=...)` must be a function, got 3.
jls.scaled_grad(square, True) -> `scaled_grad(loss_scale=...)` must be ACCEPTED; got True.
jls.scale_gradient(STATE, LOSS)
    `scale_gradient(tree=...)` got a loss scale. The order is `scale_gradient(tree, scale)`.
jls.unscale_gradient(STATE, LOSS)
    `unscale_gradient(tree=...)` got a loss scale. The order is `unscale_gradient(tree, scale)`.
jls.unscale_gradient(PARAMS, "8") -> `unscale_gradient(scale=...)` must be ACCEPTED; got '8'.
jls.unscale_gradient("x", 8) -> `unscale_gradient(tree=...)` must be a pytree of arrays, got 'x'.
jls.value_and_scaled_grad(None, 8) -> `value_and_scaled_grad(fun=...)` must be a function, got None.
jls.select_tree(True, {"a": PARAMS}, {"a": jnp.ones(3)})
    `select_tree` cannot select between ShapedArray(float32[2]) in on_true and ShapedArray(float32[3]) in on_false at
    "['a']". Arrays must have the same shape and dtype, and all other leaves must be equal.
jls.serialize(8) -> `serialize(loss_scale=...)` must be a `LossScale`, got 8.
diagnostics.autocast_report(None, PARAMS) -> `autocast_report(fun=...)` must be a function, got None.
diagnostics.compare_gradients(square, PARAMS, loss_scales=[0.0])
    `compare_gradients(loss_scales=...)` must be a sequence of positive finite numbers, got [0.0]. Omit this argument to
    use the default scales.
diagnostics.exponent_histogram(PARAMS, per_leaf=1) -> `exponent_histogram(per_leaf=...)` must be True or False, got 1.
diagnostics.exponent_histogram("x") -> `exponent_histogram(tree=...)` must be a pytree of arrays, got 'x'.
diagnostics.find_precision(square, PARAMS, tolerance=0)
    `find_precision(tolerance=...)` must be a number between 0 and 1, got 0.
diagnostics.in_precision(square, jnp.int32) -> `in_precision(dtype=...)` must be a real floating dtype, got int32.
diagnostics.lost_updates("x", PARAMS) -> `lost_updates(params=...)` must be a pytree of arrays, got 'x'.
diagnostics.nonfinite_report("x") -> `nonfinite_report(grads=...)` must be a pytree of arrays, got 'x'.
diagnostics.range_report(square, jax.ShapeDtypeStruct((2,), jnp.float32))
    `range_report(*args)` must contain arrays, because `range_report` runs `fun`; got a `jax.ShapeDtypeStruct`. If `fun`
    itself needs the `jax.ShapeDtypeStruct`, bind it to `fun` with `functools.partial`.
diagnostics.range_report(square, PARAMS, loss_scale="8") -> `range_report(loss_scale=...)` must be ACCEPTED; got '8'.
diagnostics.simulate(8, largest=[1.0])
    `simulate(loss_scale=...)` must be a `LossScale`, got 8. Create one with `jls.get`.
diagnostics.suggest_loss_scale(PARAMS, headroom=0.5) -> `suggest_loss_scale(headroom=...)` must be at least 1, got 0.5.
diagnostics.suggest_loss_scale("x") -> `suggest_loss_scale(grads=...)` must be a pytree of arrays, got 'x'.
diagnostics.underflow_fraction(PARAMS, dtype=jnp.int32)
    `underflow_fraction(dtype=...)` must be a real floating dtype, got int32.
diagnostics.underflow_fraction("x") -> `underflow_fraction(grads=...)` must be a pytree of arrays, got 'x'.
plotting.plot_exponents(PARAMS, yscale="other") -> `plot_exponents(yscale=...)` must be 'linear' or 'log', got 'other'.
plotting.plot_gradient_error(3)
    `plot_gradient_error(comparison=...)` must be the result of `jls.diagnostics.compare_gradients`, got int.
plotting.plot_loss_scale([1.0, 2.0], skipped=[True])
    `plot_loss_scale` needs sequences of equal length with one number per step, got the shapes {'loss_scale': (2,),
    'skipped': (1,)}. If a number was not measured, use NaN.
plotting.plot_run({})
    `plot_run(history=...)` must contain at least one of loss, loss_scale, skipped and underflow, got the keys [].
equinox.filter_value_and_scaled_grad(square, "other")
    `filter_value_and_scaled_grad(loss_scale=...)` must be ACCEPTED; got 'other'.
flax.register(3) -> `register(kind=...)` must be a subclass of `LossScale`, got 3.
"""
ACCEPTED = (
    "a number (`FixedLossScale`), 'dynamic' (`DynamicLossScale()`), 'auto' (`AutoLossScale()`), None "
    "(`NoOpLossScale`), a `LossScale`, or the dictionary that `serialize` returns"
)


def rows():
    """Yield each call together with its message, which may be spread over several lines."""
    for row in re.split(r"\n(?! )", REFUSED.strip()):
        call, message = re.split(r" -> |\n", row, maxsplit=1)
        yield call, " ".join(message.split())


STATE_EXPECTED = "must be or contain the state of an optimizer made with `loss_scaled`, such as `tx.init(params)`"
STANDS_FOR = {
    **{"ACCEPTED": ACCEPTED, "STATE_EXPECTED": STATE_EXPECTED, "SQUARE": repr(square)},
    "REDUCE_IT": "Reduce the value with `jnp.all` or `jnp.any`.",
}


def spelled_out(message):
    """Return the message with its placeholders replaced."""
    return functools.reduce(lambda text, word: text.replace(word, STANDS_FOR[word]), STANDS_FOR, message)


CALLS = {call: spelled_out(message) for call, message in rows()}
NAMES = dict(vars(jls), **globals()) | {name: sys.modules[f"jax_lossscale.interop.{name}"] for name in PEERS}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", CALLS)
def test_invalid_argument_raises_this_message(call):
    with pytest.raises(ValueError) as caught:
        eval(call, NAMES)
    assert str(caught.value) == CALLS[call]


@pytest.mark.parametrize("length", [199, 200, 201, 1000])
def test_error_shows_at_most_200_characters_of_a_value(length):
    value = "a" * (length - len("''"))
    shown = repr(value) if length <= 200 else f"{repr(value)[:200]}..."
    with pytest.raises(ValueError, match=re.escape(f"must be a number, got {shown}.") + "$"):
        jls.FixedLossScale(value)


# --- Objects that users pass instead of an optimizer state ---

TAKE_A_STATE = {
    "metrics(opt_state=...)": jls.metrics,
    "get_loss_scale(opt_state=...)": jls.get_loss_scale,
    "raise_if_stuck(opt_state=...)": jls.raise_if_stuck,
    "explain(opt_state=...)": diagnostics.explain,
    "value_and_scaled_grad(loss_scale=...)": lambda state: jls.value_and_scaled_grad(square, state),
    "scaled_grad(loss_scale=...)": lambda state: jls.scaled_grad(square, state),
    "scale_gradient(scale=...)": lambda state: jls.scale_gradient(LOSS, state),
    "unscale_gradient(scale=...)": lambda state: jls.unscale_gradient(LOSS, state),
    "scaled_backward(loss_scale=...)": lambda state: jls.scaled_backward(square, state),
    "accumulate_gradients(loss_scale=...)": lambda state: jls.accumulate_gradients(square, state, 2),
    "filter_value_and_scaled_grad(loss_scale=...)": lambda state: NAMES["equinox"].filter_value_and_scaled_grad(
        square, state
    ),
    "update(state=...)": lambda state: TX.update(PARAMS, state, PARAMS),
    "update_and_apply(state=...)": lambda state: TX.update_and_apply(PARAMS, state, PARAMS),
}
RESTORED = {"applied_steps": 0, "consecutive_skips": 0, "inner_state": [], "loss_scale": {"current_loss_scale": 8.0}}
NOT_A_STATE = {
    "the optimizer": (TX, "the optimizer itself. Pass `tx.init(params)`, or the state after the last step."),
    "another optimizer": (optax.sgd(0.1), "the optimizer itself. Pass `tx.init(params)`, or the state"),
    "an untargeted restore": ([RESTORED], "a dictionary, as stored in a checkpoint. Restore the checkpoint"),
    "the parameters": ({"kernel": PARAMS}, "PyTreeDef({'kernel': *})."),
    "an empty tree": ([], "[]."),
    "another state": (optax.scale_by_adam().init({"kernel": PARAMS}), "a `ScaleByAdamState`."),
    "a loss scale": (jls.FixedLossScale(8.0), "a `FixedLossScale`. Pass the optimizer state instead."),
}


@pytest.mark.parametrize("function", TAKE_A_STATE)
@pytest.mark.parametrize("wrong", NOT_A_STATE)
def test_error_describes_the_object_passed_instead_of_a_state(function, wrong):
    argument, got = NOT_A_STATE[wrong]
    if wrong == "a loss scale" and ("loss_scale" in function or "scale=" in function):
        TAKE_A_STATE[function](argument)  # A loss scale is accepted here.
        return
    with pytest.raises(ValueError) as caught:
        TAKE_A_STATE[function](argument)
    message = str(caught.value)
    assert message.startswith(f"`{function}` {STATE_EXPECTED}; got {got}"), message
    name = function.partition("(")[0]
    assert (f"The order is `{name}(" in message) == name.startswith("update")


# The constructors of these classes have no arguments, or are not called by users.
TAKE_NOTHING = {"NoOpLossScale", "LossScale", "PrecisionReport"}


def public_functions():
    for module in MODULES:
        conversions = [name for name in vars(module) if name.startswith(("from_", "to_")) and "peer" not in name]
        for name in getattr(module, "__all__", conversions):
            thing = getattr(module, name)
            is_kind = inspect.isclass(thing) and (issubclass(thing, jls.LossScale) or name.startswith("Precision"))
            if (is_kind or inspect.isfunction(thing)) and thing.__module__.startswith("jax_lossscale"):
                yield name


def test_every_public_function_has_an_error_message_here():
    refusing = {message.removeprefix("`").partition("(")[0].partition("`")[0] for message in CALLS.values()}
    assert set(public_functions()) - TAKE_NOTHING - refusing == set()


# --- Configurations from untrusted sources may only build loss scales ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([8, 2.0**15, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
OWN_KINDS = (jls.AutoLossScale, jls.DynamicLossScale, jls.FixedLossScale, jls.NoOpLossScale)
arguments_of_kinds = sorted({name for kind in OWN_KINDS for name in inspect.signature(kind).parameters})
names = st.sampled_from([*arguments_of_kinds, "__class__", "self", "cls", "skip", "eval", "__import__('os')"])
class_names = st.sampled_from([kind.__name__ for kind in OWN_KINDS]) | st.sampled_from(
    ["LossScale", "Popen", "os.system", "dict", "__main__.LossScale", "lambda: 0", "", "type"]
)
configs = st.fixed_dictionaries(
    {"class_name": class_names | json_values, "config": st.dictionaries(names, json_values, max_size=3) | json_values},
    optional={"state": json_values},
)


# Audit events of Python that no configuration may cause.
FORBIDDEN = {
    "compile",
    "exec",
    "import",
    "open",
    "os.system",
    "pickle.find_class",
    "socket.connect",
    "subprocess.Popen",
}
watched = []


def note_what_is_forbidden(event, _):
    if watched and event in FORBIDDEN:
        watched.append(event)


# An audit hook cannot be removed, so the hook here records events only while `watched` is not empty.
sys.addaudithook(note_what_is_forbidden)


def refused_or_a_loss_scale(build, given):
    """Check that ``build`` returns a valid built-in loss scale or raises a ValueError, without side effects."""
    watched[:] = ["begun"]
    try:
        built = build(given)
    except ValueError:
        built = None
    finally:
        seen, watched[:] = watched[1:], []
    assert seen == []
    if built is not None:
        assert type(built) in OWN_KINDS
        assert np.isfinite(built()).all()
        assert (np.asarray(built()) > 0).all()
        assert type(jls.get(json.loads(json.dumps(jls.serialize(built))))) is type(built)


def test_audit_hook_detects_eval():
    with pytest.raises(AssertionError, match="compile"):
        refused_or_a_loss_scale(lambda given: eval(given), "jls.get(8)")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(identifier=configs | json_values)
def test_get_only_builds_loss_scales(identifier):
    refused_or_a_loss_scale(jls.get, identifier)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(kind=st.sampled_from(OWN_KINDS), config=st.dictionaries(names, json_values, max_size=4) | json_values)
def test_from_config_only_builds_loss_scales(kind, config):
    refused_or_a_loss_scale(kind.from_config, config)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_flax_restores_corrupted_bytes_as_a_valid_loss_scale_or_raises(data):
    """The saved bytes are changed at random. A restored loss scale must have the configuration of the target."""
    target = jls.DynamicLossScale(8)
    saved = bytearray(flax.serialization.to_bytes(target))
    for position in data.draw(st.lists(st.integers(0, len(saved) - 1), min_size=1, max_size=3)):
        saved[position] = data.draw(st.integers(0, 255))
    try:
        restored = flax.serialization.from_bytes(target, bytes(saved))
    except Exception:  # flax raises many types of exceptions for invalid bytes.
        return
    assert type(restored) is jls.DynamicLossScale
    assert restored.get_config() == target.get_config()
