"""Conversion of docstrings and dataclasses to the forms that mkdocstrings expects."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL_BLOCK = re.compile(r"(?m)(?<=\S)::$|^\s*::\n\n")
PRIVATE_ARGUMENT = re.compile(r"(?m)^  _\w+: .*\n(?:    .*\n)*")
RETURNS = re.compile(r"(?m)^(Returns:\n +)(?=\S)")


class HouseStyle(griffe.Extension):
    """Griffe extension for the conventions of this package in docstrings and dataclass fields."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of an object, if it has one."""
        del kwargs
        if obj.docstring is None:
            return
        # reStructuredText marks indented code with a double colon, and Markdown needs a single colon.
        text = LITERAL_BLOCK.sub(lambda match: ":" if match[0] == "::" else "", obj.docstring.value)
        text = PRIVATE_ARGUMENT.sub("", text)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            # Without an explicit type, griffe would parse the text before the first colon as the type.
            text = RETURNS.sub(lambda match: f"{match[1]}{obj.returns}: ", text)
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Convert the fields of dataclasses to `dataclasses.field` before griffe builds the signatures."""
        del kwargs
        for module in _modules(pkg):
            for cls in module.classes.values():
                if not cls.is_alias:
                    _as_plain_fields(cls)


class _Field(griffe.ExprName):
    """Griffe expression for `dataclasses.field`, for use in modules that do not import `dataclasses`."""

    @property
    def canonical_path(self) -> str:
        """The full path of `dataclasses.field`."""
        return "dataclasses.field"


def _modules(module: griffe.Module) -> list[griffe.Module]:
    below = [child for child in module.modules.values() if not child.is_alias]
    return [module, *(found for child in below for found in _modules(child))]


def _as_plain_fields(cls: griffe.Class) -> None:
    for name, attribute in list(cls.attributes.items()):
        value = attribute.value
        if not isinstance(value, griffe.ExprCall):
            continue
        if str(value.function) == "static_field":
            value.function = _Field("field", parent=cls.module)
        if name.startswith("_"):
            del cls.members[name]
