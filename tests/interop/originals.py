"""Wrappers with a common interface around the loss scales of other libraries.

Each wrapper is created with a configuration, is stepped with a finiteness flag, and returns its scale and counter.
Tests of libraries that are not installed are skipped.
"""

import importlib
import warnings

import jax
import jax.numpy as jnp
import pytest


def needs(package):
    """Return the package, or skip the test if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"{package} is not installed; the golden records replace it")


def ours(peer):
    """Return the module of jax_lossscale that converts from and to another library."""
    if peer in ("flax", "jmp"):
        needs(peer)
    return importlib.import_module(f"jax_lossscale.interop.{peer}")


class Torch:
    def __init__(self, initial=8.0, period=4, multiplier=2.0, backoff=0.5):
        self.torch = needs("torch")
        self.scaler = self.torch.amp.GradScaler(
            "cpu", init_scale=initial, growth_interval=period, growth_factor=multiplier, backoff_factor=backoff
        )
        self.parameter = self.torch.nn.Parameter(self.torch.ones(1))
        self.optimizer = self.torch.optim.SGD([self.parameter], lr=1.0)

    def step(self, finite):
        self.scaler.scale(self.torch.ones(()))  # The scale of a `GradScaler` is created at its first use.
        self.parameter.grad = self.torch.full((1,), self.scaler.get_scale() if finite else float("inf"))
        before = self.parameter.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.parameter.item() != before

    def scale_and_counter(self):
        return self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]


class Flax:
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


class Jmp:
    def __init__(self, initial=8.0, period=4, multiplier=2):
        jmp = needs("jmp")
        self.loss_scale = jmp.DynamicLossScale(jnp.float32(initial), period=period, factor=multiplier)
        self.adjust = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))

    def step(self, finite):
        self.loss_scale = self.adjust(self.loss_scale, jnp.bool_(finite))
        return finite

    def scale_and_counter(self):
        return float(self.loss_scale.loss_scale), int(self.loss_scale.counter)


PEERS = {"torch": Torch, "flax": Flax, "jmp": Jmp}
