"""A notebook as a page: its text, its code, and the outputs that are stored in it. Nothing is run."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def as_markdown(source: str, name: str) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by file name.

    Args:
      source: the notebook, as JSON.
      name: what the pictures' names begin with.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    cells = json.loads(source)["cells"]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = ""
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                printed += "".join(output["text"])
                continue
            parts += _as_printed(printed)
            printed = ""
            parts.append(_shown(output["data"], name, cell["metadata"].get("alt", ""), pictures))
        parts += _as_printed(printed)
    return "\n\n".join(parts) + "\n", pictures


def _as_printed(text: str) -> list[str]:
    text = ESCAPES.sub("", text).rstrip("\n")
    return [f"```{{ .text .output }}\n{text}\n```"] if text else []


def _shown(data: dict[str, Any], name: str, alt: str, pictures: dict[str, bytes]) -> str:
    """The richest form of an output that a page can have; a figure with `alt`, of its cell's metadata, as its text."""
    if "image/png" in data:
        picture = f"{name}_{len(pictures)}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        if not alt:
            raise ValueError(f"{picture} needs a text: say what it shows in its cell's metadata, as `alt`.")
        return f"![{alt}]({picture})"
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
        return f'<div class="output">\n{html}\n</div>'
    return "\n".join(_as_printed("".join(data["text/plain"])))
