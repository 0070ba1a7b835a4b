"""Version numbers, dates and names of extras are consistent in all files."""

import re
import tomllib
from pathlib import Path

import jax_lossscale as jls

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_and_date_equal_those_of_the_changelog():
    version, date = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert version == jls.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == version
    assert re.search(r'^date-released: "(.*)"$', citation, re.MULTILINE)[1] == date


def test_hosted_ci_runs_the_same_scripts_as_contributors():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: bash .ci/run" in workflow
    assert "run: python tools/versions.py" in workflow


def test_extras_and_groups_named_in_texts_and_errors_exist():
    """Extras are written `.[name]` or "extra `name`", and groups are written `--group name` or "group `name`"."""
    names = ("benchmarks", "docs", "examples", "jax_lossscale", "notebooks", "tests", "tools")
    paths = [path for name in names for kind in ("*.py", "*.md") for path in (ROOT / name).rglob(kind)]
    paths += [ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "ci.yml", ROOT / "mkdocs.yml"]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
    text = "\n".join(path.read_text() for path in paths if path != Path(__file__))
    lists = re.findall(r"(?:\s|[\"'])\.\[([a-z][\w,-]*)\]", text) + re.findall(r"\bextras? `+([\w-]+)`", text)
    extras = {name for listed in lists for name in listed.split(",")}
    groups = set(re.findall(r"(?:--group |\bgroup `+)([a-z][\w-]*)", text))
    assert len(extras) > 3
    assert len(groups) > 3
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])
    assert groups <= set(PYPROJECT["dependency-groups"])
