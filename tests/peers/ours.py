"""Behavior of jax_lossscale."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from peers import cases

PARAMS = jnp.float32(1.0)


def after(tx, *scaled_grads, params=PARAMS, **options):
    """Return parameters and state after steps with the given scaled gradients."""
    state = tx.init(params)
    for scaled_grad in scaled_grads:
        params, state = tx.update_and_apply(scaled_grad, state, params, **options)
    return params, state


def growth():
    loss_scale = jls.DynamicLossScale(1.0, cases.PERIOD)
    scales = []
    for _ in range(4 * cases.PERIOD):
        loss_scale = loss_scale.adjust(True)
        scales.append(loss_scale())
    return cases.growth([1.0, *scales])


def lowest(**options):
    state = after(jls.loss_scaled(optax.sgd(1.0), jls.DynamicLossScale(4.0, **options)), *[jnp.float32(jnp.inf)] * 5)[1]
    return cases.number(state.loss_scale())


def floor():
    assert lowest(min_loss_scale=0.25) == "0.25"
    return f"{lowest()}, or `min_loss_scale`"


def highest(**options):
    loss_scale = jls.DynamicLossScale(2.0**126, 1, **options)
    for _ in range(3):
        loss_scale = loss_scale.adjust(True)
    return cases.number(loss_scale())


def ceiling():
    assert highest(max_loss_scale=2.0**126) == cases.number(2.0**126)
    return f"{highest()}, or `max_loss_scale`"


def value():
    def loss_fn(params, dtype):
        return (params.astype(jnp.float16) * 100).astype(dtype)

    for dtype in jnp.float32, jnp.float16:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ignore the warning that float16 cannot represent the scale.
            loss, grads = jls.value_and_scaled_grad(loss_fn, 2.0**16)(PARAMS, dtype)
        assert not jls.all_finite(grads)
        assert loss == 100
    return "the true loss"


def unscaling():
    loss_scale = jls.FixedLossScale(cases.HIGHEST_POWER)
    scaled = loss_scale.scale(jnp.ones(4))  # `scale` multiplies by at most 2^126.
    return cases.unscaled(loss_scale.unscale(scaled), jax.jit(loss_scale.unscale)(scaled))


def float16_gradients():
    unscaled = jls.DynamicLossScale().unscale(jnp.float16(1e-4))
    assert unscaled == jnp.float32(jnp.float16(1e-4)) / 2**15
    params, _ = after(jls.loss_scaled(optax.adam(0.125, eps=0.0)), jnp.float16(1e-4))
    assert (unscaled.dtype, params.dtype) == (jnp.float32, jnp.float32)
    assert abs(params - 0.875) < 1e-3
    return "unscaled in float32"


def arguments():
    def loss_fn(factor, params, *, power):
        return (factor * params) ** power, "aux"

    grad_fn = jls.value_and_scaled_grad(loss_fn, 8.0, argnums=1, has_aux=True)
    assert grad_fn(3.0, PARAMS, power=2) == ((9.0, "aux"), 8 * 18.0)
    return "all three"


def one_device():
    tx = jls.loss_scaled(optax.sgd(1.0), "dynamic", axis_name="x")
    params, mesh = jnp.zeros(4), jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(tx.update_and_apply, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=(P("x"), P()))
    params, state = jax.jit(step)(jnp.array([1.0, jnp.inf, 1.0, 1.0]), tx.init(params), params)
    assert (params == 0).all()
    assert state.loss_scale() == 2.0**14
    return "all skip (`axis_name`)"


def compilations():
    tx = jls.loss_scaled(optax.sgd(1.0))
    return cases.compilations(jax.jit, lambda state: tx.update(jnp.float32(1.0), state)[1], tx.init(PARAMS))


def own_reasons():
    for options in {"skip_if": jnp.array(True)}, {"value": jnp.float32(jnp.nan)}:
        params, state = after(jls.loss_scaled(optax.sgd(1.0), "dynamic"), jnp.float32(1.0), **options)
        assert (params, state.loss_scale(), state.skipped_steps) == (PARAMS, 2.0**15, 1)
    return "`skip_if`, `value`"


def which_layer():
    tx = jls.loss_scaled(optax.sgd(1.0), record_bad_steps=True)
    explanations = []
    for bad in "a", "b":
        params, state = after(
            tx, dict.fromkeys("ab", jnp.float32(1.0)) | {bad: jnp.float32(jnp.nan)}, params=dict.fromkeys("ab", PARAMS)
        )
        explanations.append(jls.diagnostics.explain(state, params))
        assert f"a NaN in the gradients, first in ['{bad}']" in explanations[-1]
    assert cases.which_layer(explanations) == "told"
    return "`record_bad_steps`, `explain`"


def hysteresis():
    for refill, expected in {"growth": [16, 8, 8, 4], "finite": [16, 8, 8, 8]}.items():
        loss_scale = jls.DynamicLossScale(16.0, hysteresis=2, hysteresis_refill=refill)
        scales = []
        for grads_finite in False, False, True, False:
            loss_scale = loss_scale.adjust(grads_finite)
            scales.append(loss_scale())
        assert scales == expected
    assert {field.name for field in dataclasses.fields(jls.DynamicLossScale)} >= {"hysteresis", "hysteresis_refill"}
    return "refilled when the scale grows, or on each finite step"


def schedule():
    inner = optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5}))
    params, _ = after(jls.loss_scaled(inner, jls.DynamicLossScale(1.0)), jnp.float32(jnp.inf), jnp.float32(1.0))
    assert params == PARAMS - 1.0
    return "does not advance"
