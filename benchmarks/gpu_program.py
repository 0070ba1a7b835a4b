"""Reads what XLA compiled for a GPU: the kernels that a step launches, and what each of them moves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

# A fusion is one kernel. These are none: they only name what is in memory already, or wait for it.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "all-reduce-done"}
# These would hide kernels from the count. They are not to be expected here.
_UNREADABLE = re.compile(r"call|while|(?!all-reduce-).*-start")


@dataclass(frozen=True)
class Instruction:
    """A line of HLO."""

    shape: str  # of the result, or of all results
    opcode: str
    operands: list[str]
    callees: list[str]  # the computations of a fusion, the branches of a conditional
    number: int  # of a parameter

    @property
    def is_kernel(self) -> bool:
        """Whether it is launched."""
        return self.opcode not in _NO_KERNEL


Computation: TypeAlias = Mapping[str, Instruction]


@dataclass(frozen=True)
class Program:
    """What a step launches.

    Attributes:
      kernels: bytes of each.
      before_the_update: the kernels between the gradients and the first use of the parameters.
      copies: of arrays, in whatever branch.
      conditionals: as many of them as there are.
      temporaries: bytes.
    """

    kernels: list[int]
    before_the_update: set[str]
    copies: int
    conditionals: int
    temporaries: int

    @property
    def bytes(self) -> int:
        """Read and written, by all kernels."""
        return sum(self.kernels)


def read(text: str, leaves: int, temporaries: int) -> Program:
    """Of a step whose first ``leaves`` arguments are the parameters, and whose last are the gradients."""
    computations, entry = _parse(text)
    launched = [entry, *(computations[name] for name in _branches(computations, entry))]
    instructions = [instruction for computation in launched for instruction in computation.values()]
    return Program(
        list(_kernels(computations, entry)),
        _before_the_update(entry, leaves),
        sum(_copies(computations, instruction) for instruction in instructions),
        sum(instruction.opcode == "conditional" for instruction in instructions),
        temporaries,
    )


def _parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """All computations by name, and the one that is the program."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = current
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            current = computations[header[2]] = {}
            entry = current if header[1] else entry
        elif parts := re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)", line):
            name, shape, opcode, inside, attributes = parts.groups()
            if _UNREADABLE.fullmatch(opcode):
                raise NotImplementedError(f"the program has a {opcode!r}, whose kernels are not counted yet")
            callees = re.findall(r"(?:calls|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", attributes)
            names = [callee for group in callees for callee in re.findall(r"%([^\s,}]+)", group)]
            number = int(inside) if opcode == "parameter" else -1
            current[name] = Instruction(shape, opcode, re.findall(r"%([^\s,]+)", inside), names, number)
    if not entry:
        raise ValueError("the text of the program has no entry computation")
    return dict(computations), entry


def _branches(computations: Mapping[str, Computation], computation: Computation) -> Iterator[str]:
    """All branches of all conditionals, and of those within them."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            for name in instruction.callees:
                yield name
                yield from _branches(computations, computations[name])


def _kernels(computations: Mapping[str, Computation], computation: Computation) -> Iterator[int]:
    """The bytes that each kernel reads and writes."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            yield from max((list(_kernels(computations, computations[name])) for name in instruction.callees), key=sum)
        elif instruction.is_kernel:
            yield _bytes(instruction.shape) + sum(_bytes(computation[name].shape) for name in instruction.operands)


def _before_the_update(entry: Computation, leaves: int) -> set[str]:
    arguments = {name: instruction.number for name, instruction in entry.items() if instruction.opcode == "parameter"}
    params = {name for name, number in arguments.items() if number < leaves}
    grads = {name for name, number in arguments.items() if number >= len(arguments) - leaves}

    after_grads = set(grads)
    reads_params = set(params)  # or only names a parameter, such as a tuple
    for name, instruction in entry.items():  # operands come first
        if after_grads.intersection(instruction.operands):
            after_grads.add(name)
        if any(n in params or (n in reads_params and not entry[n].is_kernel) for n in instruction.operands):
            reads_params.add(name)
    waited_for: set[str] = set()
    for name, instruction in reversed(entry.items()):
        if name in waited_for or (name in reads_params and instruction.is_kernel):
            waited_for.update(instruction.operands)
    return {name for name in waited_for & after_grads - reads_params if entry[name].is_kernel}


def _copies(computations: Mapping[str, Computation], instruction: Instruction) -> int:
    """How many arrays are copied, by the instruction or by a fusion of nothing but copies; scalars are none."""
    if instruction.opcode == "fusion":
        inside = [part for name in instruction.callees for part in computations[name].values() if part.is_kernel]
        return sum(_is_copy(part) for part in inside) if all(map(_is_copy, inside)) else 0
    return int(_is_copy(instruction))


def _is_copy(instruction: Instruction) -> bool:
    return instruction.opcode == "copy" and "[]" not in instruction.shape


def _bytes(shape: str) -> int:
    """Of an array such as ``f16[512,64]{1,0}``, or of all arrays of a tuple."""
    total = 0
    for bits, dimensions in re.findall(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shape):
        size = max(1, int(bits or 8) // 8)
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension)
        total += size
    return total
