"""The real classes of other libraries, each behind the same few methods, so that one test serves all.

A peer is made with a configuration, stepped with a verdict, and asked for its scale and counter. ``save`` gives what
our ``from_<peer>`` takes, ``load`` takes what our ``to_<peer>`` gives. Only the packages that are installed are run.
"""

import importlib
import os
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")  # which Keras reads when it is imported


def needs(package):
    """The package, or a skip that says why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"{package} is not installed: the golden records stand for it")


def ours(peer):
    """Our module for a peer."""
    if peer in ("flax", "jmp"):
        needs(peer)
    return importlib.import_module(f"jax_lossscale.interop.{peer}")


class Peer:
    losses = ()  # what the warnings of ``from_<peer>`` say, one each


class Torch(Peer):
    losses = ("no floor",)

    def __init__(self, initial=8.0, period=4, multiplier=2.0, backoff=0.5):
        self.torch = needs("torch")
        self.scaler = self.torch.amp.GradScaler(
            "cpu", init_scale=initial, growth_interval=period, growth_factor=multiplier, backoff_factor=backoff
        )
        self.parameter = self.torch.nn.Parameter(self.torch.ones(1))
        self.optimizer = self.torch.optim.SGD([self.parameter], lr=1.0)

    def step(self, finite):
        self.scaler.scale(self.torch.ones(()))  # makes the scale, which is lazy
        self.parameter.grad = self.torch.full((1,), self.scaler.get_scale() if finite else float("inf"))
        before = self.parameter.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.parameter.item() != before

    def scale_and_counter(self):
        return self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]

    def save(self):
        return (self.scaler.state_dict(),)

    def load(self, state_dict):
        self.scaler.load_state_dict(state_dict)


class Keras(Peer):
    losses = ("no floor",)

    def __init__(self, initial=8.0, period=4):
        self.keras = needs("keras")
        if self.keras.backend.backend() != "jax":
            pytest.skip("Keras runs on another backend here")
        self.parameter = self.keras.Variable(np.ones(1, np.float32))
        self._make(initial_scale=initial, dynamic_growth_steps=period)

    def _make(self, **config):
        inner = self.keras.optimizers.SGD(1.0)
        self.optimizer = self.keras.optimizers.LossScaleOptimizer(inner, **config)
        self.optimizer.build([self.parameter])
        self.apply = jax.jit(self.optimizer.stateless_apply)

    def step(self, finite):
        scale = self.scale_and_counter()[0]
        gradient = jnp.full(1, scale if finite else jnp.inf)
        values = [variable.value for variable in self.optimizer.variables]
        (after,), new_values = self.apply(values, [gradient], [self.parameter.value])
        applied = bool(after[0] != self.parameter.value[0])
        self.parameter.assign(after)
        for variable, value in zip(self.optimizer.variables, new_values, strict=True):
            variable.assign(value)
        return applied

    def scale_and_counter(self):
        return float(self.optimizer.dynamic_scale.numpy()), int(self.optimizer.step_counter.numpy())

    def save(self):
        optimizer = self.optimizer
        state = {"dynamic_scale": optimizer.dynamic_scale, "step_counter": optimizer.step_counter}
        return optimizer.get_config(), state

    def load(self, config, state):
        self._make(**config)
        self.optimizer.dynamic_scale.assign(state["dynamic_scale"])
        self.optimizer.step_counter.assign(state["step_counter"])


class TensorFlow(Peer):
    def __init__(self, initial=8.0, period=4, multiplier=2.0):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        self.tf = needs("tensorflow")
        self.tf.compat.v1.logging.set_verbosity(self.tf.compat.v1.logging.ERROR)
        self.kind = self.tf.compat.v1.mixed_precision.DynamicLossScale
        self.loss_scale = self.kind(initial, period, multiplier)

    def step(self, finite):
        _, should_apply = self.loss_scale.update([self.tf.constant(1.0 if finite else np.nan)])
        return bool(should_apply)

    def _variable(self, name):
        return self.loss_scale._lookup_dependency(name)  # which is how a checkpoint finds it

    def scale_and_counter(self):
        return float(self.loss_scale()), int(self._variable("good_steps"))

    def save(self):
        with tempfile.TemporaryDirectory() as folder:
            path = self.tf.train.Checkpoint(loss_scale=self.loss_scale).save(f"{folder}/checkpoint")
            reader = self.tf.train.load_checkpoint(path)
            state = {
                name: reader.get_tensor(f"loss_scale/{name}/.ATTRIBUTES/VARIABLE_VALUE")
                for name in ("current_loss_scale", "good_steps")
            }
        return self.loss_scale.get_config(), state

    def load(self, config, state):
        self.loss_scale = self.kind.from_config(config)
        for name, value in state.items():
            self._variable(name).assign(value)


class Flax(Peer):
    losses = ("grows on the finite step",)

    def __init__(self, initial=8.0, period=4, multiplier=2.0, backoff=0.5):
        needs("flax")
        from flax.training.dynamic_scale import DynamicScale

        self.dynamic_scale = DynamicScale(
            scale=jnp.float32(initial),
            fin_steps=jnp.int32(0),
            growth_interval=period,
            growth_factor=multiplier,
            backoff_factor=backoff,
        )
        self.jitted = jax.jit(lambda dynamic_scale, x: dynamic_scale.value_and_grad(lambda y: x * y)(1.0)[:2])

    def step(self, finite):
        self.dynamic_scale, is_finite = self.jitted(self.dynamic_scale, jnp.float32(1.0 if finite else jnp.nan))
        return bool(is_finite)

    def scale_and_counter(self):
        return float(self.dynamic_scale.scale), int(self.dynamic_scale.fin_steps)

    def save(self):
        return (self.dynamic_scale,)

    def load(self, dynamic_scale):
        self.dynamic_scale = dynamic_scale


class Jmp(Peer):
    def __init__(self, initial=8.0, period=4, multiplier=2):
        jmp = needs("jmp")
        self.loss_scale = jmp.DynamicLossScale(jnp.float32(initial), period=period, factor=multiplier)
        self.adjust = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))

    def step(self, finite):
        self.loss_scale = self.adjust(self.loss_scale, jnp.bool_(finite))
        return finite

    def scale_and_counter(self):
        return float(self.loss_scale.loss_scale), int(self.loss_scale.counter)

    def save(self):
        return (self.loss_scale,)

    def load(self, loss_scale):
        self.loss_scale = loss_scale


PEERS = {
    "torch": Torch,
    "keras": Keras,
    "tensorflow": TensorFlow,
    "flax": Flax,
    "jmp": Jmp,
}
