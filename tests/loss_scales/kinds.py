"""One loss scale of each class, and helper functions that run loss scales over several steps."""

import dataclasses
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls

Fixed, Dynamic = jls.FixedLossScale, jls.DynamicLossScale
F32_MAX = float(np.finfo(np.float32).max)


@partial(jax.tree_util.register_dataclass, data_fields=["num_overflows"], meta_fields=["initial"])
@dataclasses.dataclass(frozen=True)
class HalvingLossScale(jls.LossScale):
    """A user-defined loss scale that halves after each overflow and never grows."""

    initial: float
    num_overflows: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros([], jnp.int32))

    def __call__(self):
        return jnp.ldexp(jnp.float32(self.initial), -self.num_overflows)

    def adjust(self, grads_finite):
        return replace(self, num_overflows=jnp.where(grads_finite, 0, 1) + self.num_overflows)

    def get_config(self):
        return {"initial": self.initial}


ONE_OF_EACH = {
    "fixed": partial(Fixed, 8),
    "fixed_skipping": partial(Fixed, 8, skip_nonfinite=True),
    "no_op": jls.NoOpLossScale,
    "dynamic": partial(Dynamic, 8, 2),
    "dynamic_full": partial(
        Dynamic,
        8,
        2,
        4,
        backoff_factor=0.5,
        min_loss_scale=0.25,
        max_loss_scale=64,
        hysteresis=2,
        hysteresis_refill="finite",
    ),
    "auto": partial(jls.AutoLossScale, 8),
    "users_own": partial(HalvingLossScale, 8.0),
}
each_kind = pytest.mark.parametrize("make", ONE_OF_EACH.values(), ids=ONE_OF_EACH)


def grads_of(flags):
    """Return one gradient for each letter: 1 for T (finite) and NaN for F (nonfinite)."""
    return [np.float32(1.0 if flag == "T" else np.nan) for flag in flags]


def scales_over(loss_scale, grads, update):
    """Return the loss scale after each gradient."""
    scales = []
    for grad in grads:
        loss_scale, _ = update(loss_scale, grad)
        scales.append(float(loss_scale()))
    return scales


def through_config(loss_scale):
    """Return a new loss scale that is built from the configuration of `loss_scale`."""
    return type(loss_scale).from_config(loss_scale.get_config())


def named(rows):
    """Return test parameters for rows whose first column is the test ID."""
    return [pytest.param(*row, id=name) for name, *row in rows]
