"""Recorded runs of other libraries continue with the same scales if their state at step 0 or step 30 is copied.

`docs/migrating.md` shows the arguments of the equivalent `DynamicLossScale` for each library, and `golden/README.md`
describes the source of the records. None of the other libraries is needed.
"""

import dataclasses
import re
from itertools import pairwise

import jax
import pytest
import records
from records import GOLDEN, RECORDS, ULP

import jax_lossscale as jls

pytestmark = pytest.mark.ci

adjust = jax.jit(jls.DynamicLossScale.adjust)

PAGE = (GOLDEN.parents[1] / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CALLS = [block for block in BLOCKS if re.search(r"increment_period=(state|config)\[", block)]


def state_at(record, step):
    return {"current_loss_scale": record["scale"][step], "num_good_steps": record["counter"][step]}


def with_the_same_state(file):
    """Return a function of a record and a step that returns the loss scale after this step."""
    return lambda record, step: dataclasses.replace(records.FILES[file](record["config"]), **state_at(record, step))


def called_on_the_page(number, **names):
    """Execute a code block of `docs/migrating.md` and return the loss scale that it builds from a saved state."""
    exec(CALLS[number], names | {"jls": jls}, names)
    return names["loss_scale"]


def deepspeed_at(record, step):
    state = {key: record[key][step] for key in ("cur_iter", "last_overflow_iter")}
    state |= {"cur_scale": record["scale"][step], "scale_factor": 2.0} | record["config"]
    if "cur_hysteresis" in record:
        state["cur_hysteresis"] = record["cur_hysteresis"][step]
    else:  # These records are from `FP16_Optimizer`, which has no hysteresis.
        state |= {"delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False}
    return called_on_the_page(0, state=state)


def megatron_state(record, step):
    of_state = {"scale": "scale", "growth_tracker": "counter", "hysteresis_tracker": "hysteresis_tracker"}
    return {name: record[recorded][step] for name, recorded in of_state.items()}


def megatron_at(record, step):
    return called_on_the_page(1, config=record["config"], state_dict=megatron_state(record, step))


FILES = {
    **{file: with_the_same_state(file) for file in records.FILES},
    "megatron_dynamic_grad_scaler": megatron_at,
    "deepspeed_loss_scalers": deepspeed_at,
}
CASES = [pytest.param(file, i, id=f"{file}-{i}") for file in FILES for i in range(len(RECORDS[file]))]


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


@pytest.mark.parametrize(("file", "case"), CASES)
@pytest.mark.parametrize("cut", [0, 30])
def test_loss_scale_with_the_same_state_continues_the_record(file, case, cut):
    record = RECORDS[file][case]
    loss_scale = FILES[file](record, cut)
    # After two growths in a row, DeepSpeed is one step ahead, as `docs/migrating.md` states.
    end = second_growth(record, cut) if file == "deepspeed_loss_scalers" else len(record["finite"])
    assert end > cut + 1
    num_changes = 0
    for step in range(cut + 1, end):
        before = record["scale"][step - 1]
        loss_scale = adjust(loss_scale, record["finite"][step])
        num_changes += record["scale"][step] != before
        # The scales are equal if the factors are powers of two. Otherwise, each change of the scale may round
        # differently.
        assert float(loss_scale()) == pytest.approx(record["scale"][step], rel=num_changes * ULP, abs=0), step
        if "counter" in record:
            assert int(loss_scale.num_good_steps) == record["counter"][step], step


def test_deepspeed_grows_one_step_late_only_after_an_overflow():
    """DeepSpeed grows after N + 1 finite steps following an overflow, but after N finite steps following a growth."""
    intervals = {"overflow": set(), "growth": set()}
    for record in RECORDS["deepspeed_loss_scalers"]:
        window, last, since = record["config"]["scale_window"], "overflow", int(record["finite"][0])
        for step, (before, after) in enumerate(pairwise(record["scale"]), start=1):
            since += 1
            if not record["finite"][step]:
                last, since = "overflow", 0
            elif after > before:
                intervals[last].add(since - window)
                last, since = "growth", 0
    assert intervals == {"overflow": {1}, "growth": {0}}


def test_name_table_agrees_with_the_megatron_code_block():
    """Another test checks the code block below the table with the records."""
    rows = PAGE[PAGE.index("| jax_lossscale | torch |") :].partition("\n\n")[0].splitlines()
    column = [cell.strip() for cell in rows[0].split("|")].index("Megatron-LM")
    cells = [[cell.strip().partition(" = ")[0].strip("`") for cell in row.split("|")] for row in rows[2:]]
    named = {cell[1]: cell[column] for cell in cells}
    called = dict(re.findall(r"(\w+)=config\[\"(\w+)\"\]", CALLS[1]), initial_loss_scale="initial_scale")
    assert len(named) == 5
    assert named.items() <= called.items()


def test_number_of_records_and_code_blocks():
    assert len(RECORDS["deepspeed_loss_scalers"]) == 20
    assert len(CALLS) == 2
