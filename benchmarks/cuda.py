"""What XLA makes of the optimizer's step for a GPU: the program compiled for an H100, read, and never run.

XLA compiles for a GPU that it has only a description of, so this needs the extra ``bench-cuda`` and no GPU. The program
says how many kernels a step launches and how much each of them reads and writes, and Adam is bound by that traffic. It
says nothing of time: no cache, no launch and no GPU has a part in it. Those marks are `optimizer`'s, on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import trees
from benchmarks.isolation import Progress
from benchmarks.peers import BARE, OTHER_KINDS, OURS, OURS_IN_TWO_CALLS, Contender, Ours, clipped
from benchmarks.report import Mark, Table

_CONTENDERS: tuple[Contender, ...] = (
    BARE,
    OURS,
    Ours(skip="cond"),
    Ours(skip="select"),
    *OTHER_KINDS,
    OURS_IN_TWO_CALLS,
)
_CLIPPED = clipped(BARE, OURS, *OTHER_KINDS, OURS_IN_TWO_CALLS)
_BYTES_GOALS = {"float32": 1.18, "float16": 1.10}
_PACKAGES = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
_COLUMNS = (
    ("step", "{}"),
    ("kernels", "{}"),
    ("before update", "{}"),
    ("bytes per parameter", "{:.2f}"),
    ("over bare", "{:.3f}"),
    ("full-size copies", "{}"),
    ("conditionals", "{}"),
    ("temporaries", "{:.1%}"),
)
_NOTES = (
    "Bytes: the sizes of all operands and results of all kernels. Of a conditional, the branch that moves more counts.",
    "Before update: kernels that wait for gradients, and that a kernel which reads parameters waits for.",
    "Copies: of arrays, not of scalars; in whatever branch. Temporaries: as a share of the parameters.",
)
_NOT_RUN = "GPU program (compiled, not run)"

# A fusion is one kernel. These are none: they only name what is in memory already.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
# These would hide kernels from the count. They are not to be expected here.
_UNREADABLE = re.compile(r"call|while|.*-start")

# An H100 SXM5, by NVIDIA's data sheet and by the table of compute capability 9.0 in its CUDA C++ Programming Guide.
# Without any one of these XLA fails or makes another program; what makes no difference to it is left out.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  shared_memory_per_block: 49152
  l2_cache_size: 52428800
  device_memory_size: 80000000000
  memory_bandwidth: 3350000000000
}
"""


def run(quick: bool, progress: Progress) -> list[Table]:
    """A table for each dtype of the gradients, with and without clipping."""
    if missing := [package for package in _PACKAGES if not _is_installed(package)]:
        return [_not_measured(f"needs {' and '.join(missing)}: pip install -e '.[bench-cuda]'")]
    # Only the CPU is started. The plugin would refuse to load without the libraries that running, not compiling, needs.
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    cases = [(dtype, contenders) for contenders in (_CONTENDERS, _CLIPPED) for dtype in _BYTES_GOALS]
    return [
        _measure(dtype, contenders, sharding, quick, progress.part(n, len(cases), f"{dtype} gradients"))
        for n, (dtype, contenders) in enumerate(cases)
    ]


def _measure(
    dtype: str,
    contenders: tuple[Contender, ...],
    sharding: jax.sharding.Sharding,
    quick: bool,
    progress: Progress,
) -> Table:
    shapes = trees.transformer(4_000_000 if quick else 33_000_000)
    params, grads = trees.abstract(shapes, jnp.float32), trees.abstract(shapes, dtype)
    programs = {}
    for n, contender in enumerate(contenders):
        progress(n / len(contenders), f"compiling {contender.name}")
        programs[contender.name] = _compile(contender, params, grads, sharding)
    bare = programs[BARE.name]
    rows = [
        (
            name,
            len(program.kernels),
            len(program.before_the_update),
            program.bytes / trees.size(params),
            program.bytes / bare.bytes,
            program.copies,
            program.conditionals,
            program.temporaries / trees.bytes_of(params),
        )
        for name, program in programs.items()
    ]
    ours = programs[OURS.name]
    marks = [] if contenders is _CLIPPED else _marks(dtype, ours.copies, ours.bytes / bare.bytes, quick=quick)
    adam = "Adam after clipping by global norm" if contenders is _CLIPPED else "Adam"
    title = f"Program for an H100, not run: {adam}, {trees.size(params) / 1e6:.1f} M parameters, {dtype} gradients"
    return Table(title, _COLUMNS, rows, marks, _NOTES, quick)


def _compile(contender: Contender, params: Any, grads: Any, sharding: jax.sharding.Sharding) -> _Program:
    state = jax.eval_shape(contender.init, params)
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (state, grads))
    traced = jax.jit(contender.apply, donate_argnums=0).trace(*there)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    return _read(compiled.as_text() or "", len(jax.tree.leaves(params)), memory.temp_size_in_bytes)


def _marks(dtype: str, copies: int | None, over_bare: float | None, **options: Any) -> list[Mark]:
    what = f"update_and_apply, {dtype} gradients"
    return [
        Mark(f"{_NOT_RUN}: full-size copies, {what}", copies, 0, exactly=True, **options),
        Mark(f"{_NOT_RUN}: bytes over bare, {what}", over_bare, _BYTES_GOALS[dtype], **options),
    ]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _not_measured(why: str) -> Table:
    marks = [mark for dtype in _BYTES_GOALS for mark in _marks(dtype, None, None, note=why)]
    return Table("Programs of Adam for an H100, not run", (), (), marks)


# Reading a program.


@dataclass(frozen=True)
class _Instruction:
    """A line of HLO."""

    shape: str  # of the result, or of all results
    opcode: str
    operands: list[str]
    callees: list[str]  # the computations of a fusion, the branches of a conditional
    number: int  # of a parameter

    @property
    def is_kernel(self) -> bool:
        return self.opcode not in _NO_KERNEL


_Computation: TypeAlias = Mapping[str, _Instruction]


@dataclass(frozen=True)
class _Program:
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
        return sum(self.kernels)


def _read(text: str, leaves: int, temporaries: int) -> _Program:
    """Of a step whose first ``leaves`` arguments are the parameters, and whose last are the gradients."""
    computations, entry = _parse(text)
    launched = [entry, *(computations[name] for name in _branches(computations, entry))]
    instructions = [instruction for computation in launched for instruction in computation.values()]
    return _Program(
        list(_kernels(computations, entry)),
        _before_the_update(entry, leaves),
        sum(_copies(computations, instruction) for instruction in instructions),
        sum(instruction.opcode == "conditional" for instruction in instructions),
        temporaries,
    )


def _parse(text: str) -> tuple[dict[str, _Computation], _Computation]:
    """All computations by name, and the one that is the program."""
    computations: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
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
            current[name] = _Instruction(shape, opcode, re.findall(r"%([^\s,]+)", inside), names, number)
    if not entry:
        raise ValueError("the text of the program has no entry computation")
    return dict(computations), entry


def _branches(computations: Mapping[str, _Computation], computation: _Computation) -> Iterator[str]:
    """All branches of all conditionals, and of those within them."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            for name in instruction.callees:
                yield name
                yield from _branches(computations, computations[name])


def _kernels(computations: Mapping[str, _Computation], computation: _Computation) -> Iterator[int]:
    """The bytes that each kernel reads and writes."""
    for instruction in computation.values():
        if instruction.opcode == "conditional":
            yield from max((list(_kernels(computations, computations[name])) for name in instruction.callees), key=sum)
        elif instruction.is_kernel:
            yield _bytes(instruction.shape) + sum(_bytes(computation[name].shape) for name in instruction.operands)


def _before_the_update(entry: _Computation, leaves: int) -> set[str]:
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


def _copies(computations: Mapping[str, _Computation], instruction: _Instruction) -> int:
    """How many arrays are copied, by the instruction or by a fusion of nothing but copies; scalars are none."""
    if instruction.opcode == "fusion":
        inside = [part for name in instruction.callees for part in computations[name].values() if part.is_kernel]
        return sum(_is_copy(part) for part in inside) if all(map(_is_copy, inside)) else 0
    return int(_is_copy(instruction))


def _is_copy(instruction: _Instruction) -> bool:
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
