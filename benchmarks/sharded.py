"""How many collectives the verdict costs on a mesh: counted in the compiled program, on 8 devices made of the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.isolation import Progress
from benchmarks.meshes import LAYOUTS, Layout, collectives
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS
from benchmarks.report import Mark, Table, columns

_DEVICES = 8
_SHAPES = ((64, 1024), (256, 512))
_COLUMNS = columns("mesh | sets of axes | leaves | program | all-reduces | other collectives")
_CONTENDERS = {BARE.name: BARE, "update": OURS_IN_TWO_CALLS, "update_and_apply": OURS}
_NOTES = (
    "Sets of axes: over which leaves are split. With explicit axes one all-reduce serves all sets.",
    "With automatic axes each leaf has a scalar of its own, and XLA merges the all-reduces of 256 of "
    "them; for a GPU see `cuda`.",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """One table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    rows, marks, others = [], [], 0
    for n, layout in enumerate(LAYOUTS):
        worst = 0
        for leaves in (4, 12) if quick else (4, 30, 300):
            progress(n / len(LAYOUTS), f"{layout.name}, {leaves} leaves")
            mesh = layout.mesh(jax.devices())
            with jax.set_mesh(mesh):
                grads = _gradients(layout, mesh, leaves)
                programs = {"all_finite": jax.jit(jls.all_finite).lower(grads)}
                for name, contender in _CONTENDERS.items():
                    programs[name] = jax.jit(contender.apply).lower(jax.jit(contender.init)(grads), grads)
                found = {name: collectives(program.compile().as_text()) for name, program in programs.items()}
            for name, counts in found.items():
                reduces = counts.pop("all-reduce", 0)
                rows.append((layout.name, layout.sets_of_axes, leaves, name, reduces, counts.total()))
                if name != BARE.name:
                    worst, others = max(worst, reduces), max(others, counts.total())
        marks.append(Mark(f"all-reduces for the verdict, mesh {layout.name}", worst, layout.sets_of_axes))
    marks.append(Mark("other collectives for the verdict", others, 0, exactly=True))
    return [Table(f"Collectives over meshes of {_DEVICES} devices", _COLUMNS, rows, marks, _NOTES, quick)]


def _gradients(layout: Layout, mesh: Any, leaves: int) -> list[jax.Array]:
    shapes = [_SHAPES[n // len(layout.specs) % len(_SHAPES)] for n in range(leaves)]
    return [jax.device_put(jnp.ones(shape), layout.sharding(mesh, n, shape)) for n, shape in enumerate(shapes)]
