"""The tests that pytest selects by default, and for a path on the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_OF_CI_TESTS = "tests/wrapper/test_mixed_precision.py"


def collected(*arguments):
    """Return the output of pytest, which lists the selected tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.ci
def test_all_tests_of_a_path_on_the_command_line_are_selected():
    assert "deselected" not in collected(FILE_OF_CI_TESTS)
    assert "test_bfloat16" in collected(FILE_OF_CI_TESTS)
    assert "test_bfloat16" in collected(f"{FILE_OF_CI_TESTS}::test_bfloat16")
    assert "test_bfloat16" not in collected(FILE_OF_CI_TESTS, "-m", "not ci")
