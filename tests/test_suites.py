"""The tool that runs other projects' tests under `autocast` finds exactly the planted bugs."""

import argparse
import shutil
from pathlib import Path

import pytest
import suites
from programs.starting import run_python

PROJECT = Path(__file__).parent / "programs" / "planted_bugs.py"


@pytest.mark.slow
def test_planted_bugs_are_found(tmp_path):
    shutil.copy(PROJECT, tmp_path / "test_planted.py")
    (tmp_path / "test_not_collected.py").write_text("import no_such_module")
    output = run_python(suites.__file__, "planted", tmp_path, "--results", tmp_path / "results")
    records = suites.read(tmp_path / "results" / "planted.jsonl")
    found = sorted((kind, line.partition("::")[2].strip("]")) for kind, line in suites.differences_in(records))
    planted = {"assertion": ["number"], "crash": ["crash"], "exact": ["dtype", "number"]}
    planted |= {"numbers": ["infinite", "number"], "trace": ["dtype"]}
    expected = [(kind, f"test_{name}") for kind, names in planted.items() for name in names]
    assert found == sorted([("not run", ""), *expected])
    failed = "2 x planted: ['AssertionError']"  # `test_number` and `test_that_fails_without_autocast`
    for text in ("ValueError: planted", "No module named 'no_such_module'", failed):
        assert text in output
    right = [record for record in records if "program" in record and record["test"].endswith("::test_right")]
    assert all(record["sensitivities"].keys() == record["errors"].keys() != set() for record in right)
    programs = {record["test"].partition("::test_")[2] for record in records if "program" in record}
    assert programs == {"crash", "dtype", "infinite", "number", "right", "that_fails_without_autocast"}


def test_project_without_tests_is_reported(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text('{"run": {"version": "1", "commit": "", "day": ""}}\n')
    suites.report(tmp_path, save=False)
    assert "1 x empty: not run: no test ran" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no test file"):
        suites.run(argparse.Namespace(project="planted", checkout=tmp_path, results=tmp_path, minutes=1))
