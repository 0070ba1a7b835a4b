"""Pages of the site that are created from files outside `docs`, and links to them.

The README, the changelog, CONTRIBUTING, the benchmark results, the notebooks and the examples are files of the
repository. Each of these files is also a page of the site, and the README is the front page. All links are written as
relative paths in the repository, so that they also work there. This hook replaces each link to one of these files
with a link to its page. A link to a file without a page is not changed, so that mkdocs reports it as an error.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import notebook  # noqa: E402

DOCUMENTS = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
}
# Search results are ordered: first explanations, then the API reference, and then long pages and old results.
SEARCH_BOOSTS = {
    "choosing.md": 3,
    "why.md": 2,
    "guide/": 2,
    "troubleshooting.md": 5,
    "migrating.md": 2,
    "glossary.md": 0.5,
    "api/": 0.5,
    "examples/": 0.5,
    "notebooks/": 0.5,
    "accuracy.md": 1.5,
    "frameworks/": 1.5,
    "results": 0.2,
    "contributing.md": 0.2,
}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages_elsewhere() -> dict[str, str]:
    """Return a mapping from the files outside `docs` to the paths of their pages."""
    pages = dict(DOCUMENTS)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        pages[f"benchmarks/results/{path.name}"] = f"results/{path.name}"
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.md"
    for path in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{path.name}"] = f"examples/{path.stem}.md"
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are created from files outside `docs`."""
    for source, page in pages_elsewhere().items():
        path = ROOT / source
        content, pictures, inclusion = path.read_text(), {}, InclusionLevel.INCLUDED
        if path.suffix == ".ipynb":
            content, pictures = notebook.as_markdown(content, path.stem)
        elif path.suffix == ".py":
            content = f"# {path.name}\n\n```python\n{content}```\n"
            inclusion = InclusionLevel.NOT_IN_NAV  # The page of the examples links to the programs.
        if page.startswith("results"):
            inclusion = InclusionLevel.NOT_IN_NAV  # The page on performance links to the results.
        content = with_links_to_pages(content, source, page)
        files.append(File.generated(config, page, content=content, inclusion=inclusion))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the search boost of a page, and rewrite the links of a page in `docs`."""
    del config, files
    uri = page.file.src_uri
    for beginning, boost in SEARCH_BOOSTS.items():
        if uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    if page.file.generated_by is not None:
        return markdown  # `on_files` has already rewritten the links.
    return with_links_to_pages(markdown, f"docs/{uri}", uri)


def with_links_to_pages(markdown: str, source: str, page: str) -> str:
    """Return a text in which links between files of the repository are replaced with links between pages.

    Args:
      markdown: the text of a file.
      source: the path of the file in the repository.
      page: the path of its page in the site.
    """
    pages = {**pages_elsewhere(), "examples": "examples.md", "notebooks": "notebooks/index.md"}

    def rewritten(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        linked_page = pages.get(linked, linked.removeprefix("docs/") if linked.startswith("docs/") else None)
        if linked_page is None:
            return match[0]
        return f"{before}{posixpath.relpath(linked_page, posixpath.dirname(page) or '.')}{anchor or ''}{after}"

    blocks = FENCED.findall(markdown)
    parts = FENCED.split(markdown)
    text = [LINK.sub(rewritten, part) for part in parts]
    return "".join(part + block for part, block in zip(text, [*blocks, ""], strict=True))
