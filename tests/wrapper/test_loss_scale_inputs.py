"""What `loss_scaled` tells a kind of loss scale of a user's own: whether the gradients are finite, and the largest.

Of gradients that are not finite none is the largest: whatever stands for "not measured", it is no number that a rule
could take for the largest gradient, nor for zeros where the caller says that all are finite.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

SCALE = 8.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listening(jls.LossScale):
    """Keeps what it is told."""

    finite: jax.Array
    largest: jax.Array
    needs_largest: ClassVar[bool] = True

    def __call__(self):
        return jnp.float32(SCALE)

    def adjust(self, grads_finite, largest):
        return Listening(grads_finite, largest)

    def get_config(self):
        return {}


START = Listening(jnp.array(True), jnp.float32(0))


def assert_reported(reported, finite, largest):
    """``None`` for the largest: that it was not measured."""
    assert bool(reported.finite) == finite
    if largest is None:
        assert not 0 < reported.largest < np.inf
        assert not (finite and reported.largest == 0)
    else:
        assert reported.largest == largest


FINITE, OVERFLOWED = np.array([-3.0, 1.0], np.float32), np.array([-np.inf, 1.0], np.float32)
REPORTED = {  # the true gradients, what the caller says of them: what the kind is told
    "nothing, and they are finite": (FINITE, None, True, 3.0),
    "nothing, and they are not": (OVERFLOWED, None, False, None),
    "rightly that they are finite": (FINITE, True, True, 3.0),
    "rightly that they are not": (OVERFLOWED, False, False, None),
    "wrongly that they are finite": (OVERFLOWED, True, True, None),
    "wrongly that they are not": (FINITE, False, False, None),
    "that zeros are finite": (0 * FINITE, True, True, 0.0),
}


@pytest.mark.parametrize(("grads", "said", "finite", "largest"), REPORTED.values(), ids=REPORTED)
def test_what_the_caller_says_of_the_gradients_is_passed_on_and_the_largest_with_it(grads, said, finite, largest):
    tx = jls.loss_scaled(optax.sgd(0.1), START)
    _, state = tx.update(grads * SCALE, tx.init(FINITE), FINITE, grads_finite=said)
    assert_reported(state.loss_scale, finite, largest)


@pytest.mark.parametrize("grads", [FINITE, OVERFLOWED, OVERFLOWED[::-1]], ids=["none", "the first", "the last"])
def test_if_one_device_overflows_the_largest_of_another_is_not_told(grads):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = jls.loss_scaled(optax.sgd(0.1), START, axis_name="data")

    def reported(grads):
        return tx.update(grads, tx.init(grads), grads)[1].loss_scale

    reported = jax.jit(jax.shard_map(reported, mesh=mesh, in_specs=P("data"), out_specs=P()))
    is_finite = bool(np.isfinite(grads).all())
    assert_reported(reported(grads * SCALE), is_finite, 3.0 if is_finite else None)
