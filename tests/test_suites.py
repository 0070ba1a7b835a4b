"""The tool that runs other projects' tests under `autocast` finds exactly the planted bugs."""

import shutil
from pathlib import Path

import pytest
import suites
from programs.starting import run_python

PROJECT = Path(__file__).parent / "programs" / "planted_bugs.py"


@pytest.mark.ci
def test_planted_bugs_are_found(tmp_path):
    shutil.copy(PROJECT, tmp_path / "test_planted.py")
    output = run_python(suites.__file__, "planted", tmp_path, "--results", tmp_path / "results")
    records = suites.read(tmp_path / "results" / "planted.jsonl")
    found = sorted((kind, line.partition("::")[2].strip("]")) for kind, line in suites.differences_in(records))
    planted = {"assertion": ["number"], "crash": ["crash"], "exact": ["dtype", "number"], "numbers": ["number"]}
    planted |= {"trace": ["dtype"]}
    assert found == [(kind, f"test_{name}") for kind, names in planted.items() for name in names]
    assert "ValueError: planted" in output
    programs = {record["test"].partition("::test_")[2] for record in records if "program" in record}
    assert programs == {"crash", "dtype", "number", "right", "that_fails_without_autocast"}
