"""The kernels that a program compiled for an H100 launches: what each moves and multiplies, and the time that takes.

A kernel is predicted to take as long as its bytes at full bandwidth, or as its products at full speed, whichever is
longer. No cache, no launch and no tuning has a part in it. What is not known is an error.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.gpu.hlo import Array, Computation, Instruction, root

# A second of an H100 SXM5, by NVIDIA's data sheet: bytes, and operations of products by the dtype of their operands.
BANDWIDTH = 3.35e12
PEAK = {"f8": 1.979e15, "f16": 9.89e14, "bf16": 9.89e14, "f32": 4.95e14, "f32, not TF32": 6.7e13, "f64": 6.7e13}

# These only name what is in memory already, or wait for it.
_NO_KERNEL = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"})
_NO_KERNEL |= {"all-reduce-done", "all-gather-done"}
_KERNELS = frozenset({"fusion", "custom-call", "copy", "dot", "convolution", "sort", "slice", "gather", "scatter"})
_KERNELS |= {"dynamic-slice", "dynamic-update-slice", "all-reduce", "all-gather", "reduce-scatter"}
_KERNELS |= {"all-reduce-start", "all-gather-start"}
_KERNELS |= {"while", "call", "conditional"}  # which hold them
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@dataclass(frozen=True)
class Kernel:
    """What one instruction launches.

    Attributes:
      name: of the instruction.
      bytes: read and written by one launch.
      matmuls: floating-point operations of the matmuls in one launch, by the dtype of their operands.
      launches: how many.
    """

    name: str
    bytes: float
    matmuls: Mapping[str, float]
    launches: int = 1

    @property
    def seconds(self) -> float:
        """Predicted, of all launches."""
        multiplied = sum(count / PEAK[dtype] for dtype, count in self.matmuls.items())
        return self.launches * max(self.bytes / BANDWIDTH, multiplied)


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is launched, or holds what is."""
    if instruction.opcode in _NO_KERNEL | _KERNELS:
        return instruction.opcode in _KERNELS
    raise NotImplementedError(f"It is not known what {instruction.opcode!r} launches: {instruction.name}")


def kernels(computations: Mapping[str, Computation], computation: Computation) -> Iterator[Kernel]:
    """All kernels of a computation: a loop's with all launches, a conditional's of the branch that takes longest."""
    for instruction in computation.values():
        if instruction.opcode == "while":
            times = turns(computations, computation, instruction)
            body = computations[instruction.attribute(r"body=%([^\s,]+)")]
            for kernel in kernels(computations, body):
                yield replace(kernel, launches=times * kernel.launches)
        elif instruction.opcode in ("call", "conditional"):
            branches = [list(kernels(computations, computations[name])) for name in instruction.callees]
            yield from max(branches, key=lambda branch: sum(kernel.seconds for kernel in branch))
        elif is_kernel(instruction):
            inside = _inside(computations, computation, instruction)
            yield Kernel(instruction.name, _bytes_moved(inside), _matmuls(computations, inside))


def turns(computations: Mapping[str, Computation], computation: Computation, loop: Instruction) -> int:
    """Return XLA's count of turns, or count them where a counter goes up by one from one constant to another."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition, body = (computations[loop.attribute(rf"\b{part}=%([^\s,]+)")] for part in ("condition", "body"))
    counters = [part for part in condition.values() if part.opcode == "get-tuple-element"]
    compared = _inside(computations, condition, root(condition))
    less, limit = root(compared), compared[root(compared).operands[-1]]
    if len(counters) == 1 and less.attribute(r"direction=(\w+)") == "LT" and limit.opcode == "constant":
        place = int(counters[0].attribute(r"index=(\d+)"))
        start = computation[computation[loop.operands[0]].operands[place]]
        while start.opcode == "copy":
            start = computation[start.operands[0]]
        added = _inside(computations, body, body[root(body).operands[place]])
        steps = [part.inside for part in added.values() if part.opcode == "constant"]
        if start.opcode == "constant" and root(added).opcode == "add" and steps == ["1"]:
            return max(0, int(limit.inside) - int(start.inside))
    raise NotImplementedError(f"It is not known how often this loop turns: {loop.name}")


def _inside(computations: Mapping[str, Computation], computation: Computation, instruction: Instruction) -> Computation:
    """What a fusion computes; or the instruction itself, with parameters in the place of what is computed elsewhere."""
    if instruction.opcode == "fusion":
        return computations[instruction.callees[0]]
    operands = [computation[name] for name in instruction.operands]
    elsewhere = {part.name: replace(part, opcode="parameter", inside="", is_root=False) for part in operands}
    constants = {part.name: part for part in operands if part.opcode == "constant"}
    return {**elsewhere, **constants, instruction.name: replace(instruction, is_root=True)}


def _bytes_moved(inside: Computation) -> float:
    """Read and written by a kernel: of what is sliced, the slice; of what is updated in its place, the update."""
    last = root(inside)
    results = [inside[name] for name in last.operands] if last.opcode == "tuple" else [last]
    updates = {part.name for result in results for part in _update_in_place(inside, result)}
    # The share of each value that is needed, by the slice that needs it: different slices need different parts.
    shares: dict[str, Counter[str]] = {name: Counter() for name in inside}
    for result in results:
        shares[result.name][""] = 1
    for name, instruction in reversed(inside.items()):
        for place, operand in enumerate(instruction.operands):
            needed, size = dict(shares[name]), _size(inside[operand])
            if place == 0 and name in updates:
                # What is added to is read where it is.
                needed = {name: _size(_updating(inside, instruction)) / size} if instruction.opcode == "scatter" else {}
            elif place == 0 and instruction.opcode in _SLICES:
                needed = {name: min(1.0, sum(needed.values())) * _size(instruction) / size}
            shares[operand] |= Counter(needed)
    read = sum(
        part.bytes * min(1.0, sum(shares[name].values())) for name, part in inside.items() if part.opcode == "parameter"
    )
    return read + sum(_bytes_written(inside, result) for result in results)


def _bytes_written(inside: Computation, result: Instruction) -> float:
    if update := _update_in_place(inside, result):
        return _updating(inside, update[0]).bytes
    # A library's workspace is no result, nor is what was taken.
    is_call = result.opcode == "custom-call"
    arrays = result.arrays[len(result.operands) :] if result.opcode == "all-gather-start" else result.arrays
    return sum(a.bytes for a in arrays if not (is_call and a.dtype in ("s8", "u8") and len(a.dimensions) == 1))


def _update_in_place(inside: Computation, result: Instruction) -> list[Instruction]:
    """The update that a result is, of an argument of the kernel; none if it is something else."""
    update = _unnamed(inside, result)
    is_update = update.opcode in _UPDATES and _unnamed(inside, inside[update.operands[0]]).opcode == "parameter"
    return [update] if is_update else []


def _updating(inside: Computation, update: Instruction) -> Instruction:
    """What is written: the second operand of a dynamic-update-slice, the last of a scatter."""
    return inside[update.operands[1 if update.opcode == "dynamic-update-slice" else -1]]


def _unnamed(inside: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = inside[instruction.operands[0]]
    return instruction


def _size(instruction: Instruction) -> int:
    return max(1, sum(array.size for array in instruction.arrays))


def _matmuls(computations: Mapping[str, Computation], inside: Computation) -> Counter[str]:
    """Operations of the products in a kernel."""
    found: Counter[str] = Counter()
    for instruction in inside.values():
        if instruction.opcode == "fusion":
            found += _matmuls(computations, computations[instruction.callees[0]])
        elif instruction.opcode in ("dot", "convolution", "custom-call"):
            operands = [inside[name].arrays[0] for name in instruction.operands[:2]]
            found[_slowest(instruction, operands)] += 2 * _multiplications(instruction, *operands)
    return found


def _slowest(matmul: Instruction, operands: list[Array]) -> str:
    """The dtype that decides how fast a product is."""
    names = ["f8" if operand.dtype.startswith("f8") else operand.dtype for operand in operands]
    if unknown := set(names) - set(PEAK):
        raise NotImplementedError(f"It is not known how fast products of {', '.join(unknown)} are: {matmul.name}")
    slowest = min(names, key=lambda name: PEAK[name])
    return "f32, not TF32" if slowest == "f32" and matmul.attribute(r"operand_precision=\{(high)") else slowest


def _multiplications(matmul: Instruction, first: Array, second: Array) -> float:
    """In a product, a convolution or attention."""
    target = matmul.attribute(r'custom_call_target="([^"]*)"')
    result = matmul.arrays[0]
    if matmul.opcode == "dot" or target.startswith("__cublas$"):
        summed = matmul.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or matmul.attribute(
            r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        )
        return result.size * math.prod(first.dimensions[int(n)] for n in re.findall(r"\d+", summed))
    if matmul.opcode == "convolution" or target.startswith("__cudnn$conv"):
        # For each number of what the forward convolution gives, one of each number of a filter.
        if target == "__cudnn$convBackwardFilter":
            given, filters = second, result
        else:
            given, filters = (first if target == "__cudnn$convBackwardInput" else result), second
        labels = matmul.attribute(r"dim_labels=\w+_(\w+)->")
        return given.size * filters.size / filters.dimensions[labels.index("o")]
    if target.startswith("__cudnn$fmha"):
        weights = matmul.attribute(r'"intermediate_tensor_shape":\{[^{]*"dimensions":\[([^\]]*)\]')
        shape = [int(n) for n in re.findall(r"\d+", weights)]
        matmuls = 5 if "Backward" in target else 2
        return matmuls * math.prod(shape) * first.size / math.prod(shape[:3])
    raise NotImplementedError(f"It is not known what {target or matmul.opcode!r} multiplies: {matmul.name}")
