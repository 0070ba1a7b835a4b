"""Training steps with 16-bit parameters and optimizer states, compiled for H100s but not run.

The first table contains the steps of a decoder like Llama with 115 million parameters on one H100, for a small and a
large batch. If the batch is small, the optimizer takes a large part of the time. The second table contains the
collectives of the decoder of the benchmark `collectives` on eight H100s. Both tables need the dependency group
``bench-cuda``. `sixteen_bit_times` measures the times of the same steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.autocast.models import Model
from benchmarks.autocast.untuned.language import Llama
from benchmarks.autocast.untuned.layers import Integers, model_of
from benchmarks.gpu import cuda
from benchmarks.gpu.collectives import LAYOUTS, Layout, compile_step, loss_of, moved
from benchmarks.gpu.gpu_program import read
from benchmarks.gpu.meshes import mesh_of
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.optimizer import trees

VOCABULARY, CONTEXT = 32_000, 512
BATCHES = {"small batch": 2, "large batch": 32}
_NOT_RUN = "GPU program (compiled, not run)"
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.

Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclass(frozen=True)
class Way:
    """A way to store the parameters and the optimizer state, and to compute the loss.

    Attributes:
      params: the dtype of the parameters.
      wrapped: a function that wraps the optimizer.
      cast: the dtype of manual casts in the program, or ``None`` for `autocast` in bfloat16.
      goal: the largest permitted time relative to `REFERENCE`, or ``None``.
    """

    params: DTypeLike = jnp.float32
    wrapped: Wrapper = lambda optimizer: optimizer
    cast: DTypeLike | None = None
    goal: float | None = None

    def function(self, loss: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """Return the loss function for ``loss(*arguments, dtype)``, whose last argument is the dtype of its casts."""
        if self.cast is not None:
            return loss(*arguments, self.cast)
        return jls.autocast(loss(*arguments, jnp.float32), jnp.bfloat16)


def _master_and_half(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return jls.master_weights(jls.half_precision_state(optimizer))


def _stochastic_and_half(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return jls.stochastic_rounding(jls.half_precision_state(optimizer))


REFERENCE, _MANUAL = "float32 parameters, autocast", "float32 parameters, manual casts"
WAYS = {
    "float32": Way(cast=jnp.float32),
    _MANUAL: Way(cast=jnp.bfloat16),
    REFERENCE: Way(),
    "master weights": Way(jnp.bfloat16, jls.master_weights, goal=0.92),
    "stochastic rounding": Way(jnp.bfloat16, jls.stochastic_rounding, goal=0.87),
    "float32 parameters, half-precision state": Way(wrapped=jls.half_precision_state, goal=0.92),
    "master weights, half-precision state": Way(jnp.bfloat16, _master_and_half, goal=0.83),
    "stochastic rounding, half-precision state": Way(jnp.bfloat16, _stochastic_and_half, goal=0.77),
    "rounded to nearest (loses updates)": Way(jnp.bfloat16),
}
# The ways that are compiled for a mesh, and goals for the bytes of all collectives, relative to manual casts with
# explicit axes.
_ON_MESH = (_MANUAL, REFERENCE, "master weights", "stochastic rounding, half-precision state")
_MESH_GOALS = {"FSDP": 1.50, "FSDP, explicit axes": 1.15}
_MESH_LAYOUTS = tuple(layout for layout in LAYOUTS if layout.name.startswith(("data parallel", "FSDP")))
_MESH_LAYOUTS = tuple(layout for layout in _MESH_LAYOUTS if not layout.is_scanned)
_MESH_WIDTH = 512

_STEP_COLUMNS = columns(
    "batch | step | bytes per parameter {:.2f} | time {:.3f} ms | over float32 parameters, autocast {:.3f} | "
    "temporary bytes per parameter {:.1f} | read and written {:.2f} GB | kernels"
)
_MESH_COLUMNS = columns(
    "layout | step | gathered in float32 {:.1f} MB | in bfloat16 {:.1f} MB | reduced in float32 {:.1f} MB | "
    "in bfloat16 {:.1f} MB | all {:.1f} MB | over manual casts, explicit axes {:.2f} | temporaries {:.0f} MB"
)


def _decoder(batch: int) -> Model:
    """Return the decoder of the first table, whose attention has as many key heads as query heads."""
    options = {"vocabulary": VOCABULARY, "blocks": 4, "width": 1024, "hidden": 2688, "heads": 16, "groups": 16}
    return model_of(Llama, Integers(VOCABULARY, (batch, CONTEXT + 1)), **options)


def training_step(way: Way, batch: int) -> tuple[Any, Any]:
    """Return a jitted AdamW step whose first argument is donated, and a function that returns its arguments."""
    decoder, tx = _decoder(batch), _optimizer(way)
    half = way.function(decoder.loss)

    def begin() -> tuple[tuple[Any, Any, jax.Array], Any]:
        params = jls.cast_floating(decoder.params(), way.params)
        return (params, tx.init(params), jnp.float32(0)), decoder.batch(0)

    def step(state: tuple[Any, Any, jax.Array], tokens: Any) -> tuple[Any, Any, jax.Array]:
        params, opt_state, _ = state
        value, grads = jls.value_and_scaled_grad(half, opt_state)(params, tokens)
        return *tx.update_and_apply(grads, opt_state, params, value=value), value

    return jax.jit(step, donate_argnums=0), begin


def _optimizer(way: Way) -> jls.LossScaledTransformation:
    return jls.loss_scaled(way.wrapped(optax.adamw(3e-4)), None)


def compiled(name: str, batch: int) -> tuple[Cell, ...]:
    """Compile a step for one H100, and return the cells of its row. `compiled` must run in its own process."""
    cuda.start()
    step, begin = training_step(WAYS[name], batch)
    state, tokens = jax.eval_shape(begin)
    program = cuda.compile_for_one(step, state, tokens)
    temporaries = program.memory_analysis().temp_size_in_bytes
    result = read(program.as_text() or "", temporaries)
    count = trees.size(state[0])
    return (
        trees.bytes_of(state) / count,
        1e3 * result.seconds(),
        temporaries / count,
        result.bytes / 1e9,
        len(result.kernels),
    )


def compiled_on_mesh(layout: Layout, name: str, width: int) -> tuple[dict[tuple[str, str], int], int]:
    """Compile a step for eight H100s, and return the bytes that its collectives move, and its temporary memory.

    `compiled_on_mesh` must run in its own process.
    """
    cuda.start()
    mesh, way = mesh_of(cuda.devices("1x1x8"), layout.mesh, layout.axis_type), WAYS[name]
    params = jax.tree.map(lambda leaf: leaf.update(dtype=way.params), layout.params(mesh, width))
    program = compile_step(mesh, way.function(loss_of, layout), _optimizer(way), params)
    return dict(moved(program.as_text() or "")), program.memory_analysis().temp_size_in_bytes


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return a table of the steps for one device, and a table of the collectives on eight devices."""
    if why := cuda.missing():
        what = f"{_NOT_RUN}: training steps with 16-bit parameters"
        return [Table("Steps for an H100, not compiled", (), (), [Mark(what, None, 1.0, note=why)])]
    return [_steps(quick, progress.part(0, 2, "one H100")), _meshes(quick, progress.part(1, 2, "meshes"))]


def title() -> str:
    """Return a description of the model and the optimizer."""
    count = trees.size(jax.eval_shape(_decoder(1).params)) / 1e6
    return f"decoder with {count:.0f} M parameters, AdamW"


def _steps(quick: bool, progress: Progress) -> Table:
    rows: list[tuple[Cell, ...]] = []
    marks: list[Mark] = []
    batches = dict(list(BATCHES.items())[:1]) if quick else BATCHES
    for n, (name, batch) in enumerate(batches.items()):
        found = {}
        for m, way in enumerate(WAYS):
            progress((n + m / len(WAYS)) / len(batches), f"{name}, {way}")
            if (cells := call_apart(compiled, way, batch, timeout=_PATIENCE)) is not None:
                found[way] = cells
                print(f"{name}, {way}:", *(f"{cell:.4g}" for cell in cells), flush=True)
        reference = found[REFERENCE][1]
        for way, (stored, time, *rest) in found.items():
            rows.append((f"{batch} x {CONTEXT}", way, stored, time, time / reference, *rest))
            goal = WAYS[way].goal
            if goal is not None and name == "small batch":
                what = f"estimated time over float32 parameters under autocast, {way}"
                marks.append(Mark(f"{_NOT_RUN}: {what}", time / reference, goal))
    notes = [
        "Bytes per parameter are the sizes of all arrays that the step takes and returns, except for the tokens. The "
        "time is a prediction from the bytes, matmuls, atomic operations and launches of all kernels.",
        "The last step uses `optax.adamw` with bfloat16 parameters and no wrapper, which also stores its moments in "
        "bfloat16 and loses small updates.",
    ]
    return Table(f"Steps for one H100, compiled, not run: {title()}", _STEP_COLUMNS, rows, marks, notes, quick)


def _meshes(quick: bool, progress: Progress) -> Table:
    found = {}
    for n, layout in enumerate(_MESH_LAYOUTS):
        for m, way in enumerate(_ON_MESH):
            progress((n + m / len(_ON_MESH)) / len(_MESH_LAYOUTS), f"{layout.name}, {way}")
            width = _MESH_WIDTH // 2 if quick else _MESH_WIDTH
            if (result := call_apart(compiled_on_mesh, layout, way, width, timeout=_PATIENCE)) is not None:
                found[layout.name, way] = result
                print(f"{layout.name}, {way}: {result}", flush=True)
    rows = list(_mesh_rows(found))
    over = {(row[0], row[1]): row[-2] for row in rows}
    marks = [
        Mark(
            f"GPU program (compiled, not run): bytes of all collectives, {layout}, {way}", over.get((layout, way)), goal
        )
        for layout, goal in _MESH_GOALS.items()
        for way in _ON_MESH[2:]
    ]
    notes = [
        "The bytes of a collective are the size of its operands or of its results, whichever is larger. The last "
        "columns compare all bytes with those of manual casts of float32 parameters in the same kind of layout with "
        "explicit axes, and show the temporary memory of one device.",
    ]
    title = f"Collectives of one of eight H100s, compiled, not run: 2 blocks, 16 x {CONTEXT} tokens"
    return Table(title, _MESH_COLUMNS, rows, marks, notes, quick)


def _mesh_rows(found: dict[tuple[str, str], tuple[dict[tuple[str, str], int], int]]) -> Iterator[tuple[Any, ...]]:
    totals = {key: sum(counts.values()) for key, (counts, _) in found.items()}
    for (layout, way), (counts, temporaries) in found.items():
        kinds = [("gathered", "f32"), ("gathered", "bf16"), ("reduced", "f32"), ("reduced", "bf16")]
        explicit = f"{layout.removesuffix(', explicit axes')}, explicit axes"
        over = totals[layout, way] / totals[explicit, _MANUAL] if (explicit, _MANUAL) in totals else None
        by_kind = (counts.get(kind, 0) / 1e6 for kind in kinds)
        yield layout, way, *by_kind, totals[layout, way] / 1e6, over, temporaries / 1e6
