"""Behavior of jmp, used as its docstrings and its README recommend."""

from functools import partial

import jax
import jax.numpy as jnp
import jmp
from jax.sharding import PartitionSpec as P

from peers import cases

INF = jnp.float32(jnp.inf)
SCALE = jnp.float32(2.0**15)


def adjusted(loss_scale, *verdicts, adjust=lambda loss_scale, verdict: loss_scale.adjust(verdict)):
    """Return the scale before the first step and after each step."""
    scales = [float(loss_scale.loss_scale)]
    for verdict in verdicts:
        loss_scale = adjust(loss_scale, jnp.array(verdict))
        scales.append(float(loss_scale.loss_scale))
    return scales


def growth():
    loss_scale = jmp.DynamicLossScale(jnp.float32(1.0), period=cases.PERIOD)
    return cases.growth(adjusted(loss_scale, *[True] * 4 * cases.PERIOD))


def floor():
    assert adjusted(jmp.DynamicLossScale(SCALE), *[False] * 20)[-1] == 1.0
    lower = jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=jnp.float32(0.25))
    assert adjusted(lower, *[False] * 5)[-1] == 0.25
    jitted = jax.jit(lambda loss_scale, verdict: loss_scale.adjust(verdict))
    assert adjusted(lower, *[False] * 5, adjust=jitted)[-1] == 1.0
    return "1; a custom minimum is lost under `jit`"


def ceiling():
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**126), period=1)
    return cases.number(adjusted(loss_scale, *[True] * 3)[-1])


def value():
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**16))

    def scaled_loss_fn(params, dtype):
        return loss_scale.scale((params.astype(jnp.float16) * 100).astype(dtype))

    for dtype in jnp.float32, jnp.float16:
        scaled, grads = jax.value_and_grad(scaled_loss_fn)(jnp.float32(1.0), dtype)
        assert not jmp.all_finite(grads)
        assert scaled == 100 * 2.0**16
        assert loss_scale.unscale(scaled) == 100
    return "the scaled loss, which you must divide"


def unscaling():
    loss_scale = jmp.DynamicLossScale(jnp.float32(cases.HIGHEST_POWER))
    scaled = jnp.full(4, cases.HIGHEST_POWER)
    return cases.unscaled(loss_scale.unscale(scaled), jax.jit(loss_scale.unscale)(scaled))


def float16_gradients():
    strong = jmp.DynamicLossScale(SCALE).unscale(jnp.float16(1e-4))
    assert (strong.dtype, strong == jnp.float32(jnp.float16(1e-4)) / 2**15) == (jnp.float32, True)
    as_in_the_docstring = jmp.DynamicLossScale(jnp.asarray(2.0**15)).unscale(jnp.float16(1e-4))
    assert (as_in_the_docstring.dtype, as_in_the_docstring) == (jnp.float16, 0)
    return "in float32, or float16 if the scale is weakly typed"


def arguments():
    assert [name for name in dir(jmp) if "grad" in name] == []
    return "no such function"


def one_device():
    def step(grads):
        grads_finite = jmp.all_finite(grads)
        loss_scale = jmp.DynamicLossScale(SCALE).adjust(grads_finite)
        return jmp.select_tree(grads_finite, grads, jnp.zeros_like(grads)), loss_scale.loss_scale[None]

    applied, scales = cases.on_four_devices(step, P("x"))(jnp.array([1.0, jnp.inf, 1.0, 1.0]))
    assert applied.tolist() == [1, 0, 1, 1]
    assert scales.tolist() == [2**15, 2**14, 2**15, 2**15]
    return "each device decides on its own"


def compilations():
    def step(loss_scale):
        return loss_scale.adjust(jmp.all_finite(loss_scale.unscale(jnp.float16(1.0))))

    assert cases.compilations(jax.jit, step, jmp.DynamicLossScale(SCALE)) == "1"
    weakly_typed = cases.compilations(jax.jit, step, jmp.DynamicLossScale(jnp.asarray(2.0**15)))
    return f"1, or {weakly_typed} if the scale is weakly typed"


def own_reasons():
    assert jmp.select_tree(jnp.array(False), jnp.float32(2.0), jnp.float32(1.0)) == 1.0
    return "manually: `select_tree`"


def which_layer():
    states = []
    for bad in "a", "b":
        grads = dict.fromkeys("ab", jnp.float32(1.0)) | {bad: INF}
        grads_finite = jmp.all_finite(grads)
        states.append((grads_finite, jax.tree.leaves(jmp.DynamicLossScale(SCALE).adjust(grads_finite))))
    return cases.which_layer(states)


def hysteresis():
    return cases.hysteresis(adjusted(jmp.DynamicLossScale(SCALE), False, False, False))


def schedule():
    return cases.schedule(partial(jmp.select_tree, jnp.array(False)))
