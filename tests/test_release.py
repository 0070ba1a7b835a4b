"""What a release says of itself in several places is the same in all of them."""

import re
from pathlib import Path

import jax_lossscale as jls

ROOT = Path(__file__).parent.parent


def test_version_and_date_are_those_of_the_changelog():
    version, date = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert version == jls.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == version
    assert re.search(r'^date-released: "(.*)"$', citation, re.MULTILINE)[1] == date


def test_the_hosted_ci_runs_what_a_contributor_runs():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: bash .ci/run" in workflow
    assert "run: python tests/versions.py" in workflow
