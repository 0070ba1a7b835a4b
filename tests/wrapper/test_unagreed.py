"""Gradients of one device and no `axis_name`, inside `jax.shard_map` where JAX does not check: warned of, once."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from any_jax import needs_jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

pytestmark = needs_jax("0.10.0", "a traced array does not know where it came from")


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(params * batch[0]) ** 2)


def averaged(grads):
    return jax.lax.pmean(grads, "data")


AVERAGED = {
    "gradients": (loss_fn, averaged),
    "gradients, in a function of its own": (loss_fn, jax.jit(averaged)),
    "gradients, then clipped": (loss_fn, lambda grads: jnp.clip(averaged(grads), -1.0, 1.0)),
    "loss": (lambda params, batch: averaged(loss_fn(params, batch)), lambda grads: grads),
}


def warnings_of(loss_fn, combine, *, axis_name=None, loss_scale="dynamic", check_vma=False, **reported):
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale, axis_name=axis_name)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(params, state, batch):
        grads = combine(jls.scaled_grad(loss_fn, state)(params, batch))
        return tx.update_and_apply(grads, state, params, **reported)

    specs = {"mesh": mesh, "in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    params = jnp.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(jax.shard_map(step, **specs)).lower(params, tx.init(params), jnp.ones((8, 2)))
    return [str(warning.message) for warning in caught]


def test_gradients_of_one_device_are_warned_of_once():
    (message,) = warnings_of(loss_fn, lambda grads: grads)
    assert "axis_name=..." in message


@pytest.mark.parametrize(("loss_fn", "combine"), AVERAGED.values(), ids=AVERAGED)
@pytest.mark.parametrize("check_vma", [False, True])
def test_averaged_ones_are_not(loss_fn, combine, check_vma):
    assert warnings_of(loss_fn, combine, check_vma=check_vma) == []


OTHERS = {
    "an axis": {"axis_name": "data"},
    "no axis, said so": {"axis_name": ()},
    "no check": {"loss_scale": None},
    "known already": {"grads_finite": True},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_where_the_verdict_is_not_that_of_one_device_nothing_is_said(options):
    assert warnings_of(loss_fn, lambda grads: grads, **options) == []
