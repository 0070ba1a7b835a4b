"""One loss scale of each class, helper functions that run steps, and a bitwise comparison."""

import dataclasses
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_lossscale as jls

Fixed, Dynamic = jls.FixedLossScale, jls.DynamicLossScale
F32_MAX = float(np.finfo(np.float32).max)


@partial(jax.tree_util.register_dataclass, data_fields=["num_overflows"], meta_fields=["initial"])
@dataclasses.dataclass(frozen=True)
class HalvingLossScale(jls.LossScale):
    """A user-defined loss scale that halves after each overflow, down to 1, and never grows."""

    lower_bound = 1.0
    initial: float
    num_overflows: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros([], jnp.int32))

    def __call__(self):
        return jnp.maximum(jnp.ldexp(jnp.float32(self.initial), -self.num_overflows), 1)

    def adjust(self, grads_finite):
        # The count is limited to 100, because much smaller powers of two are not normal numbers.
        return replace(self, num_overflows=jnp.minimum(self.num_overflows + jnp.where(grads_finite, 0, 1), 100))

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


@st.composite
def dynamic_configs(draw):
    """Return a random configuration of `DynamicLossScale`."""
    initial = draw(st.sampled_from([1.0, 3.0, 2.0**15, 1e30, 2.0**126]) | st.floats(0.125, 1e6, width=32))
    return {
        "initial_loss_scale": initial,
        "increment_period": draw(st.integers(1, 6)),
        "multiplier": draw(st.sampled_from([2.0, 4.0]) | st.floats(1.125, 1e6, width=32)),
        "backoff_factor": draw(st.none() | st.floats(0.0625, 0.9375, width=32)),
        "min_loss_scale": initial * draw(st.sampled_from([1.0, 0.5, 2.0**-4, 2.0**-20])),
        "max_loss_scale": draw(st.sampled_from([None, initial, initial * 1.5, F32_MAX])),
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_refill": draw(st.sampled_from(["growth", "finite"])),
    }


def with_rule_state(loss_scale, **numbers):
    """Return the loss scale with other numbers of its update rule, which the constructor does not accept."""
    return replace(loss_scale, _rule_state=loss_scale._rule_state._replace(**numbers))


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


def named(rows):
    """Return test parameters for rows whose first column is the test ID."""
    return [pytest.param(*row, id=name) for name, *row in rows]


def slow_except(quick, names):
    """Return the names as test parameters, and mark all names that are not in `quick` as slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def assert_same_bits(a, b):
    """Check that two pytrees have the same structure, dtypes and bits, including NaNs and signed zeros."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        # The sign and the payload of a NaN may differ.
        if x.tobytes() != y.tobytes():
            np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
            assert (np.signbit(x) == np.signbit(y))[~np.isnan(x.astype(np.float64))].all()
