"""Behavior of ``flax.training.dynamic_scale.DynamicScale``."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P

from peers import cases

PARAMS = jnp.float32(1.0)


def adjusted(dynamic_scale, *factors):
    """Return the scale before the first step and after each step. The gradient of a step is one of ``factors``."""
    scales = [float(dynamic_scale.scale)]
    for factor in factors:
        dynamic_scale = dynamic_scale.value_and_grad(lambda p, factor=factor: factor * p)(PARAMS).dynamic_scale
        scales.append(float(dynamic_scale.scale))
    return scales


def growth():
    return cases.growth(adjusted(DynamicScale(growth_interval=cases.PERIOD, scale=1.0), *[1.0] * 4 * cases.PERIOD))


def floor():
    lower = DynamicScale(scale=1.0, minimum_scale=0.25)
    assert adjusted(lower, *[jnp.inf] * 5)[-1] == 0.25
    lowest = adjusted(DynamicScale(scale=2.0**-124), *[jnp.inf] * 5)[-1]
    return f"{cases.number(lowest)}, or `minimum_scale`"


def ceiling():
    return cases.number(adjusted(DynamicScale(growth_interval=0, scale=2.0**126), *[0.0] * 5)[-1])


def value():
    def results(dynamic_scale, dtype):
        for _ in range(2):
            result = dynamic_scale.value_and_grad(lambda p: (p.astype(jnp.float16) * 100).astype(dtype))(PARAMS)
            assert not result.finite
            yield result.aux
            dynamic_scale = result.dynamic_scale

    assert list(results(DynamicScale(), jnp.float32)) == [100, 100]
    first, second = results(DynamicScale(), jnp.float16)
    assert jnp.isnan(first)
    assert second == 100
    large = DynamicScale(scale=jnp.float32(2.0**127)).value_and_grad(lambda p: 4 * p)(PARAMS)
    assert jnp.isinf(large.aux)
    return "the true loss, or infinity if loss times scale overflows; on the first step, NaN if the loss is float16"


def unscaling():
    def unscaled(scale, factors):
        return DynamicScale(scale=scale).value_and_grad(lambda p: (factors * p).sum())(jnp.ones(4)).grad

    given = jnp.float32(cases.HIGHEST_POWER), jnp.ones(4)
    return cases.unscaled(unscaled(*given), jax.jit(unscaled)(*given))


def float16_gradients():
    scaled = DynamicScale(scale=jnp.float32(2.0**15))
    result = scaled.value_and_grad(lambda p: p * 2.0**-10 * 2.0**-10 * 2.0**-8)(jnp.float16(1.0))
    assert (result.grad, result.grad.dtype) == (2.0**-28, jnp.float32)
    return "unscaled in float32"


def arguments():
    def loss_fn(factor, params):
        return (factor * params) ** 2, "aux"

    result = DynamicScale().value_and_grad(loss_fn, argnums=1, has_aux=True)(3.0, PARAMS)
    assert (result.aux, result.grad) == ((9.0, "aux"), 18.0)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        DynamicScale().value_and_grad(lambda p, power: p**power)(PARAMS, power=2)
    return "`has_aux`, `argnums`"


def one_device():
    def step(dynamic_scale, factors):
        result = dynamic_scale.value_and_grad(lambda p: (factors * p).sum(), axis_name="x")(PARAMS)
        return result.finite[None], result.dynamic_scale.scale[None], result.grad[None]

    step = cases.on_four_devices(step, (P(), P("x")), check_vma=False)
    dynamic_scale = DynamicScale(scale=jnp.float32(2.0**15))
    finite, scale, _ = step(dynamic_scale, jnp.array([1.0, jnp.inf, 1.0, 1.0]))
    assert not finite.any()
    assert (scale == 2.0**14).all()
    assert (step(dynamic_scale, jnp.arange(4.0))[2] == 1.5).all()
    return "all skip (`axis_name`, which averages gradients)"


def compilations():
    def step(dynamic_scale):
        return dynamic_scale.value_and_grad(lambda p: p**2)(PARAMS).dynamic_scale

    return cases.compilations(jax.jit, step, DynamicScale())


def own_reasons():
    result = DynamicScale().value_and_grad(lambda p: p**2)(PARAMS)
    assert jnp.where(result.finite & False, PARAMS - result.grad, PARAMS) == PARAMS
    return "manually: `jnp.where`"


def which_layer():
    states = []
    for bad in "a", "b":
        factors = dict.fromkeys("ab", 1.0) | {bad: jnp.inf}
        gradient = DynamicScale().value_and_grad(lambda p, f=factors: f["a"] * p["a"] + f["b"] * p["b"])
        result = gradient(dict.fromkeys("ab", PARAMS))
        states.append((result.finite, result.dynamic_scale))
    return cases.which_layer(states)


def hysteresis():
    return cases.hysteresis(adjusted(DynamicScale(), *[jnp.inf] * 3))


def schedule():
    result = DynamicScale().value_and_grad(lambda p: jnp.inf * p)(PARAMS)
    return cases.schedule(partial(jax.tree.map, partial(jnp.where, result.finite)))
