"""The pages in `docs` run: every python block, top to bottom, in one namespace.

A block below ``<!-- needs: torch -->`` runs where that package is installed, after the blocks above it; one below
``<!-- not run: why -->`` is only compiled. A page that begins with ``<!-- this page needs: flax -->`` runs where all of
these packages are installed.
"""

import os
import re
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")  # which Keras reads when it is imported
DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGE_NEEDS = re.compile(r"\A<!-- this page needs: ([^\n]+) -->\n")
BLOCK = re.compile(r"^(?:<!-- (needs|not run): ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Each python block's code, the package that it needs (or ``None``), and whether it runs at all."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        kind, argument, source = match.groups()
        first_line = text.count("\n", 0, match.start(3))
        code = compile(
            "\n" * first_line + source, str(page.relative_to(DOCS.parent)), "exec"
        )  # errors give the page's line
        yield code, argument if kind == "needs" else None, kind != "not run"


def import_or_skip(package):
    with warnings.catch_warnings():  # what a peer's own import warns of
        warnings.simplefilter("ignore")
        pytest.importorskip(package)


def packages(page):
    return [None, *dict.fromkeys(package for _, package, _ in blocks(page) if package)]


@pytest.mark.parametrize(
    ("page", "package"),
    [
        pytest.param(page, package, id=f"{page.stem}-{package or 'ours'}")
        for page in PAGES
        for package in packages(page)
    ],
)
def test_the_blocks_of_a_page_run(page, package):
    needs = PAGE_NEEDS.match(page.read_text())
    for needed in [*(needs[1].split(", ") if needs else []), *([package] if package else [])]:
        import_or_skip(needed)
    namespace = {"__name__": page.stem}
    for code, needed, runs in blocks(page):
        if runs and needed in (None, package):
            exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text()
    anchors = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists()
        assert path or anchor in anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_that_a_page_names_exist(page):
    """``tests/file.py::test_name``, in backticks."""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        source = (DOCS.parent / path).read_text()
        assert not name or f"def {name}(" in source, (path, name)
