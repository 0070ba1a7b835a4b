"""Conversion of notebooks to pages, with their text, code and stored outputs. No code is executed."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def as_markdown(source: str, name: str) -> tuple[str, dict[str, bytes]]:
    """Return the page in Markdown, and its images by file name.

    Args:
      source: the JSON text of the notebook.
      name: the prefix of the file names of the images.
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
    """Return an output as an image, HTML or text, in this order of preference; ``alt`` describes an image."""
    if "image/png" in data:
        picture = f"{name}_{len(pictures)}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        if not alt:
            raise ValueError(f"{picture} needs a description. Add it to the metadata of its cell, as `alt`.")
        return f"![{alt}]({picture})"
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
        return f'<div class="output">\n{html}\n</div>'
    return "\n".join(_as_printed("".join(data["text/plain"])))
