"""The benchmark of training runs with 16-bit parameters: its tables, and a small run."""

import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from benchmarks.accuracy import sixteen_bit
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.training import Outcome, compile_training

pytestmark = pytest.mark.ci


def outcome(final_loss):
    return Outcome(final_loss, 0.0, 0.0, 1.0, ())


def test_table_compares_with_float32_and_omits_missing_trainings():
    outcomes = {
        ("gru", "float32"): (outcome(1.0),),
        ("gru", "float32, rounded to float16"): (outcome(1.01), outcome(0.98), outcome(1.0)),
        ("gru", "bfloat16, rounded to nearest"): (outcome(1.25),),
        ("gru", "bfloat16, master weights"): (outcome(1.015),),
        ("pinn", "bfloat16, master weights"): (outcome(1.0),),
    }
    table = sixteen_bit._table(jnp.bfloat16, ["gru", "pinn", "convnet"], outcomes, quick=False)
    headings = [heading for heading, _ in table.columns]
    assert headings == ["workload", *(f"noise floor, {name}16" for name in ("float", "bfloat")), *headings[3:]]
    assert headings[3:] == ["rounded to nearest", "master weights"]
    (row,) = table.rows
    assert row == ("gru", pytest.approx(2.0), None, "+25.0 %", "noise (+1.5 %)")
    assert not sixteen_bit._table(jnp.float16, ["gru"], outcomes, quick=False).rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", sixteen_bit._STORED[1:])
def test_16_bit_parameters_reach_the_loss_of_float32(dtype, name):
    workload = WORKLOADS["transformer"](layers=1, width=16, heads=2, context=8, batch=8, steps=100)
    exact = compile_training(workload, jnp.float32, lambda gradients: jls.get(None))(0)
    scale = "auto" if dtype == jnp.float16 else None
    stored = sixteen_bit.storage(dtype, name)
    ours = compile_training(workload, jnp.float32, lambda gradients: jls.get(scale), stored)(0)
    assert ours.final_loss == pytest.approx(float(exact.final_loss), rel=5e-3)
