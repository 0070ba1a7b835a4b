"""Each promise on the page `docs/numerics.md` names tests, which fail if the promise is broken."""

import json
import re
import shutil
from pathlib import Path

import pytest
from programs.starting import run_python

ROOT = Path(__file__).parent.parent
# The keys are the headings of the promises. Each value contains one entry per test that the page names, in the same
# order: a file of the package, a piece of code that occurs once in the file, and its replacement.
BREAKS = json.loads((ROOT / "tools" / "promises.json").read_text())
PAGE = (ROOT / "docs" / "numerics.md").read_text()


def promises():
    """Return the tests that the page names below each heading."""
    sections = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    return {heading: re.findall(r"`(tests/[\w/]+\.py::\w+)`", text) for heading, text in texts.items()}


PROMISES = promises()


def test_every_promise_has_limits_and_tests():
    """`tests/test_docs.py` checks that the tests exist."""
    assert len(PROMISES) > 20
    for text in re.split(r"^### .+$", PAGE, flags=re.MULTILINE)[1:]:
        assert text.count("**Limits.** ") == text.count("**Test.** ") == 1
    assert all(PROMISES.values())


def test_every_test_of_a_promise_has_a_change_that_breaks_it():
    assert {heading: len(breaks) for heading, breaks in BREAKS.items()} == {
        heading: len(tests) for heading, tests in PROMISES.items()
    }
    for file, piece, _ in (broken for breaks in BREAKS.values() for broken in breaks):
        found = (ROOT / "jax_lossscale" / file).read_text().count(piece)
        assert found == 1, f"{piece!r} occurs {found} times in {file}; update the change in tools/promises.json"


CASES = [
    pytest.param(test, *broken, id=f"{heading} ({test.partition('::')[2]})")
    for heading, tests in PROMISES.items()
    for test, broken in zip(tests, BREAKS[heading], strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("test", "file", "piece", "broken"), CASES)
def test_promise_test_fails_if_the_promise_is_broken(test, file, piece, broken, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for folder in "jax_lossscale", "tests", "tools", "benchmarks", "docs":
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "jax_lossscale" / file
    path.write_text(path.read_text().replace(piece, broken))
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "", test]
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    # Exit status 1 means that tests failed. Other errors have another status.
    output = run_python(*command, cwd=tmp_path, status=1, **variables)
    name = test.partition("::")[2]
    assert re.search(rf"^FAILED tests/[\w/]+\.py::{name}\b", output, re.MULTILINE), output
