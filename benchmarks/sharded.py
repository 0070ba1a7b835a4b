"""How many collectives the verdict costs on a mesh: counted in the compiled program, on 8 devices made of the CPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_lossscale as jls
from benchmarks.isolation import Progress
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS, Contender
from benchmarks.report import Mark, Table

_DEVICES = 8
_COLLECTIVE = re.compile(r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(")
_SHAPES = ((64, 64), (256, 512))  # checked together with others, and alone
_SPECS = (PartitionSpec("data", "model"), PartitionSpec("data"), PartitionSpec(None, "model"), PartitionSpec())
_COLUMNS = (("axes", "{}"), ("leaves", "{}"), ("program", "{}"), ("all-reduces", "{}"), ("other collectives", "{}"))


def run(quick: bool, progress: Progress) -> list[Table]:
    """One table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    counts = (3, 12) if quick else (3, 30, 300)
    cases = [(axis_type, leaves) for axis_type in (AxisType.Auto, AxisType.Explicit) for leaves in counts]
    rows = []
    all_reduces: dict[str, list[int]] = {}
    for n, (axis_type, leaves) in enumerate(cases):
        part = progress.part(n, len(cases), f"{axis_type.name}, {leaves} leaves")
        programs = _programs()
        for m, (name, compiled_for) in enumerate(programs.items()):
            part(m / len(programs), name)
            collectives = _count(compiled_for, axis_type, leaves)
            reduces = collectives.pop("all-reduce", 0)
            rows.append((axis_type.name, leaves, name, reduces, collectives.total()))
            if name != BARE.name:
                all_reduces.setdefault(name, []).append(reduces + collectives.total())
    marks = [
        Mark(f"collectives for the verdict, {name}", _worst(found), 1, exactly=True, quick=quick)
        for name, found in all_reduces.items()
    ]
    title = f"Collectives over a mesh of {_DEVICES} devices, leaves of two sizes and four shardings"
    return [Table(title, _COLUMNS, rows, marks, quick=quick)]


def _worst(counts: list[int]) -> int:
    """The count farthest from one; none at all is as wrong as two."""
    return max(counts, key=lambda count: abs(count - 1))


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


def _count(lower: Callable[[Any], Any], axis_type: AxisType, leaves: int) -> Counter[str]:
    mesh = jax.make_mesh((_DEVICES // 2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        return Counter(_COLLECTIVE.findall(lower(_gradients(mesh, leaves)).compile().as_text()))


def _gradients(mesh: Mesh, leaves: int) -> list[jax.Array]:
    return [
        jax.device_put(
            jnp.ones(_SHAPES[n % len(_SHAPES)]), NamedSharding(mesh, _SPECS[n // len(_SHAPES) % len(_SPECS)])
        )
        for n in range(leaves)
    ]
