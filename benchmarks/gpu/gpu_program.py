"""Analysis of a program that XLA compiled for a GPU: the kernels that a step launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.gpu.hlo import Computation, Instruction, parse
from benchmarks.gpu.kernels import Kernel, kernels
from benchmarks.gpu.specifications import H100, Gpu


@dataclass(frozen=True)
class Program:
    """The kernels of a compiled step.

    Attributes:
      kernels: the kernels with the number of their launches.
      copies: the number of arrays that are copied in any branch.
      conditionals: the number of conditionals.
      temporaries: the size of temporary memory in bytes.
    """

    kernels: list[Kernel]
    copies: int
    conditionals: int
    temporaries: int

    @property
    def bytes(self) -> int:
        """The number of bytes that all kernels read and write."""
        return round(sum(kernel.launches * kernel.bytes for kernel in self.kernels))

    def seconds(self, gpu: Gpu = H100) -> float:
        """Return the predicted time of all kernels on a GPU in seconds."""
        return sum(kernel.seconds(gpu) for kernel in self.kernels)

    def over(self, other: Program, gpu: Gpu = H100) -> tuple[float, float]:
        """Return the ratios of the predicted times and of the temporaries of this program and another program."""
        return self.seconds(gpu) / other.seconds(gpu), self.temporaries / other.temporaries


def read(text: str, temporaries: int) -> Program:
    """Return the analysis of a compiled program, given its text and the size of its temporaries."""
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
    """Yield the names of all branches of all conditionals, including nested conditionals."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            for name in instruction.callees:
                yield name
                yield from _branches(computations, computations[name])


def _copies(computations: Mapping[str, Computation], instruction: Instruction) -> int:
    """Return the number of arrays that an instruction copies.

    The instruction is either a copy or a fusion that consists only of copies. Scalars are not counted.
    """
    if instruction.opcode == "fusion":
        inside = [
            part for name in instruction.callees for part in computations[name].values() if part.opcode != "parameter"
        ]
        return sum(_is_copy(part) for part in inside) if all(map(_is_copy, inside)) else 0
    return int(_is_copy(instruction))


def _is_copy(instruction: Instruction) -> bool:
    return instruction.opcode == "copy" and "[]" not in instruction.shape
