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
    for place, cell in enumerate(cells):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = ""
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                printed += "".join(output["text"])
                continue
            parts += _as_printed(printed)
            printed = ""
            parts.append(_shown(output["data"], name, _told(cells, place), pictures))
        parts += _as_printed(printed)
    return "\n\n".join(parts) + "\n", pictures


def _as_printed(text: str) -> list[str]:
    text = ESCAPES.sub("", text).rstrip("\n")
    return [f"```{{ .text .output }}\n{text}\n```"] if text else []


def _told(cells: list[dict[str, Any]], place: int) -> str:
    """What a figure shows: its section, and what is said below it, or above it where a section begins below."""
    text = ["".join(cell["source"]) if cell["cell_type"] == "markdown" else "" for cell in cells]
    headings = re.findall(r"^#+ (.+)$", "\n".join(text[:place]), re.MULTILINE)
    below = text[place + 1] if place + 1 < len(text) else ""
    if below and not below.startswith("#"):
        sentences = re.split(r"(?<=\.)\s+", below)
        said = sentences[0] if len(sentences[0]) > 60 else " ".join(sentences[:2])
    else:
        said = re.split(r"(?<=\.)\s+", text[place - 1].strip())[-1]
    words = [*headings[-1:], said.strip().rstrip(":")]
    return " ".join(re.sub(r"[`*\[\]]", "", ": ".join(filter(None, words))).split())


def _shown(data: dict[str, Any], name: str, told: str, pictures: dict[str, bytes]) -> str:
    """The richest form of an output that a page can have; a figure with what is told of it as its text."""
    if "image/png" in data:
        picture = f"{name}_{len(pictures)}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        return f"![{told or f'A figure of the notebook {name}'}]({picture})"
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
        return f'<div class="output">\n{html}\n</div>'
    return "\n".join(_as_printed("".join(data["text/plain"])))
