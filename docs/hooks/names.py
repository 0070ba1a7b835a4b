"""Public names in backticks are links to the API reference.

On every page these are names as a user's program has them: `jls.metrics`, `jls.metrics(opt_state)`. In the reference
itself, which is made of docstrings, also names by themselves: `metrics`. (Elsewhere a name by itself may be that of
another library.)
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import jax_lossscale as jls
from jax_lossscale import diagnostics, plotting

METHODS = {
    "LossScale": ["scale", "unscale", "adjust", "get_config", "from_config"],
    "LossScaledTransformation": ["update_and_apply"],
}
INTEROP = {
    "torch": ["from_torch", "to_torch"],
    "keras": ["from_keras", "to_keras"],
    "tensorflow": ["from_tensorflow", "to_tensorflow"],
    "deepspeed": ["from_deepspeed", "to_deepspeed"],
    "megatron": ["from_megatron", "to_megatron"],
    "jmp": ["from_jmp", "to_jmp"],
    "flax": ["from_flax", "to_flax", "TrainState", "Optimizer"],
    "equinox": ["filter_value_and_scaled_grad"],
}
NO_PAGE = {"__version__", "diagnostics", "plotting"}
CODE = re.compile(r"<code>([^<]+)</code>")
LEFT_ALONE = re.compile(r"(<pre\b.*?</pre>|<a\b.*?</a>|<autoref\b.*?</autoref>|<h[1-6]\b.*?</h[1-6]>)", re.DOTALL)


def targets() -> tuple[dict[str, str], dict[str, str]]:
    """Names as written, and what they stand for: those of any page, and those of the reference only."""
    everywhere = {f"jls.{name}": f"jax_lossscale.{name}" for name in jls.__all__ if name not in NO_PAGE}
    reference = {name: f"jax_lossscale.{name}" for name in jls.__all__ if name not in NO_PAGE}
    for module in (diagnostics, plotting):
        for name in module.__all__:
            path = f"{module.__name__}.{name}"
            everywhere[path.replace("jax_lossscale", "jls")] = path
            reference[name] = path
    for peer, names in INTEROP.items():
        for name in names:
            path = f"jax_lossscale.interop.{peer}.{name}"
            everywhere[f"jls.interop.{peer}.{name}"] = path
            reference[name] = path
    for kind, methods in METHODS.items():
        for method in methods:
            path = f"jax_lossscale.{kind}.{method}"
            everywhere[f"jls.{kind}.{method}"] = path
            reference[method] = reference[f"{kind}.{method}"] = path
    everywhere["tx.update_and_apply"] = "jax_lossscale.LossScaledTransformation.update_and_apply"
    return everywhere, reference


EVERYWHERE, REFERENCE = targets()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the names in a page."""
    del config, files
    is_reference = page.file.src_uri.startswith("api/")
    known = {**EVERYWHERE, **REFERENCE} if is_reference else EVERYWHERE

    def linked(match: re.Match[str]) -> str:
        target = known.get(match[1].partition("(")[0])
        return match[0] if target is None else f'<autoref identifier="{target}">{match[0]}</autoref>'

    parts = LEFT_ALONE.split(html)
    return "".join(part if index % 2 else CODE.sub(linked, part) for index, part in enumerate(parts))
