"""The notebooks as they are committed; ``notebooks/execute.py --check`` runs them."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 500_000  # with figures at 150 dpi
WIDEST_CODE = 88  # as in the pages


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "before_you_train",
        "debugging",
        "distributed",
        "policies",
        "quickstart",
        "underflow",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path):
    """Every cell was executed, once and in order, without an error or a warning, and the file is small."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    assert path.stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_code_is_not_wider_than_a_page_of_the_site(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if len(line) > WIDEST_CODE] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_is_learned_and_what_to_try(path):
    cells = json.loads(path.read_text())["cells"]
    first, last = ("".join(cells[position]["source"]) for position in (0, -1))
    assert cells[0]["cell_type"] == cells[-1]["cell_type"] == "markdown"
    assert first.startswith("# ")
    assert "You will learn" in first
    assert "Try" in last
