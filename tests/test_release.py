"""Version numbers, dates and names of extras are consistent in all files."""

import os
import re
import shutil
import subprocess
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


def test_release_workflow_makes_every_link_of_the_readme_absolute(tmp_path):
    """The workflow also compares the tag with the line that contains the version."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    commands = re.findall(r"^ +(sed .* README\.md)$", workflow, re.MULTILINE)
    assert len(commands) == 2
    shutil.copy(ROOT / "README.md", tmp_path)
    environment = os.environ | {"ADDRESS": "https://example.org/owner/name", "GITHUB_SHA": "0123abcd"}
    for command in commands:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
    readme = (tmp_path / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme):
        assert picture.startswith("https://example.org/owner/name/raw/0123abcd/docs/")
    assert f'__version__ = "{jls.__version__}"' in (ROOT / "jax_lossscale" / "_version.py").read_text().splitlines()


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
