"""Reads what XLA compiled for a GPU: the kernels that a step launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.gpu.hlo import Computation, Instruction, parse
from benchmarks.gpu.kernels import Kernel, kernels


@dataclass(frozen=True)
class Program:
    """What a step launches.

    Attributes:
      kernels: with all their launches.
      copies: of arrays, in whatever branch.
      conditionals: as many of them as there are.
      temporaries: bytes.
    """

    kernels: list[Kernel]
    copies: int
    conditionals: int
    temporaries: int

    @property
    def bytes(self) -> int:
        """Read and written, by all kernels."""
        return round(sum(kernel.launches * kernel.bytes for kernel in self.kernels))

    @property
    def seconds(self) -> float:
        """Predicted, of all kernels, on one H100."""
        return sum(kernel.seconds for kernel in self.kernels)

    def over(self, other: Program) -> tuple[float, float]:
        """Predicted time and temporaries, each over that of another program."""
        return self.seconds / other.seconds, self.temporaries / other.temporaries


def read(text: str, temporaries: int) -> Program:
    """From the text of what XLA compiled."""
    computations, entry = parse(text)
    launched = [entry, *(computations[name] for name in _branches(computations, entry))]
    instructions = [instruction for computation in launched for instruction in computation.values()]
    return Program(
        list(kernels(computations, entry)),
        sum(_copies(computations, instruction) for instruction in instructions),
        sum(instruction.opcode == "conditional" for instruction in instructions),
        temporaries,
    )


def _branches(computations: Mapping[str, Computation], computation: Computation) -> Iterator[str]:
    """All branches of all conditionals, and of those within them."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            for name in instruction.callees:
                yield name
                yield from _branches(computations, computations[name])


def _copies(computations: Mapping[str, Computation], instruction: Instruction) -> int:
    """How many arrays are copied, by the instruction or by a fusion of nothing but copies; scalars are none."""
    if instruction.opcode == "fusion":
        inside = [
            part for name in instruction.callees for part in computations[name].values() if part.opcode != "parameter"
        ]
        return sum(_is_copy(part) for part in inside) if all(map(_is_copy, inside)) else 0
    return int(_is_copy(instruction))


def _is_copy(instruction: Instruction) -> bool:
    return instruction.opcode == "copy" and "[]" not in instruction.shape
