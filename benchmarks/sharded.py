"""How many collectives the verdict costs on a mesh: counted in the compiled program, on 8 devices made of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.isolation import Progress
from benchmarks.meshes import LAYOUTS, Layout, collectives
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS, Contender
from benchmarks.report import Mark, Table, columns

_DEVICES = 8
_SHAPES = ((64, 1024), (256, 512))
_COLUMNS = columns("mesh | sets of axes | leaves | program | all-reduces | other collectives")
_NOTES = (
    "Sets of axes: over which leaves are split. With explicit axes one all-reduce serves all sets.",
    "With automatic axes XLA for a CPU makes one for each dimension that is split; for a GPU see `cuda`.",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """One table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    counts = (4, 12) if quick else (4, 30, 300)
    cases = [(layout, leaves) for layout in LAYOUTS for leaves in counts]
    rows = []
    for n, (layout, leaves) in enumerate(cases):
        part = progress.part(n, len(cases), f"{layout.name}, {leaves} leaves")
        programs = _programs()
        for m, (name, compiled_for) in enumerate(programs.items()):
            part(m / len(programs), name)
            mesh = layout.mesh(jax.devices())
            with jax.set_mesh(mesh):
                grads = _gradients(layout, mesh, leaves)
                found = collectives(compiled_for(grads).compile().as_text())
            reduces = found.pop("all-reduce", 0)
            rows.append((layout.name, layout.sets_of_axes, leaves, name, reduces, found.total()))
    ours = [row for row in rows if row[3] != BARE.name]
    marks = [
        *(
            Mark(f"all-reduces for the verdict, mesh {layout.name}", worst, layout.sets_of_axes)
            for layout in LAYOUTS
            for worst in [max(reduces for name, _, _, _, reduces, _ in ours if name == layout.name)]
        ),
        Mark("other collectives for the verdict", max(row[5] for row in ours), 0, exactly=True),
    ]
    title = f"Collectives over meshes of {_DEVICES} devices"
    return [Table(title, _COLUMNS, rows, marks, _NOTES, quick)]


def _programs() -> dict[str, Callable[[Any], Any]]:
    """By name, functions that lower a program for gradients (which stand for the parameters, too)."""

    def of_step(contender: Contender) -> Callable[[Any], Any]:
        def lower(grads: Any) -> Any:
            state = jax.jit(contender.init)(grads)
            return jax.jit(contender.apply).lower(state, grads)

        return lower

    return {
        BARE.name: of_step(BARE),
        "all_finite": lambda grads: jax.jit(jls.all_finite).lower(grads),
        "update": of_step(OURS_IN_TWO_CALLS),
        "update_and_apply": of_step(OURS),
    }


def _gradients(layout: Layout, mesh: Any, leaves: int) -> list[jax.Array]:
    shapes = [_SHAPES[n // len(layout.specs) % len(_SHAPES)] for n in range(leaves)]
    return [jax.device_put(jnp.ones(shape), layout.sharding(mesh, n, shape)) for n, shape in enumerate(shapes)]
