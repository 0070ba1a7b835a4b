"""The code blocks of each page in `docs` run in order, in one namespace, and print the output shown below them.

A block below ``<!-- needs: torch -->`` only runs if that package is installed. A block below ``<!-- not run: why -->``
is compiled but not executed. A page that starts with ``<!-- this page needs: flax -->`` only runs if all listed
packages are installed.
"""

import re
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGE_NEEDS = re.compile(r"\A<!-- this page needs: ([^\n]+) -->\n")
BLOCK = re.compile(
    r"^(?:<!-- (needs|not run): ([^\n]+) -->\n)?```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
API = DOCS / "api"
# The blocks of these pages take seconds, and `tests/frameworks` tests the same programs.
WEEKLY = ("frameworks/haiku", "frameworks/linen")
WIDEST_CODE = 78  # Wider lines are hard to read on a phone and in print.


def blocks(page):
    """Yield the code of each Python block, the required package or None, whether the block runs, and its output."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        kind, argument, source, printed = match.groups()
        first_line = text.count("\n", 0, match.start(3))
        code = compile(
            "\n" * first_line + source, str(page.relative_to(DOCS.parent)), "exec"
        )  # The empty lines make tracebacks show the line number of the page.
        yield code, argument if kind == "needs" else None, kind != "not run", printed


def import_or_skip(package):
    with warnings.catch_warnings(action="ignore"):  # Importing other libraries can cause warnings.
        pytest.importorskip(package)


def packages(page):
    return [None, *dict.fromkeys(package for _, package, _, _ in blocks(page) if package)]


@pytest.mark.parametrize(
    ("page", "package"),
    [
        pytest.param(page, package, id=f"{name}-{package or 'ours'}", marks=pytest.mark.slow if name in WEEKLY else ())
        for page in PAGES
        for name in [str(page.relative_to(DOCS).with_suffix(""))]
        for package in packages(page)
    ],
)
def test_code_blocks_run_and_print_the_shown_output(page, package, capsys):
    needs = PAGE_NEEDS.match(page.read_text())
    for needed in [*(needs[1].split(", ") if needs else []), *([package] if package else [])]:
        import_or_skip(needed)
    namespace = {"__name__": page.stem}
    for code, needed, runs, printed in blocks(page):
        if runs and needed in (None, package):
            capsys.readouterr()
            exec(code, namespace)
            if printed is not None:
                assert capsys.readouterr().out == printed


def name_of(page):
    return str(page.relative_to(DOCS.parent))


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"], ids=name_of)
def test_links_have_existing_targets(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_index_of_the_guide_links_to_every_page_of_the_guide():
    links = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "guide" / "index.md").read_text()))
    assert links == {page.name for page in (DOCS / "guide").glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_named_on_pages_exist(page):
    """Pages refer to tests as ``tests/file.py::test_name`` in backticks."""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        source = (DOCS.parent / path).read_text()
        assert not name or f"def {name}(" in source, (path, name)


def listed_in_the_reference():
    return [
        path for page in sorted(API.glob("*.md")) for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


def public_names():
    """Yield the public names with their modules. `tests/test_public_api.py` checks this list."""
    module = ""
    for line in (DOCS.parent / "tests" / "public_api.txt").read_text().splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif name := re.match(r"(?:class )?([a-zA-Z]\w*)(?!\w|\(\)\.|: module)", line):
            yield f"{module}.{name[1]}"


@pytest.mark.parametrize(
    "page", [*PAGES, *DOCS.parent.glob("*.md"), DOCS.parent / "examples" / "README.md"], ids=name_of
)
def test_code_fences_are_closed(page):
    fences = re.findall(r"^\s*```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[1::2]) <= {""}  # Closing fences have no language.


def test_api_reference_lists_every_public_name_once():
    """The classes of the entries of reports are not exported. They are listed by the names of their private modules."""
    listed = listed_in_the_reference()
    assert sorted(path for path in listed if "._" not in path) == sorted(public_names())
    assert len(set(listed)) == len(listed)


def test_api_overview_names_every_public_function():
    overview = (API / "index.md").read_text()
    functions = {
        name.removeprefix("jax_lossscale.")
        for name in public_names()
        if ".interop." not in name and not name.rpartition(".")[2][0].isupper()
    }
    assert {name for name in functions if f"`jls.{name}`" not in overview} == set()


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md"], ids=name_of)
def test_code_blocks_fit_the_width_of_the_site(page):
    lines = [line for match in BLOCK.finditer(page.read_text()) for line in match[3].splitlines()]
    assert [line for line in lines if len(line) > WIDEST_CODE] == []
