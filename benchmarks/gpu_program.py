"""Reads what XLA compiled for a GPU: the kernels that a step launches, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.hlo import Computation, Instruction, parse
from benchmarks.kernels import Kernel, is_kernel, kernels


@dataclass(frozen=True)
class Program:
    """What a step launches.

    Attributes:
      kernels: with all their launches.
      before_the_update: the kernels between the gradients and the first use of the parameters.
      copies: of arrays, in whatever branch.
      conditionals: as many of them as there are.
      temporaries: bytes.
    """

    kernels: list[Kernel]
    before_the_update: set[str]
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


def read(text: str, leaves: int, temporaries: int) -> Program:
    """Of a step whose first ``leaves`` arguments are the parameters, and whose last are the gradients."""
    computations, entry = parse(text)
    launched = [entry, *(computations[name] for name in _branches(computations, entry))]
    instructions = [instruction for computation in launched for instruction in computation.values()]
    return Program(
        list(kernels(computations, entry)),
        _before_the_update(entry, leaves),
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


def _before_the_update(entry: Computation, leaves: int) -> set[str]:
    arguments = {name: int(each.inside) for name, each in entry.items() if each.opcode == "parameter"}
    params = {name for name, number in arguments.items() if number < leaves}
    grads = {name for name, number in arguments.items() if number >= len(arguments) - leaves}

    after_grads = set(grads)
    reads_params = set(params)  # or only names a parameter, such as a tuple
    for name, instruction in entry.items():  # operands come first
        if after_grads.intersection(instruction.operands):
            after_grads.add(name)
        if any(n in params or (n in reads_params and not is_kernel(entry[n])) for n in instruction.operands):
            reads_params.add(name)
    waited_for: set[str] = set()
    for name, instruction in reversed(entry.items()):
        if name in waited_for or (name in reads_params and is_kernel(instruction)):
            waited_for.update(instruction.operands)
    return {name for name in waited_for & after_grads - reads_params if is_kernel(entry[name])}


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
