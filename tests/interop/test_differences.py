"""The behavior of other libraries that the section "Intended differences" of `docs/migrating.md` describes.

`tests/test_peers.py` tests the table before that section. Other tests check the behavior of jax_lossscale. Tests of
libraries that are not installed are skipped.
"""

import importlib
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from originals import PEERS, needs

pytestmark = pytest.mark.ci


@pytest.fixture
def tf_scale():
    tf = needs("tensorflow")
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    return tf.compat.v1.mixed_precision.DynamicLossScale


def test_tensorflow_accepts_invalid_settings(tf_scale):
    assert tf_scale(8, 2.9).increment_period == 2
    assert tf_scale(8, 2, 0.5).multiplier == 0.5
    assert tf_scale(-1.0).initial_loss_scale == -1.0


def test_tensorflow_raises_a_scale_below_one_on_overflow(tf_scale):
    loss_scale = tf_scale(0.5)
    loss_scale.update([needs("tensorflow").constant(np.nan)])
    assert float(loss_scale()) == 1.0


def test_tensorflow_rejects_integer_gradients(tf_scale):
    with pytest.raises(Exception, match="int32"):
        tf_scale().update([needs("tensorflow").constant(1)])


def test_tensorflow_get_accepts_bools_and_returns_none_for_none():
    needs("tensorflow")
    get = importlib.import_module("tensorflow.python.training.experimental.loss_scale").get
    assert float(get(True)()) == 1.0
    assert get(None) is None


def torch_step(dtype=None, grad=True):
    torch = needs("torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.ones(()))
    if grad:
        parameter.grad = torch.ones(1, dtype=dtype)
    scaler.step(optimizer)


def test_torch_rejects_float16_gradients():
    with pytest.raises(ValueError, match="FP16"):
        torch_step(needs("torch").float16)


def test_torch_rejects_a_step_without_gradients():
    with pytest.raises(AssertionError, match="No inf checks"):
        torch_step(grad=False)


def test_torch_lowers_the_common_scale_but_applies_one_step():
    torch = needs("torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
    scaler.scale(torch.ones(()))
    for parameter, optimizer, grad in zip(parameters, optimizers, [8.0, math.inf], strict=True):
        parameter.grad = torch.full((1,), grad)
        scaler.step(optimizer)
    scaler.update()
    assert ([parameter.item() for parameter in parameters], scaler.get_scale()) == ([0.0, 1.0], 4.0)


def test_torch_never_grows_if_the_counter_exceeds_the_interval():
    peer = PEERS["torch"](period=10)
    for _ in range(5):
        peer.step(True)
    peer.scaler.set_growth_interval(3)
    for _ in range(20):
        peer.step(True)
    assert peer.scale_and_counter() == (8.0, 25)


def test_flax_never_grows_if_the_counter_exceeds_the_interval():
    peer = PEERS["flax"](period=3)
    peer.dynamic_scale = peer.dynamic_scale.replace(fin_steps=jnp.int32(5))
    for _ in range(20):
        peer.step(True)
    assert peer.scale_and_counter() == (8.0, 25)


def test_flax_and_jmp_raise_a_scale_below_the_floor_on_overflow():
    flax, jmp = PEERS["flax"](initial=0.25), PEERS["jmp"](initial=0.25)
    flax.dynamic_scale = flax.dynamic_scale.replace(minimum_scale=1.0)
    for peer in flax, jmp:
        peer.step(False)
        assert peer.scale_and_counter()[0] == 1.0


def test_jmp_scale_can_reach_zero():
    jmp = needs("jmp")
    loss_scale = jmp.DynamicLossScale(jnp.float32(1), min_loss_scale=jnp.float32(0))
    for _ in range(160):
        loss_scale = loss_scale.adjust(jnp.bool_(False))
    assert loss_scale.loss_scale == 0.0


@pytest.mark.filterwarnings("ignore:Casting from complex:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_flax_drops_imaginary_parts():
    needs("flax")
    from flax.training.dynamic_scale import DynamicScale

    *_, grads = DynamicScale(scale=8.0).value_and_grad(lambda z: jnp.abs(z) ** 2)(jnp.complex64(1 + 2j))
    assert grads.dtype == jnp.float32


def test_jmp_warns_of_an_integer_scale_and_then_fails():
    jmp = needs("jmp")
    with pytest.warns(UserWarning, match="floating"):
        loss_scale = jmp.DynamicLossScale(jnp.int32(8))
    with pytest.raises(TypeError):
        loss_scale.adjust(jnp.bool_(True))


def test_jmp_static_scale_of_zero_has_no_leaves():
    assert jax.tree.leaves(needs("jmp").StaticLossScale(0)) == []


def test_deepspeed_raises_at_its_floor_and_never_backs_off_if_delayed_shift_is_zero():
    needs("deepspeed")
    module = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    module.dist = types.SimpleNamespace(get_rank=lambda: 1)
    scaler = module.DynamicLossScaler(1.0, 9, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)
    with pytest.raises(Exception, match="minimum"):
        scaler.update_scale(True)
    scaler = module.DynamicLossScaler(8.0, 9, min_scale=1.0, delayed_shift=0, consecutive_hysteresis=False)
    for _ in range(9):
        scaler.update_scale(True)
    assert scaler.cur_scale == 8.0


def test_apply_if_finite_eventually_applies_nan():
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    params = jnp.float32(1.0)
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isnan(params)


def test_optax_updates_have_the_dtype_of_the_gradients():
    params = jnp.ones(2, jnp.bfloat16)
    updates, _ = optax.adam(0.1).update(params, optax.adam(0.1).init(params), params)
    assert updates.dtype == jnp.bfloat16
