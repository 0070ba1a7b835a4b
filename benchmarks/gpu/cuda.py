"""The optimizer step as compiled by XLA for an H100. The program is analyzed, but not run.

XLA can compile for a GPU with only a description of the GPU, so this benchmark needs the group ``bench-cuda``, but no
GPU. The compiled program shows how many kernels a step launches, and how many bytes each kernel reads and writes. The
time of Adam is determined by these bytes. The program does not show the effects of caches, launches and the actual GPU.
The benchmark `optimizer` measures the time on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu.gpu_program import Program, read
from benchmarks.gpu.meshes import LAYOUTS, Layout, collectives
from benchmarks.gpu.specifications import H100, Gpu
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns
from benchmarks.optimizer import trees
from benchmarks.optimizer.peers import BARE, OTHER_KINDS, OURS, OURS_IN_TWO_CALLS, Contender, Ours

_SKIPS = (Ours(skip="cond"), Ours(skip="select"))
_CONTENDERS: tuple[Contender, ...] = (BARE, OURS, *_SKIPS, *OTHER_KINDS, OURS_IN_TWO_CALLS)
_BYTES_GOALS = {"float32": 1.18, "float16": 1.10}
_PACKAGES = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
_COLUMNS = columns(
    "step | kernels | bytes per parameter {:.2f} | over bare {:.3f} | predicted {:.3f} ms | "
    "full-size copies | conditionals | temporaries {:.1%}"
)
_NOTES = (
    "Bytes are the sizes of all operands and results of all kernels. For a conditional, the branch that moves more "
    "bytes counts.",
    "Copies are copies of arrays (not scalars) in any branch. Temporaries are relative to the size of the parameters.",
)
_MESH_COLUMNS = columns(
    "mesh | sets of axes | step | kernels | bytes over bare {:.3f} | all-reduces | other collectives"
)
_MESH_NOTES = (
    "The programs are for one of eight devices. Sets of axes is the number of different sets of mesh axes over which "
    "leaves are sharded; norms are replicated.",
    "With automatic axes, the shardings of the leaves are unknown when the step is traced, so each leaf is read "
    "separately.",
)
_NOT_RUN = "GPU program (compiled, not run)"


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return one table for each dtype of the gradients, and one table for meshes."""
    if why := missing():
        marks = [mark for dtype in _BYTES_GOALS for mark in _marks(dtype, None, None, note=why)]
        return [Table("Programs of Adam for an H100, not run", (), (), marks)]
    start()
    parts = {dtype: progress.part(n, 3, f"{dtype} gradients") for n, dtype in enumerate(_BYTES_GOALS)}
    tables = [_measure(dtype, quick, part) for dtype, part in parts.items()]
    return [*tables, _measure_on_meshes(quick, progress.part(2, 3, "eight devices"))]


def missing() -> str:
    """Return a message about missing packages that are needed to compile for a GPU; "" if there are none."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    packages = [package for package in _PACKAGES if package not in installed]
    return (
        f"needs {' and '.join(packages)}. Install with: pip install -e '.[bench]' --group bench-cuda"
        if packages
        else ""
    )


def start() -> None:
    """Initialize only the CPU backend of JAX.

    The CUDA plugin would not load without the libraries that are necessary to run programs, although these libraries
    are not necessary to compile programs.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def devices(topology: str, gpu: Gpu = H100) -> list[Any]:
    """Return descriptions of GPUs, which do not have to be present."""
    name = gpu.name.lower()
    return topologies.get_topology_desc(name, "cuda", target_config=gpu.description, topology=topology).devices


def compile_for_one(function: Any, *arguments: Any, gpu: Gpu = H100, **options: Any) -> jax.stages.Compiled:
    """Compile a jitted function for one GPU with XLA options. Only the shapes and dtypes of the arguments are used."""
    there = jax.sharding.SingleDeviceSharding(devices("1x1x1", gpu)[0])
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), arguments)
    return function.trace(*placed).lower(lowering_platforms=("cuda",)).compile(options)


def _abstract(quick: bool, dtype: str) -> tuple[Any, Any]:
    """Return the shapes and dtypes of the parameters and the gradients."""
    shapes = trees.transformer(4_000_000 if quick else 33_000_000)
    return trees.abstract(shapes, jnp.float32), trees.abstract(shapes, dtype)


def _measure(dtype: str, quick: bool, progress: Progress) -> Table:
    params, grads = _abstract(quick, dtype)
    sharding = jax.sharding.SingleDeviceSharding(devices("1x1x1")[0])
    there = jax.tree.map(lambda leaf: sharding, params)
    programs = {}
    for n, contender in enumerate(_CONTENDERS):
        progress(n / len(_CONTENDERS), f"compiling {contender.name}")
        programs[contender.name], _ = _compile(contender, params, grads, there, sharding)
    bare, ours = programs[BARE.name], programs[OURS.name]
    rows = [
        (
            *(name, len(program.kernels), program.bytes / trees.size(params)),
            *(program.bytes / bare.bytes, 1e3 * program.seconds(), program.copies, program.conditionals),
            program.temporaries / trees.bytes_of(params),
        )
        for name, program in programs.items()
    ]
    marks = _marks(dtype, ours.copies, ours.bytes / bare.bytes)
    title = f"Program for an H100, not run: Adam, {trees.size(params) / 1e6:.1f} M parameters, {dtype} gradients"
    return Table(title, _COLUMNS, rows, marks, _NOTES, quick)


def _measure_on_meshes(quick: bool, progress: Progress) -> Table:
    params, grads = _abstract(quick, "float32")
    rows, marks = [], []
    for n, layout in enumerate(LAYOUTS):
        progress(n / len(LAYOUTS), f"compiling for {layout.name}")
        bytes_of_bare = None
        for contender in (BARE, OURS):
            program, found = _on_mesh(contender, layout, devices("1x1x8"), params, grads)
            bytes_of_bare = bytes_of_bare or program.bytes
            reduces = found.pop("all-reduce", 0)
            counts = len(program.kernels), program.bytes / bytes_of_bare
            rows.append((layout.name, layout.sets_of_axes, contender.name, *counts, reduces, found.total()))
        what = f"{_NOT_RUN}: all-reduces of update_and_apply, mesh {layout.name}"
        marks.append(Mark(what, reduces, layout.sets_of_axes))
    what = f"{_NOT_RUN}: other collectives of update_and_apply"
    marks.append(Mark(what, max(row[-1] for row in rows), 0, exactly=True))
    title = f"Programs for one of eight H100s, not run: Adam over {trees.size(params) / 1e6:.1f} M float32 parameters"
    return Table(title, _MESH_COLUMNS, rows, marks, _MESH_NOTES, quick)


def _on_mesh(
    contender: Contender, layout: Layout, devices: list[Any], params: Any, grads: Any
) -> tuple[Program, Counter[str]]:
    mesh = layout.mesh(devices)
    leaves, structure = jax.tree.flatten(params)
    split = jax.tree.unflatten(structure, [layout.sharding(mesh, n, leaf.shape) for n, leaf in enumerate(leaves)])
    program, text = _compile(contender, params, grads, split, NamedSharding(mesh, PartitionSpec()))
    return program, collectives(text)


def _compile(
    contender: Contender, params: Any, grads: Any, shardings: Any, of_scalars: jax.sharding.Sharding
) -> tuple[Program, str]:
    """Return the compiled program and its text.

    ``shardings`` are the shardings of the parameters, and of the gradients and all other trees with the same structure.
    """

    def place(leaf: Any, sharding: jax.sharding.Sharding = of_scalars) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.eval_shape(contender.init, params)
    state = optax.tree.map_params(contender.init, place, state, shardings, transform_non_params=place)
    traced = jax.jit(contender.apply, donate_argnums=0).trace(state, jax.tree.map(place, grads, shardings))
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text() or ""
    return read(text, compiled.memory_analysis().temp_size_in_bytes), text


def _marks(dtype: str, copies: int | None, over_bare: float | None, **options: Any) -> list[Mark]:
    what = f"update_and_apply, {dtype} gradients"
    return [
        Mark(f"{_NOT_RUN}: full-size copies, {what}", copies, 0, exactly=True, **options),
        Mark(f"{_NOT_RUN}: bytes over bare, {what}", over_bare, _BYTES_GOALS[dtype], **options),
    ]
