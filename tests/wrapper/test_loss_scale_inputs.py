"""The arguments that `loss_scaled` passes to `adjust` of a user-defined loss scale.

If the gradients are nonfinite, `largest` is not a number that a loss scale could mistake for the largest gradient
magnitude. In particular, `largest` is not zero if the caller states that all gradients are finite.
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
    """A loss scale that stores the arguments of `adjust`."""

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
    """Check the stored arguments. If ``largest`` is None, check that it was not measured."""
    assert bool(reported.finite) == finite
    if largest is None:
        assert not 0 < reported.largest < np.inf
        assert not (finite and reported.largest == 0)
    else:
        assert reported.largest == largest


FINITE, OVERFLOWED = np.array([-3.0, 1.0], np.float32), np.array([-np.inf, 1.0], np.float32)
# The columns are the unscaled gradients, the argument `grads_finite` of `update`, and the expected arguments of
# `adjust`.
REPORTED = {
    "no flag, finite gradients": (FINITE, None, True, 3.0),
    "no flag, nonfinite gradients": (OVERFLOWED, None, False, None),
    "correct flag, finite gradients": (FINITE, True, True, 3.0),
    "correct flag, nonfinite gradients": (OVERFLOWED, False, False, None),
    "wrong flag, nonfinite gradients": (OVERFLOWED, True, True, None),
    "wrong flag, finite gradients": (FINITE, False, False, None),
    "correct flag, zero gradients": (0 * FINITE, True, True, 0.0),
}


@pytest.mark.parametrize(("grads", "said", "finite", "largest"), REPORTED.values(), ids=REPORTED)
def test_adjust_receives_grads_finite_and_the_largest_gradient(grads, said, finite, largest):
    tx = jls.loss_scaled(optax.sgd(0.1), START)
    _, state = tx.update(grads * SCALE, tx.init(FINITE), FINITE, grads_finite=said)
    assert_reported(state.loss_scale, finite, largest)


@pytest.mark.parametrize("grads", [FINITE, OVERFLOWED, OVERFLOWED[::-1]], ids=["none", "the first", "the last"])
def test_largest_is_not_passed_to_adjust_if_one_device_overflows(grads):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = jls.loss_scaled(optax.sgd(0.1), START, axis_name="data")

    def reported(grads):
        return tx.update(grads, tx.init(grads), grads)[1].loss_scale

    reported = jax.jit(jax.shard_map(reported, mesh=mesh, in_specs=P("data"), out_specs=P()))
    is_finite = bool(np.isfinite(grads).all())
    assert_reported(reported(grads * SCALE), is_finite, 3.0 if is_finite else None)
