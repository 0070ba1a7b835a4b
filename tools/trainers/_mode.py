"""The three modes in which `tools/trainers.py` runs each program."""

import importlib.metadata
import json
import math
import sys

import jax
import numpy as np

import jax_lossscale as jls

MODE = sys.argv[1]


class Half:
    """The loss function and the optimizer of the mode in `sys.argv`.

    In the mode "float16", the attributes `loss`, `optimizer` and `step` are those of `jls.MixedPrecision`.
    """

    def __init__(self, optimizer, **options):
        if MODE == "float16":
            self.mp = jls.MixedPrecision(optimizer, **options)
            self.loss, self.optimizer, self.step = self.mp.loss, self.mp.optimizer, self.mp.step
        else:
            self.loss = jls.autocast if MODE == "autocast" else lambda fun: fun
            self.optimizer, self.step = optimizer, lambda fun: fun


def report(package, losses, opt_state, last=0.1):
    """Print the result of a program: the mean of its last losses, and the counters of the optimizer's state.

    `last` is the fraction of the losses over which the mean is computed.
    """
    losses = np.asarray(jax.device_get(losses), np.float64).ravel()
    result = {"version": version(package), "loss": losses[-max(1, int(last * len(losses))) :].mean()}
    if MODE == "float16":
        numbers = {name: int(np.max(value)) for name, value in jls.metrics(opt_state).items() if "steps" in name}
        scale = float(np.max(jls.metrics(opt_state)["loss_scale"]))
        assert numbers["applied_steps"] > 0, numbers
        result |= {"skipped": numbers["skipped_steps"], "log2_scale": math.log2(scale)}
    print(json.dumps(result))


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unreleased"
