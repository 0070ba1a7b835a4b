"""Parser for the text (HLO) of compiled programs."""

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
    """The dtype and the shape of a result of an instruction, or of a part of it."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """The size of all elements in bytes. Elements of less than eight bits occupy one byte each."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * max(1, int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True)
class Instruction:
    """An instruction, which is one line of HLO.

    Attributes:
      name: the name of the instruction.
      shape: the shape of the result, or of all results.
      opcode: the operation, such as "fusion".
      inside: the text in parentheses: the operands, the value of a constant, or the number of a parameter.
      attributes: the text after the parentheses.
      is_root: whether the computation returns the result of this instruction.
    """

    name: str
    shape: str
    opcode: str
    inside: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([^\s,]+)", self.inside)

    @property
    def arrays(self) -> list[Array]:
        """The results."""
        found = _ARRAY.findall(self.shape)
        return [Array(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, _, sizes in found]

    @property
    def bytes(self) -> int:
        """The size of all results in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def callees(self) -> list[str]:
        """The names of the computations of a fusion or a call, or of the branches of a conditional."""
        groups = re.findall(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", self.attributes)
        return [name for group in groups for name in re.findall(r"%([^\s,}]+)", group)]

    def attribute(self, pattern: str) -> str:
        """Return the match of the first group of ``pattern`` in the attributes; "" if there is no match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation: TypeAlias = Mapping[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """Return all computations by name, and the entry computation.

    In each computation, operands precede the instructions that use them.
    """
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
            raise ValueError(f"This line cannot be parsed as an instruction: {line.strip()[:200]}")
    if not entry:
        raise ValueError("The text of the program does not contain an entry computation.")
    return dict(computations), entry


def root(computation: Computation) -> Instruction:
    """Return the instruction whose result a computation returns."""
    return next(instruction for instruction in computation.values() if instruction.is_root)
