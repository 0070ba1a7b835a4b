"""The behavior of other libraries that the pages describe, above all "Intended differences" of `docs/migrating.md`.

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

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]  # Other libraries cause warnings.


def needs(package):
    return pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)


def scales_of(module, *arguments):
    """Return the scales of a library before and after each step, as measured by its module in `peers`."""
    return importlib.import_module(f"peers.{module}").adjusted(*arguments)


def test_tensorflow_accepts_invalid_settings_and_raises_a_scale_below_one():
    tf = needs("tensorflow")
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    tf_scale = tf.compat.v1.mixed_precision.DynamicLossScale
    assert tf_scale(8, 2.9).increment_period == 2
    assert tf_scale(8, 2, 0.5).multiplier == 0.5
    assert tf_scale(-1.0).initial_loss_scale == -1.0
    loss_scale = tf_scale(0.5)
    loss_scale.update([tf.constant(np.nan)])
    assert float(loss_scale()) == 1.0
    with pytest.raises(Exception, match="int32"):
        loss_scale.update([tf.constant(1)])


def test_tensorflow_get_accepts_bools_and_returns_none_for_none():
    needs("tensorflow")
    get = importlib.import_module("tensorflow.python.training.experimental.loss_scale").get
    assert float(get(True)()) == 1.0
    assert get(None) is None


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
    needs("torch")
    scaler_after = importlib.import_module("peers.torch_").scaler_after
    scaler, _ = scaler_after(*[1.0] * 5, init_scale=8.0, growth_interval=10)
    scaler.set_growth_interval(3)
    assert set(scaler_after(*[1.0] * 20, scaler=scaler)[1]) == {8.0}


def test_flax_never_grows_if_the_counter_exceeds_the_interval():
    dynamic_scale = needs("flax.training.dynamic_scale").DynamicScale(growth_interval=3, scale=8.0, fin_steps=5)
    assert set(scales_of("flax_", dynamic_scale, *[1.0] * 20)) == {8.0}


def test_jmp_grows_at_the_next_multiple_of_the_period_if_the_counter_exceeds_it():
    loss_scale = needs("jmp").DynamicLossScale(jnp.float32(8), counter=jnp.int32(4), period=3)
    assert scales_of("jmp_", loss_scale, *[True] * 4) == [8.0, 8.0, 16.0, 16.0, 16.0]


def test_flax_and_jmp_raise_a_scale_below_the_floor_on_overflow():
    dynamic_scale = needs("flax.training.dynamic_scale").DynamicScale(scale=0.25, minimum_scale=1.0)
    loss_scale = needs("jmp").DynamicLossScale(jnp.float32(0.25))
    assert scales_of("flax_", dynamic_scale, jnp.inf) == scales_of("jmp_", loss_scale, False) == [0.25, 1.0]


def test_jmp_scale_can_reach_zero():
    loss_scale = needs("jmp").DynamicLossScale(jnp.float32(1), min_loss_scale=jnp.float32(0))
    assert scales_of("jmp_", loss_scale, *[False] * 160)[-1] == 0


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
