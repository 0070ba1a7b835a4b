"""`DynamicLossScale` reproduces recorded steps of TensorFlow, torch, Keras, Megatron-LM and DeepSpeed.

`golden/README.md` describes the source of the records. If multiplier and backoff factor are powers of two, the scale is
bitwise equal. Otherwise, each change of the scale may round differently, because TensorFlow divides by the multiplier
and `DynamicLossScale` multiplies by its reciprocal. After n changes, the scale is within n units in the last place.
"""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls

GOLDEN = Path(__file__).parent / "golden"
RECORDS = {path.stem: json.loads(path.read_text())["cases"] for path in sorted(GOLDEN.glob("*.json"))}
NO_FLOOR = 2.0**-126  # This is the smallest valid `min_loss_scale`.
# A unit in the last place of a float32 is at most this fraction of the number.
ULP = 2.0**-23

# For each record: the names of its settings that differ from the arguments of `DynamicLossScale`, and other settings.
SETTINGS = {
    "tf1_dynamic_loss_scale": ({}, {}),
    "torch_grad_scaler": (
        {"init_scale": "initial_loss_scale", "growth_interval": "increment_period", "growth_factor": "multiplier"},
        {"min_loss_scale": NO_FLOOR},
    ),
    "keras3_loss_scale_optimizer": (
        {"initial_scale": "initial_loss_scale", "dynamic_growth_steps": "increment_period"},
        {"min_loss_scale": NO_FLOOR},
    ),
    "megatron_dynamic_grad_scaler": (
        {
            "initial_scale": "initial_loss_scale",
            "growth_interval": "increment_period",
            "growth_factor": "multiplier",
            "min_scale": "min_loss_scale",
        },
        {"hysteresis_refill": "growth"},
    ),
}


def cases(files):
    return [pytest.param(file, i, id=f"{file}-{i}") for file in files for i in range(len(RECORDS[file]))]


def step(loss_scale, grad):
    loss_scale, should_apply = loss_scale.update(grad)
    return loss_scale, (loss_scale(), loss_scale.num_good_steps, loss_scale.hysteresis_left, should_apply)


run = jax.jit(lambda loss_scale, grads: jax.lax.scan(step, loss_scale, grads)[1])


def assert_continues(loss_scale, record, begin=0, end=None):
    """Compare the steps from ``begin`` with the record up to ``end``. Return the scale after each step."""
    grads = np.where(record["finite"][begin:], np.float32(0.5), np.float32(np.nan))
    scale, counter, hysteresis_left, should_apply = jax.device_get(run(loss_scale, grads))
    recorded = {name: np.array(values[begin:end]) for name, values in record.items() if isinstance(values, list)}
    length = len(recorded["scale"])

    factors = loss_scale.multiplier, loss_scale.backoff_factor or 1 / loss_scale.multiplier
    is_exact = all(math.frexp(factor)[0] == 0.5 for factor in factors)
    num_changes = np.cumsum(np.diff(recorded["scale"], prepend=float(loss_scale())) != 0)
    errors = np.abs(scale[:length] / np.float64(recorded["scale"]) - 1)
    assert np.all(errors <= (0 if is_exact else num_changes * ULP))
    np.testing.assert_array_equal(should_apply[:length], recorded.get("should_apply", recorded["finite"]))
    if "counter" in recorded:
        np.testing.assert_array_equal(counter, recorded["counter"])
    if "hysteresis_tracker" in recorded and loss_scale.hysteresis > 1:
        np.testing.assert_array_equal(hysteresis_left, np.maximum(recorded["hysteresis_tracker"], 0))
    assert (hysteresis_left is None) == (loss_scale.hysteresis == 1)
    return scale


@pytest.mark.parametrize(("file", "case"), cases(SETTINGS))
def test_dynamic_scale_reproduces_the_record(file, case):
    record, (names, others) = RECORDS[file][case], SETTINGS[file]
    settings = {names.get(name, name): value for name, value in record["config"].items()}
    assert_continues(jls.DynamicLossScale(**settings, **others), record)


def test_number_and_length_of_the_records():
    assert {name: len(records) for name, records in RECORDS.items()} == {
        "deepspeed_loss_scalers": 20,
        "keras3_loss_scale_optimizer": 20,
        "megatron_dynamic_grad_scaler": 12,
        "tf1_dynamic_loss_scale": 20,
        "torch_grad_scaler": 20,
    }
    assert {len(record["finite"]) for records in RECORDS.values() for record in records} == {60}


# --- The code blocks and the table of names in `docs/migrating.md` ---

PAGE = (GOLDEN.parents[1] / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# The first block continues a run of DeepSpeed, and the second block continues a run of Megatron-LM.
CALLS = [block for block in BLOCKS if re.search(r"increment_period=(state|config)\[", block)]


def deepspeed_at(record, step):
    state = {key: record[key][step] for key in ("cur_iter", "last_overflow_iter")}
    state |= {"cur_scale": record["scale"][step], "scale_factor": 2.0} | record["config"]
    if "cur_hysteresis" in record:
        state["cur_hysteresis"] = record["cur_hysteresis"][step]
    else:  # These records are from `FP16_Optimizer`, which has no hysteresis.
        state |= {"delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False}
    return CALLS[0], {"state": state}


def megatron_at(record, step):
    of_state = {"scale": "scale", "growth_tracker": "counter", "hysteresis_tracker": "hysteresis_tracker"}
    state = {name: record[recorded][step] for name, recorded in of_state.items()}
    return CALLS[1], {"config": record["config"], "state_dict": state}


CONTINUED = {"deepspeed_loss_scalers": deepspeed_at, "megatron_dynamic_grad_scaler": megatron_at}


def second_growth(record, cut):
    """Return the first step, after ``cut``, of a second growth without an overflow in between."""
    has_grown = False
    for step, (before, after) in enumerate(pairwise(record["scale"][cut:]), start=cut + 1):
        if not record["finite"][step]:
            has_grown = False
        elif after > before:
            if has_grown:
                return step
            has_grown = True
    return len(record["finite"])


@pytest.mark.ci
@pytest.mark.parametrize(("file", "case"), cases(CONTINUED))
@pytest.mark.parametrize("cut", [0, 30])
def test_code_block_on_the_page_continues_a_run(file, case, cut):
    record = RECORDS[file][case]
    block, names = CONTINUED[file](record, cut)
    names |= {"jax": jax, "jnp": jnp, "jls": jls}
    exec(block, names)
    end = second_growth(record, cut) if file == "deepspeed_loss_scalers" else len(record["finite"])
    assert end > cut + 1
    scale = assert_continues(names["loss_scale"], record, cut + 1, end)
    # After two growths in a row, DeepSpeed is one step ahead, as the page states.
    assert end == len(record["finite"]) or scale[end - cut - 1] < record["scale"][end]


def test_table_of_names_on_the_page_agrees_with_the_settings_of_the_records():
    lines = PAGE[PAGE.index("| jax_lossscale | torch |") :].partition("\n\n")[0].splitlines()
    headings, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    columns = {"torch": "torch_grad_scaler", "Keras 3": "keras3_loss_scale_optimizer"}
    for heading, file in (columns | {"Megatron-LM": "megatron_dynamic_grad_scaler"}).items():
        cells = [(row[1], row[headings.index(heading)]) for row in rows]
        named = {theirs.split("`")[1]: ours.split("`")[1] for ours, theirs in cells if "`" in theirs}
        used = {name: SETTINGS[file][0].get(name, name) for name in RECORDS[file][0]["config"]}
        assert named == {name: ours for name, ours in used.items() if ours != "multiplier"}
