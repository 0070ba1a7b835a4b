"""Each cell in the table of `docs/migrating.md` describes the actual behavior of the library in its column.

`peers` contains one module per library, with one function per row. Each function runs the library and returns the words
of the table. Tests of packages that are not installed are skipped. To run all tests, use ``pip install torch==2.15.0
keras==3.15.1 tensorflow-cpu==2.21.0`` and ``python -m pytest -m peers tests/test_peers.py``.
"""

import importlib
import importlib.metadata
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "migrating.md").read_text()

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LIBRARIES = {  # The keys are the column headings. The values are the module in `peers`, the package and its version.
    "jax_lossscale": ("ours", "jax_lossscale", ""),
    "jmp 0.0.4": ("jmp_", "jmp", "0.0.4"),
    "flax 0.12 `DynamicScale`": ("flax_", "flax", "0.12"),
    "torch 2.15 `GradScaler`": ("torch_", "torch", "2.15"),
    "Keras 3.15 `LossScaleOptimizer`, on jax": ("keras_", "keras", "3.15"),
}
TABLE = {  # The keys are the first cells of the rows. The values are the function and the cells of all columns.
    "grows after (N requested)": ("growth", ["N", "N", "N + 1", "N", "N"]),
    "never lower than": (
        "floor",
        [
            "1, or `min_loss_scale`",
            "1; a custom minimum is lost under `jit`",
            "1.2e-38, or `minimum_scale`",
            "0",
            "0",
        ],
    ),
    "never higher than": ("ceiling", ["2^127, or `max_loss_scale`", "2^127", "3.4e+38", "2^127", "infinity"]),
    "returned loss if the gradients overflow": (
        "value",
        [
            "the true loss",
            "the scaled loss, which you must divide",
            "the true loss, or infinity if loss times scale overflows; on the first step, NaN if the loss is float16",
            "the true loss",
            "the true loss",
        ],
    ),
    "scaled and unscaled at a scale of 2^127": (
        "unscaling",
        ["exact", "zeros", "zeros outside `jit`", "exact", "zeros in `jit`"],
    ),
    "float16 gradients of float32 parameters": (
        "float16_gradients",
        [
            "unscaled in float32",
            "in float32, or float16 if the scale is weakly typed",
            "unscaled in float32",
            "rejected",
            "unscaled in float32",
        ],
    ),
    "the gradient function accepts keyword arguments, `has_aux`, `argnums`": (
        "arguments",
        ["all three", "no such function", "`has_aux`, `argnums`", "no such function", "no such function"],
    ),
    "gradients overflow on one device only, and are not averaged": (
        "one_device",
        [
            "all skip (`axis_name`)",
            "each device decides on its own",
            "all skip (`axis_name`, which averages gradients)",
            "each process decides on its own",
            "each device decides on its own",
        ],
    ),
    "compilations over several steps": (
        "compilations",
        ["1", "1, or 2 if the scale is weakly typed", "2", "none, because Python makes the decision in each step", "1"],
    ),
    "skipping a step for another reason": (
        "own_reasons",
        [
            "`skip_if`, `value`",
            "manually: `select_tree`",
            "manually: `jnp.where`",
            "manually: call neither `step` nor `update`",
            "manually: do not call it",
        ],
    ),
    "report of the non-finite layer": (
        "which_layer",
        ["`record_bad_steps`, `explain`", "none", "none", "none", "none"],
    ),
    "hysteresis": (
        "hysteresis",
        ["refilled when the scale grows, or on each finite step", "none", "none", "none", "none"],
    ),
    "schedule on a skipped step": (
        "schedule",
        [
            "does not advance",
            "advances unless you select its state",
            "advances unless you select its state",
            "advances unless you check",
            "does not advance",
        ],
    ),
}
RECORDS = {  # The keys are files in `golden`. The values are the package and its version.
    "tf1_dynamic_loss_scale": ("tensorflow", "2.21"),
    "torch_grad_scaler": ("torch", "2.15"),
    "keras3_loss_scale_optimizer": ("keras", "3.15"),
}

# Importing other packages can cause warnings.
pytestmark = [pytest.mark.ci, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def require(package, version):
    """Skip the test unless this version of the package is installed."""
    pytest.importorskip(package, reason=f"{package} {version} is not installed", exc_type=ImportError)
    if package != "jax_lossscale":
        installed = importlib.metadata.version("tensorflow_cpu" if package == "tensorflow" else package)
        if not installed.startswith(version):
            pytest.skip(f"the table describes {package} {version}, but {installed} is installed")


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_table_on_the_page_equals_the_table_here():
    section = re.search(
        r"^## How it differs from jmp, flax, torch and Keras\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL
    )[1]
    head, _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    assert head == ["", *LIBRARIES]
    assert {row[0]: row[1:] for row in rows} == {question: answers for question, (_, answers) in TABLE.items()}
    assert all(all(row) for row in rows)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("question", TABLE)
def test_library_behaves_as_the_table_states(question, library):
    module, package, version = LIBRARIES[library]
    require(package, version)
    function, answers = TABLE[question]
    answer = getattr(importlib.import_module(f"peers.{module}"), function)()
    assert answer == answers[list(LIBRARIES).index(library)]


@pytest.mark.parametrize("record", RECORDS)
def test_records_agree_with_the_installed_packages(record):
    require(*RECORDS[record])
    from peers import recorded

    cases = json.loads((ROOT / "tests" / "golden" / f"{record}.json").read_text())["cases"]
    for case in cases:
        scales = list(getattr(recorded, record)(case["config"], case["finite"]))
        np.testing.assert_array_equal(np.float32(scales), np.float32(case["scale"]))
