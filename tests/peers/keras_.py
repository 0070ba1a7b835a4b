"""Behavior of ``keras.optimizers.LossScaleOptimizer`` with the JAX backend."""

import inspect

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec as P

from peers import cases


class Trained:
    """A variable, an optimizer, and their values after the last step."""

    def __init__(self, inner=None, start=1.0, dtype="float32", **options):
        self.variable = keras.Variable(start, dtype=dtype)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **options)
        self.optimizer.build([self.variable])
        self.apply = jax.jit(self.optimizer.stateless_apply)
        self.state = [variable.value for variable in self.optimizer.variables]
        self.params = [self.variable.value]

    def step(self, scaled_grad):
        self.params, self.state = self.apply(self.state, [scaled_grad], self.params)
        return self.scale

    @property
    def scale(self):
        return self.state[self.index_of_scale]

    @property
    def index_of_scale(self):
        return [variable.path.split("/")[-1] for variable in self.optimizer.variables].index("dynamic_scale")


def scales(*scaled_grads, **options):
    """Return the scale before the first step and after each step."""
    trained = Trained(**options)
    return [float(trained.scale), *(float(trained.step(jnp.float32(grad))) for grad in scaled_grads)]


def growth():
    good_steps = [1.0] * 4 * cases.PERIOD
    return cases.growth(scales(*good_steps, initial_scale=1.0, dynamic_growth_steps=cases.PERIOD))


def floor():
    return cases.number(scales(*[jnp.inf] * 30, initial_scale=2.0**-125)[-1])


def ceiling():
    return cases.number(scales(*[1.0] * 3, initial_scale=2.0**126, dynamic_growth_steps=1)[-1])


def value():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**120), loss="mse")
    history = model.fit(np.full((1, 1), 1e10), np.ones((1, 1)), verbose=0)
    assert model.get_weights()[0] == 0  # The step was skipped.
    assert history.history["loss"] == [1.0]
    return "the true loss"


def unscaling():
    def step(params, state, grads):
        return trained.optimizer.stateless_apply(state, [grads], params)[0][0]

    trained = Trained(start=[1.0] * 4, initial_scale=cases.HIGHEST_POWER)
    given = trained.params, trained.state, jnp.full(4, cases.HIGHEST_POWER)
    return cases.unscaled(1 - step(*given), 1 - jax.jit(step)(*given))


def float16_gradients():
    trained = Trained(start=0.0, initial_scale=2.0**15)
    trained.step(jnp.float16(1e-4))
    assert trained.params == [-jnp.float32(jnp.float16(1e-4)) / 2**15]
    return "unscaled in float32"


def arguments():
    assert [name for name in dir(keras.optimizers.LossScaleOptimizer) if "grad" in name and "value" in name] == []
    return "no such function"


def one_device():
    def step(params, state, grads):
        (params,), state = trained.optimizer.stateless_apply(state, [grads], [params])
        return params, state[trained.index_of_scale][None]

    trained = Trained(start=[0.0])
    step = cases.on_four_devices(step, (P("x"), P(), P("x")), check_vma=False)
    grads = jnp.array([1.0, jnp.inf, 1.0, 1.0]) * 2.0**15
    params, scale = step(jnp.zeros(4), trained.state, grads)
    assert params.tolist() == [-1, 0, -1, -1]
    assert scale.tolist() == [2**15, 2**14, 2**15, 2**15]
    return "each device decides on its own"


def compilations():
    trained = Trained()

    def step(state):
        return trained.optimizer.stateless_apply(state, [jnp.float32(1.0)], trained.params)[1]

    return cases.compilations(jax.jit, step, trained.state)


def own_reasons():
    for function in "apply", "stateless_apply":
        parameters = inspect.signature(getattr(keras.optimizers.LossScaleOptimizer, function)).parameters
        assert set(parameters) <= {"self", "optimizer_variables", "grads", "trainable_variables"}
    return "manually: do not call it"


def which_layer():
    states = []
    for bad in 0, 1:
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
        grads = [jnp.float32(jnp.nan if n == bad else 1.0) for n in range(2)]
        state = [variable.value for variable in optimizer.variables]
        states.append(optimizer.stateless_apply(state, grads, [variable.value for variable in variables]))
    return cases.which_layer(states)


def hysteresis():
    parameters = inspect.signature(keras.optimizers.LossScaleOptimizer).parameters
    assert not [name for name in parameters if "hysteresis" in name or "tolerance" in name]
    return cases.hysteresis(scales(*[jnp.inf] * 3))


def schedule():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    trained = Trained(keras.optimizers.SGD(schedule), start=0.0, initial_scale=2.0)
    trained.step(jnp.float32(jnp.inf))
    trained.step(jnp.float32(1.0))
    assert trained.params == [-1.0]
    trained.step(jnp.float32(1.0))
    assert trained.params == [-1.5]
    return "does not advance"
