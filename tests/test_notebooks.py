"""The committed outputs of the notebooks. ``notebooks/execute.py --check`` runs the notebooks."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 500_000  # The figures have 150 dpi.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_contains_the_outputs_of_a_clean_run(path):
    """Every cell was executed once, in order, without an error or a warning, and the file is small."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    assert path.stat().st_size < LARGEST_BYTES
