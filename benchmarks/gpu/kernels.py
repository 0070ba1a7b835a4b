"""The kernels of a program that was compiled for a GPU: memory traffic, matmuls, and predicted time.

The predicted time of a kernel is the time to launch it plus the largest of three times: the time to move its bytes, the
time to compute its matrix multiplications and convolutions (matmuls), and the time of the atomic operations of its
scatters. The benchmark `estimates` compares predicted and measured times. An unknown instruction raises an error.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.gpu.hlo import Array, Computation, Instruction, root
from benchmarks.gpu.specifications import H100, Gpu

# Instructions that only refer to values in memory, or wait for them.
_NO_KERNEL = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"})
_NO_KERNEL |= {"all-reduce-done", "all-gather-done", "fusion-done"}
_KERNELS = frozenset({"fusion", "custom-call", "copy", "dot", "convolution", "sort", "slice", "gather", "scatter"})
_KERNELS |= {"fft", "dynamic-slice", "dynamic-update-slice", "all-reduce", "all-gather", "reduce-scatter"}
_KERNELS |= {"all-reduce-start", "all-gather-start", "fusion-start"}
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
# Copies in loops. The host computes their addresses in each iteration. Since jax 0.11, these copies are asynchronous.
_COPIES = ('"name":"dynamic_slice_fusion"', "fusion-start")

# The constants of the predicted time. Except for `_CACHE`, they were fitted to the times in `results/on_gpu.md`.
_LAUNCH = 1.2e-6  # The time, in seconds, to launch a kernel.
_COPY = 2.2e-6  # The additional time, in seconds, of each copy in `_COPIES`. Only the time of the LSTM depends on it.
_ATTAINED = 0.58  # The fraction of the memory bandwidth that kernels attain.
_CACHE = 2.0  # The assumed bandwidth of the L2 cache relative to that of the memory. Its effect on the ratios is small.
# The number of elements per second that scatters add with atomic operations. On an H100, XLA adds up to four elements
# of float32 with one operation, but 16-bit elements one by one. The rates are the same for 8 updates of each element
# (graph transformer) and 16 updates (DLRM).
_ADDED, _ADDED_IN_16_BIT = 5e11, 7e10


@dataclass(frozen=True)
class Kernel:
    """The kernel that an instruction launches.

    Attributes:
      name: the name of the instruction.
      bytes: the number of bytes that one launch reads and writes.
      matmuls: the number of floating-point operations in matmuls per launch, by the dtype of their operands and by the
        number of cores that can compute them.
      atomics: the time of the atomic operations per launch in seconds.
      overhead: the time that each launch adds in seconds.
      launches: the number of launches.
      bytes_in_loop: the number of bytes that all kernels read and write in one iteration of the innermost loop.
    """

    name: str
    bytes: float
    matmuls: Mapping[tuple[str, float], float]
    atomics: float
    overhead: float
    launches: int = 1
    bytes_in_loop: float = math.inf

    def seconds(self, gpu: Gpu = H100) -> float:
        """Return the predicted time of all launches on a GPU in seconds."""
        moved = self.bytes / gpu.bandwidth / (_CACHE if self.bytes_in_loop <= gpu.cache else _ATTAINED)
        multiplied = [n / gpu.peak[kind] * max(1, gpu.tf32_cores / cores) for (kind, cores), n in self.matmuls.items()]
        return self.launches * (self.overhead + max(moved, sum(multiplied), self.atomics))


def kernels(computations: Mapping[str, Computation], computation: Computation) -> Iterator[Kernel]:
    """Yield all kernels of a computation.

    The kernels of a loop have the launches of all iterations. For a conditional, the kernels of the slowest branch are
    returned.
    """
    for instruction in computation.values():
        if instruction.opcode == "while":
            times = turns(computations, computation, instruction)
            body = list(kernels(computations, computations[instruction.attribute(r"body=%([^\s,]+)")]))
            moved = sum(kernel.launches * kernel.bytes for kernel in body)
            for kernel in body:
                yield replace(kernel, launches=times * kernel.launches, bytes_in_loop=min(moved, kernel.bytes_in_loop))
        elif instruction.opcode in ("call", "conditional"):
            branches = [list(kernels(computations, computations[name])) for name in instruction.callees]
            yield from max(branches, key=lambda branch: sum(kernel.seconds() for kernel in branch))
        elif instruction.opcode in _KERNELS:
            inside = _inside(computations, computation, instruction)
            is_copy = any(text in instruction.opcode + instruction.attributes for text in _COPIES)
            work = _bytes_moved(inside), _matmuls(computations, inside), _atomics(computations, inside)
            yield Kernel(instruction.name, *work, _LAUNCH + is_copy * _COPY)
        elif instruction.opcode not in _NO_KERNEL:
            raise NotImplementedError(f"Add {instruction.opcode!r} ({instruction.name}) to `_KERNELS` or `_NO_KERNEL`.")


def turns(computations: Mapping[str, Computation], computation: Computation, loop: Instruction) -> int:
    """Return the number of iterations of a loop.

    If XLA has counted the iterations, its count is returned. For other loops, the count is computed from a counter that
    increases by one from one constant to another.
    """
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
    raise NotImplementedError(f"The number of iterations of the loop {loop.name} cannot be determined.")


def _inside(computations: Mapping[str, Computation], computation: Computation, instruction: Instruction) -> Computation:
    """Return the computation of a fusion. For any other instruction, return a computation with only this instruction.

    In this computation, parameters replace the operands, because the operands are computed elsewhere.
    """
    if instruction.opcode in ("fusion", "fusion-start"):
        return computations[instruction.callees[0]]
    operands = [computation[name] for name in instruction.operands]
    elsewhere = {part.name: replace(part, opcode="parameter", inside="", is_root=False) for part in operands}
    constants = {part.name: part for part in operands if part.opcode == "constant"}
    return {**elsewhere, **constants, instruction.name: replace(instruction, is_root=True)}


def _bytes_moved(inside: Computation) -> float:
    """Return the number of bytes that a kernel reads and writes.

    If an array is sliced, only the slice counts. If an array is updated in place, only the update counts.
    """
    last = root(inside)
    results = [inside[name] for name in last.operands] if last.opcode == "tuple" else [last]
    updates = {part.name for result in results for part in _update_in_place(inside, result)}
    # The fraction of each value that is needed, for each slice that uses it. Different slices need different parts.
    shares: dict[str, Counter[str]] = {name: Counter() for name in inside}
    for result in results:
        shares[result.name][""] = 1
    for name, instruction in reversed(inside.items()):
        for place, operand in enumerate(instruction.operands):
            needed, size = dict(shares[name]), _size(inside[operand])
            if place == 0 and name in updates:
                # A scatter reads only the elements to which it adds.
                needed = {name: _size(_updating(inside, instruction)) / size} if instruction.opcode == "scatter" else {}
            elif place == 0 and instruction.opcode in _SLICES:
                needed = {name: min(1.0, sum(needed.values())) * _size(instruction) / size}
            shares[operand] |= Counter(needed)
    read = sum(
        part.bytes * min(1.0, sum(shares[name].values())) for name, part in inside.items() if part.opcode == "parameter"
    )
    return read + sum(_bytes_written(inside, result) for result in results)


def _bytes_written(inside: Computation, result: Instruction) -> float:
    """Return the number of bytes of a result that a kernel writes."""
    if update := _update_in_place(inside, result):
        return _updating(inside, update[0]).bytes
    # The workspace of a library call does not count as a result, and neither do the operands that an all-gather-start
    # returns.
    is_call = result.opcode in ("custom-call", "get-tuple-element")
    arrays = result.arrays[len(result.operands) :] if result.opcode == "all-gather-start" else result.arrays
    return sum(a.bytes for a in arrays if not (is_call and a.dtype in ("s8", "u8") and len(a.dimensions) == 1))


def _update_in_place(inside: Computation, result: Instruction) -> list[Instruction]:
    """Return a list with the instruction that updates an argument of the kernel in place.

    The list is empty if the result is not such an update.
    """
    update = _unnamed(inside, result)
    is_update = update.opcode in _UPDATES and _unnamed(inside, inside[update.operands[0]]).opcode == "parameter"
    return [update] if is_update else []


def _updating(inside: Computation, update: Instruction) -> Instruction:
    """Return the written values: the second operand of a dynamic-update-slice, or the last operand of a scatter."""
    return inside[update.operands[1 if update.opcode == "dynamic-update-slice" else -1]]


def _unnamed(inside: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction whose value a bitcast reinterprets."""
    while instruction.opcode == "bitcast":
        instruction = inside[instruction.operands[0]]
    return instruction


def _size(instruction: Instruction) -> int:
    return max(1, sum(array.size for array in instruction.arrays))


def _atomics(computations: Mapping[str, Computation], inside: Computation) -> float:
    """Return the time, in seconds, that a kernel needs for the atomic operations of its scatters.

    A scatter does not need atomic operations if it replaces elements or if its indices are unique.
    """
    seconds = 0.0
    for scatter in (part for part in inside.values() if part.opcode == "scatter"):
        is_replaced = root(computations[scatter.callees[0]]).opcode == "parameter"
        if not is_replaced and "unique_indices=true" not in scatter.attributes:
            updates = _updating(inside, scatter)
            seconds += _size(updates) / (_ADDED if updates.bytes >= 4 * _size(updates) else _ADDED_IN_16_BIT)
    return seconds


def _matmuls(computations: Mapping[str, Computation], inside: Computation) -> Counter[tuple[str, float]]:
    """Count the operations in the matmuls of a kernel, grouped by dtype and number of cores."""
    found: Counter[tuple[str, float]] = Counter()
    for instruction in inside.values():
        if instruction.opcode == "fusion":
            found += _matmuls(computations, computations[instruction.callees[0]])
        elif instruction.opcode in ("dot", "convolution", "custom-call"):
            operands = [inside[name].arrays[0] for name in instruction.operands[:2]]
            dtype = _slowest(instruction, operands)
            found[dtype, _cores(instruction, dtype)] += 2 * _multiplications(instruction, *operands)
    return found


def _cores(matmul: Instruction, dtype: str) -> float:
    """Return the number of cores that can compute a matmul at the same time, or infinity if there is no limit.

    In a float32 matrix multiplication, each core is assumed to compute 128 x 64 elements of the result, and cuBLAS is
    assumed not to split the sums. No kernels were profiled. Without these assumptions, the predicted time of the graph
    transformer in float32 is half of the measured time.
    """
    if dtype != "f32" or matmul.opcode == "convolution" or "__cudnn$" in matmul.attributes:
        return math.inf
    *batch, rows, columns = (1, *matmul.arrays[0].dimensions)
    return math.prod(batch) * math.ceil(rows / 128) * math.ceil(columns / 64)


def _slowest(matmul: Instruction, operands: list[Array]) -> str:
    """Return the dtype that determines the throughput of a matmul."""
    names = ["f8" if operand.dtype.startswith("f8") else operand.dtype for operand in operands]
    if unknown := set(names) - set(H100.peak):
        raise NotImplementedError(
            f"The peak throughput of {', '.join(unknown)} is unknown: {matmul.name}. Add it to `H100`."
        )
    slowest = min(names, key=lambda name: H100.peak[name])
    return "f32, not TF32" if slowest == "f32" and matmul.attribute(r"operand_precision=\{(high)") else slowest


def _multiplications(matmul: Instruction, first: Array, second: Array) -> float:
    """Return the number of multiplications in a matrix multiplication, a convolution or an attention kernel."""
    target = matmul.attribute(r'custom_call_target="([^"]*)"')
    result = matmul.arrays[0]
    if matmul.opcode == "dot" or target.startswith("__cublas$"):
        summed = matmul.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or matmul.attribute(
            r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        )
        return result.size * math.prod(first.dimensions[int(n)] for n in re.findall(r"\d+", summed))
    if matmul.opcode == "convolution" or target.startswith("__cudnn$conv"):
        # A convolution has one multiplication for each element of its result and each element of one filter.
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
    raise NotImplementedError(f"The operations of {target or matmul.opcode!r} cannot be counted: {matmul.name}")
