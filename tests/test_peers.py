"""Each cell in the table of `docs/migrating.md` describes the actual behavior of the library in its column.

`peers` contains one module per library, with one function per row. Each function runs the library and returns the words
of the table. Other tests check the column of jax_lossscale. Tests of packages that are not installed are skipped. To
run all tests, use ``pip install torch==2.15.0 keras==3.15.1 tensorflow-cpu==2.21.0`` and ``python -m pytest -m peers
tests/test_peers.py``.
"""

import importlib
import importlib.metadata
import json
import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "migrating.md").read_text()

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LIBRARIES = {  # The keys are the column headings. The values are the module in `peers`, the package and its version.
    "jmp 0.0.4": ("jmp_", "jmp", "0.0.4"),
    "flax 0.12 `DynamicScale`": ("flax_", "flax", "0.12"),
    "torch 2.15 `GradScaler`": ("torch_", "torch", "2.15"),
    "Keras 3.15 `LossScaleOptimizer`, on jax": ("keras_", "keras", "3.15"),
}
FUNCTIONS = {  # The keys are the first cells of the rows. The values are the functions in the modules.
    "grows after (N requested)": "growth",
    "never lower than": "floor",
    "never higher than": "ceiling",
    "returned loss if the gradients overflow": "value",
    "scaled and unscaled at a scale of 2^127": "unscaling",
    "float16 gradients of float32 parameters": "float16_gradients",
    "the gradient function accepts keyword arguments, `has_aux`, `argnums`": "arguments",
    "gradients overflow on one device only, and are not averaged": "one_device",
    "compilations over several steps": "compilations",
    "skipping a step for another reason": "own_reasons",
    "report of the non-finite layer": "which_layer",
    "hysteresis": "hysteresis",
    "schedule on a skipped step": "schedule",
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
    installed = importlib.metadata.version("tensorflow_cpu" if package == "tensorflow" else package)
    if not installed.startswith(version):
        pytest.skip(f"the table describes {package} {version}, but {installed} is installed")


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table():
    """Return the cells of the table on the page, by library and question."""
    section = PAGE.partition("\n## How it differs from jmp, flax, torch and Keras\n")[2].partition("\n## ")[0]
    (_, *headings), _, *rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    return {
        (heading, question): answer
        for question, *answers in rows
        for heading, answer in zip(headings, answers, strict=True)
    }


TABLE = table()


def test_each_row_and_column_of_the_table_has_a_test():
    ours = {("jax_lossscale", question) for question in FUNCTIONS}
    assert TABLE.keys() == ours | {(library, question) for library in LIBRARIES for question in FUNCTIONS}
    assert all(TABLE.values())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("question", FUNCTIONS)
def test_library_behaves_as_the_table_states(question, library):
    module, package, version = LIBRARIES[library]
    require(package, version)
    answer = getattr(importlib.import_module(f"peers.{module}"), FUNCTIONS[question])()
    assert answer == TABLE[library, question]


@pytest.mark.parametrize("record", RECORDS)
def test_records_agree_with_the_installed_packages(record):
    require(*RECORDS[record])
    from peers import recorded

    cases = json.loads((ROOT / "tests" / "golden" / f"{record}.json").read_text())["cases"]
    for case in cases:
        scales = list(getattr(recorded, record)(case["config"], case["finite"]))
        np.testing.assert_array_equal(np.float32(scales), np.float32(case["scale"]))
