"""Pages of the site that are created from files outside `docs`, and links to them.

The README, the changelog, CONTRIBUTING, the notebooks and the examples are files of the repository. Each of these files
is also a page of the site, and the README is the front page. All links are written as relative paths in the repository,
so that the links also work outside the site. This hook replaces each link to one of these files with a link to its
page. The benchmark results are not part of the site, so links to them lead to the repository, whose address is in
`pyproject.toml`. If there is no address, the link is replaced with the path of the file. All other links are not
changed, so that mkdocs reports links to missing pages as errors.

The hook also creates pages at the addresses of earlier versions of the site, which redirect to the new addresses.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
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
}
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")
# The keys are addresses of pages of earlier versions, and the values are the addresses of the new pages.
MOVED = {
    "differences": "migrating",
    "frameworks/bare": "guide/step",
    "frameworks/optax": "guide/recipes",
    "frameworks/orbax": "guide/checkpoints",
    "guide/changes": "why",
    "guide/clipping": "guide/metrics",
    "guide/logging": "guide/metrics",
    "notebooks": "examples",
    "results": "performance",
    **{f"results/{path.stem}": "performance" for path in (ROOT / "benchmarks" / "results").glob("*.md")},
}
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>This page has moved</title>
<meta name="robots" content="noindex">
<script>location.replace("{target}" + location.hash)</script>
<meta http-equiv="refresh" content="1; url={target}">
<p>This page has moved <a href="{target}">to a new address</a>.</p>
</html>
"""
# Search results are ordered: first explanations, then the API reference, and then long pages.
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
    "contributing.md": 0.2,
}
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages_elsewhere() -> dict[str, str]:
    """Return a mapping from the files outside `docs` to the paths of their pages."""
    pages = dict(DOCUMENTS)
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
            inclusion = InclusionLevel.NOT_IN_NAV  # The page on the examples links to the programs.
        content = with_links_to_pages(content, source, page)
        files.append(File.generated(config, page, content=content, inclusion=inclusion))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    for old, new in MOVED.items():
        content = REDIRECT.format(target=posixpath.relpath(new, old) + "/")
        files.append(File.generated(config, f"{old}/index.html", content=content))
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
    """Return the text with links between files of the repository replaced by links for the site.

    Args:
      markdown: the text of a file.
      source: the path of the file in the repository.
      page: the path of its page in the site.
    """
    pages = {**pages_elsewhere(), "examples": "examples.md", "notebooks": "examples.md"}

    def rewritten(match: re.Match[str]) -> str:
        text, anchor = match["text"], match["anchor"] or ""
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        if linked.startswith("benchmarks/"):
            return f"{text}({ADDRESS}/blob/main/{linked}{anchor})" if ADDRESS else f"{text[1:-1]} (`{linked}`)"
        linked_page = pages.get(linked, linked.removeprefix("docs/") if linked.startswith("docs/") else None)
        if linked_page is None:
            return match[0]
        return f"{text}({posixpath.relpath(linked_page, posixpath.dirname(page) or '.')}{anchor})"

    blocks = FENCED.findall(markdown)
    parts = FENCED.split(markdown)
    text = [LINK.sub(rewritten, part) for part in parts]
    return "".join(part + block for part, block in zip(text, [*blocks, ""], strict=True))
