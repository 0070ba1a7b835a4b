"""`DynamicLossScale` reproduces recorded steps of TensorFlow, torch, Keras and Megatron-LM.

`golden/README.md` describes the source of the records. If multiplier and backoff factor are powers of two, the scale is
bitwise equal. Otherwise, each change of the scale may round differently, because TensorFlow divides by the multiplier
and `DynamicLossScale` multiplies by its reciprocal. After n changes, the scale is within n units in the last place.
"""

import math

import jax
import numpy as np
import pytest
from records import FILES, RECORDS, ULP


def step(loss_scale, grad):
    loss_scale, should_apply = loss_scale.update(grad)
    return loss_scale, (loss_scale(), loss_scale.num_good_steps, loss_scale.hysteresis_left, should_apply)


run = jax.jit(lambda loss_scale, grads: jax.lax.scan(step, loss_scale, grads)[1])


def is_power_of_two(value):
    return math.frexp(value)[0] == 0.5


@pytest.mark.parametrize(
    ("file", "case"), [pytest.param(file, i, id=f"{file}-{i}") for file in FILES for i in range(len(RECORDS[file]))]
)
def test_dynamic_scale_reproduces_the_record(file, case):
    record = RECORDS[file][case]
    loss_scale = FILES[file](record["config"])
    grads = np.where(record["finite"], np.float32(0.5), np.float32(np.nan))
    scale, counter, hysteresis_left, should_apply = jax.device_get(run(loss_scale, grads))

    multiplier, backoff = loss_scale.multiplier, loss_scale.backoff_factor
    if is_power_of_two(multiplier) and (backoff is None or is_power_of_two(backoff)):
        np.testing.assert_array_equal(scale, np.float32(record["scale"]))
    else:
        num_changes = np.cumsum(np.diff(record["scale"], prepend=np.float32(loss_scale.initial_loss_scale)) != 0)
        assert np.all(np.abs(scale / np.float64(record["scale"]) - 1) <= num_changes * ULP)
    np.testing.assert_array_equal(counter, record["counter"])
    np.testing.assert_array_equal(should_apply, record["should_apply"])
    if loss_scale.hysteresis > 1:
        np.testing.assert_array_equal(hysteresis_left, np.maximum(record["hysteresis_tracker"], 0))
    else:
        assert hysteresis_left is None


def test_number_and_length_of_the_records():
    assert {name: len(RECORDS[name]) for name in FILES} == {
        "tf1_dynamic_loss_scale": 20,
        "torch_grad_scaler": 20,
        "keras3_loss_scale_optimizer": 20,
        "megatron_dynamic_grad_scaler": 12,
    }
    assert {len(case["finite"]) for cases in RECORDS.values() for case in cases} == {60}
