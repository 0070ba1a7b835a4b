"""Compiled programs as text, HLO, read into instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

_HEADER = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Array:
    """What an instruction gives, or a part of it."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Of all elements; those of less than eight bits take one byte."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * max(1, int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True)
class Instruction:
    """A line of HLO."""

    name: str
    shape: str  # of the result, or of all results
    opcode: str
    inside: str  # the parentheses: operands, or the value of a constant, or the number of a parameter
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Their names."""
        return re.findall(r"%([^\s,]+)", self.inside)

    @property
    def arrays(self) -> list[Array]:
        """The results."""
        found = _ARRAY.findall(self.shape)
        return [Array(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, _, sizes in found]

    @property
    def bytes(self) -> int:
        """Of all results."""
        return sum(array.bytes for array in self.arrays)

    @property
    def callees(self) -> list[str]:
        """The computations of a fusion or a call, the branches of a conditional."""
        groups = re.findall(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", self.attributes)
        return [name for group in groups for name in re.findall(r"%([^\s,}]+)", group)]

    def attribute(self, pattern: str) -> str:
        """What the first group of ``pattern`` matches among the attributes; empty if it does not."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation: TypeAlias = Mapping[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """All computations by name, and the one that is the program. Operands come before what uses them."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = current
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            entry = current if header[1] else entry
        elif parts := _LINE.match(line):
            root, name, *rest = parts.groups()
            current[name] = Instruction(name, *rest, is_root=bool(root))
        elif re.match(r"\s+(ROOT )?%", line):
            raise ValueError(f"This is not read as an instruction: {line.strip()[:200]}")
    if not entry:
        raise ValueError("The text of the program has no entry computation.")
    return dict(computations), entry


def root(computation: Computation) -> Instruction:
    """What a computation returns."""
    return next(instruction for instruction in computation.values() if instruction.is_root)
