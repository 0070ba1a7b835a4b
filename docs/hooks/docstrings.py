"""What of the docstrings and classes is written for Python's own tools, put as mkdocstrings has it."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL_BLOCK = re.compile(r"(?m)(?<=\S)::$|^\s*::\n\n")
PRIVATE_ARGUMENT = re.compile(r"(?m)^  _\w+: .*\n(?:    .*\n)*")
RETURNS = re.compile(r"(?m)^(Returns:\n +)(?=\S)")


class HouseStyle(griffe.Extension):
    """Docstrings and fields as this package writes them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever has one."""
        del kwargs
        if obj.docstring is None:
            return
        # A colon in front of indented code, where reStructuredText has two.
        text = LITERAL_BLOCK.sub(lambda match: ":" if match[0] == "::" else "", obj.docstring.value)
        text = PRIVATE_ARGUMENT.sub("", text)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            # Or whatever stands in front of the first colon of the text would be taken for the type.
            text = RETURNS.sub(lambda match: f"{match[1]}{obj.returns}: ", text)
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Make the fields of the data classes those that griffe knows, before it makes signatures of them."""
        del kwargs
        for module in _modules(pkg):
            for cls in module.classes.values():
                if not cls.is_alias:
                    _as_plain_fields(cls)


class _Field(griffe.ExprName):
    """`dataclasses.field`, in a module that need not import it."""

    @property
    def canonical_path(self) -> str:
        """What the name stands for."""
        return "dataclasses.field"


def _modules(module: griffe.Module) -> list[griffe.Module]:
    below = [child for child in module.modules.values() if not child.is_alias]
    return [module, *(found for child in below for found in _modules(child))]


def _as_plain_fields(cls: griffe.Class) -> None:
    for name, attribute in list(cls.attributes.items()):
        value = attribute.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "static_field":
            value.function = _Field("field", parent=cls.module)
            if name.startswith("_"):
                del cls.members[name]
