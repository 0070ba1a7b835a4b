"""What of the docstrings is written for Python's own tools, put as Markdown has it."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL_BLOCK = re.compile(r"(?m)(?<=\S)::$|^\s*::\n\n")


class PlainDocstrings(griffe.Extension):
    """A colon in front of indented code where reStructuredText has two."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever has one."""
        del kwargs
        if obj.docstring:
            obj.docstring.value = LITERAL_BLOCK.sub(lambda match: ":" if match[0] == "::" else "", obj.docstring.value)
