"""Links from public names in backticks to the API reference.

On every page, names with the prefix `jls.` become links, such as `jls.metrics` and `jls.metrics(opt_state)`. On the
pages of the API reference, which are generated from docstrings, names without a prefix also become links, such as
`metrics`. On other pages, a name without a prefix may belong to another library. The public names are the names that
the pages of the API reference list.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

REFERENCE = Path(__file__).parents[1] / "api"
METHODS = {
    "LossScale": ["scale", "unscale", "adjust", "get_config", "from_config"],
    "LossScaledTransformation": ["update_and_apply"],
}
CODE = re.compile(r"<code>([^<]+)</code>")
LEFT_ALONE = re.compile(r"(<pre\b.*?</pre>|<a\b.*?</a>|<autoref\b.*?</autoref>|<h[1-6]\b.*?</h[1-6]>)", re.DOTALL)


def targets() -> tuple[dict[str, str], dict[str, str]]:
    """Return two mappings from names to their full paths: for all pages, and for the API reference."""
    listed = [
        path
        for page in sorted(REFERENCE.glob("*.md"))
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    listed += [f"jax_lossscale.{kind}.{method}" for kind, methods in METHODS.items() for method in methods]
    everywhere = {path.replace("jax_lossscale", "jls", 1): path for path in listed}
    everywhere["tx.update_and_apply"] = "jax_lossscale.LossScaledTransformation.update_and_apply"
    by_themselves = {path.rpartition(".")[2]: path for path in listed}
    dotted = {path.removeprefix("jax_lossscale."): path for path in listed}
    return everywhere, {**everywhere, **dotted, **by_themselves}


EVERYWHERE, IN_REFERENCE = targets()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the public names on a page with links."""
    del config, files
    known = IN_REFERENCE if page.file.src_uri.startswith("api/") else EVERYWHERE

    def linked(match: re.Match[str]) -> str:
        target = known.get(match[1].partition("(")[0])
        return match[0] if target is None else f'<autoref identifier="{target}">{match[0]}</autoref>'

    parts = LEFT_ALONE.split(html)
    return "".join(part if index % 2 else CODE.sub(linked, part) for index, part in enumerate(parts))
