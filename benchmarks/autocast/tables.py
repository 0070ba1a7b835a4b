"""``python -m benchmarks autocast``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import cuda
from benchmarks.autocast import gpu, mesh
from benchmarks.autocast.counting import bytes_kept, casts, compiled_casts, products
from benchmarks.autocast.gradients import Error, Trained, scaled_gradients, sources
from benchmarks.autocast.models import Model, gemma, nanogpt, transformer, vae, vit
from benchmarks.autocast.programs import programs
from benchmarks.autocast.ways import AUTOCAST, BF16_BF16_F32, BY_HAND, FLOAT32, JMP, KEPT, NOTES, TORCH, ways
from benchmarks.isolation import Progress, call_apart
from benchmarks.report import Cell, Mark, Table
from benchmarks.timing import Timings

_SIZES = {"blocks": 4, "width": 512, "heads": 8, "batch": 8, "context": 256}
_QUICK_SIZES = {"blocks": 1, "width": 64, "heads": 4, "batch": 2, "context": 32}
_PATIENCE = 600.0  # seconds, for a program compiled for an H100
_MIB = 2**20


def run(quick: bool, progress: Progress) -> list[Table]:
    """Products, the transformer's programs, errors of gradients and their sources, the programs for a GPU."""
    sizes = _QUICK_SIZES if quick else _SIZES
    tables = [_count_products(quick, progress.part(0, 5, "products"))]
    trained, errors = _gradients(quick, sizes, progress.part(1, 5, "gradients"))
    tables.append(_programs(quick, sizes, errors, progress.part(2, 5, "programs")))
    tables += [_errors(quick, errors), _sources(quick, trained, errors, progress.part(3, 5, "sources of errors"))]
    tables.append(_on_a_mesh(quick, sizes))
    tables.append(_for_h100(quick, sizes, progress.part(4, 5, "for an H100")))
    return [*tables, _timed(quick, sizes, progress)]


def _count_products(quick: bool, progress: Progress) -> Table:
    names = [name for name in ways() if name != KEPT]
    rows: list[tuple[Cell, ...]] = []
    left = {}
    cases = programs()
    for n, model in enumerate(cases):
        progress(n / len(cases), model.name)
        arguments = jax.eval_shape(lambda model=model: (model.params(), model.batch(0)))
        counts = {
            name: products(jax.make_jaxpr(jax.value_and_grad(ways()[name](model)))(*arguments).jaxpr) for name in names
        }
        rows.append((model.name, *(f"{count.narrow} of {count.total}" for count in counts.values())))
        left[model.name] = counts[AUTOCAST].total - counts[AUTOCAST].narrow
    note = ", ".join(name for name, count in left.items() if count)
    what = f"autocast: products left in float32, forward and backward, {len(cases)} programs"
    mark = Mark(what, sum(left.values()), 0, exactly=True, note=note)
    columns = [("program", "{}"), *((name, "{}") for name in names)]
    return Table("Products in half precision, forward and backward", columns, rows, [mark], NOTES, quick)


def _gradients(
    quick: bool, sizes: dict[str, int], progress: Progress
) -> tuple[dict[Model, Trained], dict[str, dict[str, Error]]]:
    """Models after a few steps, and the errors of each way to compute their gradients."""
    cases = [(transformer(**{**sizes, "batch": 2, "context": 32 if quick else 64}), 0, 1)]
    if not quick:
        cases += [(make(), 100, 4) for make in (nanogpt, gemma, vit, vae)]
    trained: dict[Model, Trained] = {}
    errors: dict[str, dict[str, Error]] = {}
    names = [name for name in ways() if name not in (FLOAT32, KEPT, BF16_BF16_F32)]
    for n, (model, steps, batches) in enumerate(cases):
        part = progress.part(n, len(cases), model.name)
        trained[model] = Trained(model, steps, batches)
        errors[model.name] = {}
        for m, name in enumerate(names):
            part(m / len(names), name)
            errors[model.name][name] = trained[model].error(scaled_gradients(ways()[name](model)))
    return trained, errors


def _programs(quick: bool, sizes: dict[str, int], errors: dict[str, dict[str, Error]], progress: Progress) -> Table:
    model = transformer(**sizes)
    arguments = jax.eval_shape(lambda: (model.params(), model.batch(0)))
    kept, counted = {}, {}
    for n, (name, way) in enumerate(ways().items()):
        progress(n / 2 / len(ways()), name)
        kept[name] = bytes_kept(way(model), *arguments)
        counted[name] = casts(jax.make_jaxpr(jax.value_and_grad(way(model)))(*arguments).jaxpr)
    lowering = _lowering(model, arguments, 1 if quick else 3, progress)
    compiled = {name: compiled_casts(error.text) for name, error in next(iter(errors.values())).items()}
    rows = [
        (
            name,
            kept[name] / _MIB,
            kept[name] / kept[BY_HAND],
            counted[name],
            compiled.get(name),
            lowering.minimum(name),
            lowering.minimum(name) / lowering.minimum(FLOAT32),
        )
        for name in ways()
    ]
    columns = (
        ("loss", "{}"),
        ("kept", "{:.1f} MiB"),
        ("over by hand", "{:.2f}"),
        ("casts", "{}"),
        ("casts, compiled for the CPU", "{}"),
        ("trace and lower", "{:.2f} s"),
        ("over float32", "{:.2f}"),
    )
    marks = [
        Mark("autocast: bytes kept for the backward pass over by hand", kept[AUTOCAST] / kept[BY_HAND], 0.5),
        Mark("autocast: casts in the jaxpr over by hand", counted[AUTOCAST] / counted[BY_HAND], 1.15),
        Mark("autocast: casts compiled for the CPU over by hand", compiled[AUTOCAST] / compiled[BY_HAND], 1.15),
        Mark("autocast: tracing and lowering over float32", rows[list(ways()).index(AUTOCAST)][-1], 2.0),
    ]
    notes = (
        "Value and gradients. Kept: what `jax.vjp` hands to the backward pass, without the function's arguments, "
        "before XLA. Casts: from one floating dtype to another; what is computed again in the backward pass is cast "
        "again.",
        "The CPU has no products in float16: XLA casts their operands and results for it, in every way alike.",
    )
    title = f"Programs of {model.name}, {sizes['batch']} x {sizes['context']} tokens"
    return Table(title, columns, rows, [_quick(mark, quick) for mark in marks], notes, quick)


def _lowering(model: Model, arguments: Any, rounds: int, progress: Progress) -> Timings:
    """Seconds of the processor from nothing to a lowered program."""
    seconds: dict[str, list[float]] = {name: [] for name in ways()}
    for n in range(rounds):
        progress(0.5 + n / 2 / rounds, "tracing and lowering")
        for name, way in ways().items():
            loss = way(model)
            jax.clear_caches()
            start = time.process_time()
            jax.jit(jax.value_and_grad(loss)).lower(*arguments)
            seconds[name].append(time.process_time() - start)
    return Timings(seconds)


def _errors(quick: bool, errors: dict[str, dict[str, Error]]) -> Table:
    names = list(next(iter(errors.values())))
    rows, marks = [], []
    for model, found in errors.items():
        over = found[AUTOCAST].relative / found[BY_HAND].relative
        rows.append((model, *(found[name].relative for name in names), over))
        marks.append(_quick(Mark(f"autocast: gradient error over by hand, {model}", over, 0.5), quick))
    columns = [("model", "{}"), *((name, "{:.1e}") for name in names), ("autocast over by hand", "{:.2f}")]
    notes = (
        "The norm of the difference from float32's gradients over their norm, at the best of four loss scales from "
        "1 to 2^18. The first model as initialized, the others after 100 steps of Adam in float32, on four batches.",
        "BF16_BF16_F32 is not among them: the CPU computes it in float32.",
    )
    return Table("Errors of gradients", columns, rows, marks, notes, quick)


def _sources(
    quick: bool, trained: dict[Model, Trained], errors: dict[str, dict[str, Error]], progress: Progress
) -> Table:
    trained = dict(list(trained.items())[:2])
    found: dict[str, list[float]] = {}
    for n, each in enumerate(trained.values()):
        for name, gradients in sources(each.loss).items():
            progress(n / len(trained), name)
            found.setdefault(name, []).append(each.error(gradients).relative)
    for name in (AUTOCAST, BY_HAND):
        found[name] = [errors[model.name][name].relative for model in trained]
        if not quick:
            exactly = f"{name}, no cast left out by XLA"
            found[exactly] = [
                each.error(scaled_gradients(ways()[name](model)), excess_precision=False).relative
                for model, each in trained.items()
            ]
    columns = [("float32, but", "{}"), *((model.name, "{:.1e}") for model in trained)]
    notes = (
        "Everything is float32 but what is named, forward and backward. Operands and results rounded: what any way to "
        "compute products in float16 has at least, if all other arithmetic is exact.",
    )
    rows = [(name, *values) for name, values in found.items()]
    marks = [
        _quick(
            Mark(f"autocast: gradient error over that of its products alone, {model.name}", value / floor, 1.05), quick
        )
        for model, value, floor in zip(trained, found[AUTOCAST], found["operands and results rounded"], strict=True)
    ]
    return Table("Where errors of gradients come from", columns, rows, marks, notes, quick)


def _on_a_mesh(quick: bool, sizes: dict[str, int]) -> Table:
    model = mesh.sharded(transformer(**{**sizes, "heads": mesh.DEVICES, "batch": mesh.DEVICES}))
    arguments = jax.eval_shape(lambda: (model.params(), model.batch(0)))
    found = {name: mesh.sent(ways()[name](model), *arguments) for name in (FLOAT32, BY_HAND, AUTOCAST)}
    rows = [(name, f"{each.narrow} of {each.total}", each.bytes / _MIB) for name, each in found.items()]
    columns = (("loss", "{}"), ("in half precision", "{}"), ("put in by each device", "{:.1f} MiB"))
    what = f"autocast: gathers of weights and reductions of their gradients in float32, {mesh.DEVICES} devices"
    mark = Mark(what, found[AUTOCAST].total - found[AUTOCAST].narrow, 0, exactly=True)
    notes = (
        "A `jax.shard_map` that gathers each weight where it is used, in the program before XLA. By hand flax casts "
        "what was gathered.",
    )
    return Table(f"Between {mesh.DEVICES} devices: {model.name}", columns, rows, [_quick(mark, quick)], notes, quick)


def _for_h100(quick: bool, sizes: dict[str, int], progress: Progress) -> Table:
    title = f"Programs for an H100, not run: {transformer(**sizes).name}, {sizes['batch']} x {sizes['context']} tokens"
    what = "GPU program (compiled, not run): autocast,"
    marks = [
        Mark(f"{what} products of operands not in float16", None, 0, exactly=True),
        Mark(f"{what} temporaries over by hand", None, 0.8),
        Mark(f"{what} casts over by hand", None, 1.15),
    ]
    if why := cuda.missing():
        return Table(title, (), (), [dataclasses.replace(mark, note=why) for mark in marks])
    found: dict[str, gpu.Compiled] = {}
    asked = [BY_HAND, AUTOCAST] if quick else [name for name in ways() if name not in (JMP, BF16_BF16_F32)]
    for n, name in enumerate(asked):
        progress(n / len(asked), name)
        program = call_apart(gpu.compiled, name, sizes, timeout=_PATIENCE)
        if program is not None:
            found[name] = program
    if not {BY_HAND, AUTOCAST} <= found.keys():
        return Table(title, (), (), [dataclasses.replace(mark, note="XLA did not compile it") for mark in marks])
    rows = []
    for name, program in found.items():
        narrow = program.products.get(("f16", "f16"), 0)
        numbers = (program.temporaries / _MIB, program.temporaries / found[BY_HAND].temporaries)
        traffic = (program.bytes / _MIB, program.bytes / found[BY_HAND].bytes)
        rows.append((name, f"{narrow} of {sum(program.products.values())}", *numbers, *traffic, program.kernels))
        rows[-1] += (program.casts,)
    ours, by_hand = found[AUTOCAST], found[BY_HAND]
    left = sum(ours.products.values()) - ours.products.get(("f16", "f16"), 0)
    values = (left, ours.temporaries / by_hand.temporaries, ours.casts / by_hand.casts)
    marks = [dataclasses.replace(mark, value=v, quick=quick) for mark, v in zip(marks, values, strict=True)]
    columns = (
        ("loss", "{}"),
        ("products in float16", "{}"),
        ("temporaries", "{:.1f} MiB"),
        ("over by hand", "{:.2f}"),
        ("bytes of kernels", "{:.0f} MiB"),
        ("over by hand ", "{:.2f}"),
        ("kernels", "{}"),
        ("casts", "{}"),
    )
    notes = (
        "Value and gradients. Products in float16: both operands are; where XLA splits a sum, its parts are float32. "
        "Bytes: the sizes of all operands and results of all kernels. A cast inside a kernel costs no bytes.",
    )
    return Table(title, columns, rows, marks, notes, quick)


def _timed(quick: bool, sizes: dict[str, int], progress: Progress) -> Table:
    names: Sequence[str] = (FLOAT32, BY_HAND, AUTOCAST, KEPT, TORCH)
    timings = gpu.timed(names, sizes, 5 if quick else 30, progress.part(4, 5, "timing"))
    title = f"GPU: value and gradients of {transformer(**sizes).name}, {sizes['batch']} x {sizes['context']} tokens"
    what = "GPU: value and gradients under autocast over by hand"
    if timings is None:
        return Table(title, (), (), [Mark(what, None, 1.0, note="no GPU here")])
    ratios = {name: timings.ratio(name, BY_HAND) for name in names}
    rows = [(name, 1e3 * timings.median(name), ratios[name].median, ratios[name].spread) for name in names]
    columns = (("loss", "{}"), ("median", "{:.2f} ms"), ("over by hand", "{:.2f}"), ("spread", "{}"))
    mark = Mark(what, ratios[AUTOCAST].median, 1.0, quick=quick, note=f"spread {ratios[AUTOCAST].spread}")
    return Table(title, columns, rows, [mark], quick=quick)


def _quick(mark: Mark, quick: bool) -> Mark:
    return dataclasses.replace(mark, quick=quick)
