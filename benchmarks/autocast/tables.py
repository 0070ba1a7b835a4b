"""The benchmark ``python -m benchmarks autocast``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.autocast import costs, gpu, tracing
from benchmarks.autocast.counting import bytes_saved, dtypes_of_matmuls
from benchmarks.autocast.models import Transformer, model_of
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, HALF, HALF_RESIDUAL_STREAM, MANUAL_CASTS, WAYS
from benchmarks.gpu import cuda
from benchmarks.gpu.gpu_program import Program
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns

# The goals for the time and the temporaries of `jls.autocast`, relative to manual casts in the same model.
_GOALS = {
    "transformer 4 x 512": (1.0, 0.75),
    "transformer 12 x 768": (0.93, 0.67),
    "12 x 768, scan and remat": (0.95, 1.05),
    "ResNet-18": (1.0, 0.8),
    "ResNet-50": (1.1, 0.9),
    "Mamba": (0.97, 0.81),
    "Mamba, read by an einsum": (0.89, 0.80),
    "LSTM": (0.73, 0.79),
    "experts": (1.05, 1.15),
    "one-hot words": (1.05, 0.75),
    "50,304 words": (1.1, 1.3),
    "convolution net": (1.15, 0.87),
}
# The goals with a residual stream in half precision.
_SKIP_GOALS = {"12 x 768, scan and remat": (1.05, 1.0), "ResNet-50": (1.05, 0.8), "convolution net": (1.1, 0.65)}
_QUICK_MODELS = ("LSTM",)
_SAVED_GOALS = {0.0: 0.4, 0.1: 0.5}  # The keys are dropout rates.
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.
_COMPARED = (FLOAT32, MANUAL_CASTS, AUTOCAST)
_STEPS = columns(
    "model | loss | time {:.3f} ms | over manual casts {:.2f} | temporaries {:.1f} MiB | over manual casts {:.2f} | "
    "read and written {:.2f} GB | kernels | matmuls"
)
_MIB = 2**20


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return all tables."""
    models = _QUICK_MODELS if quick else tuple(_GOALS)
    return [
        _steps(models, quick, progress.part(0, 4, "for an H100")),
        _compile_time(quick, progress.part(1, 4, "compile time")),
        tracing.table(quick, progress.part(2, 4, "trace time")),
        _saved(quick),
        *costs.tables(quick, progress.part(3, 4, "other costs")),
    ]


def _steps(models: Sequence[str], quick: bool, progress: Progress) -> Table:
    rows: list[tuple[Cell, ...]] = []
    marks: list[Mark] = []
    for n, model in enumerate(models):
        part = progress.part(n, len(models), model)
        programs: dict[str, Program] = {}
        ways = (*_COMPARED, HALF_RESIDUAL_STREAM) if model in _SKIP_GOALS else _COMPARED
        for m, way in enumerate(ways if not cuda.missing() else ()):
            part(m / len(ways), way)
            if (program := call_apart(gpu.compiled, model, way, timeout=_PATIENCE)) is not None:
                programs[way] = program
        rows += [(model, *row) for row in _rows(programs)]
        marks += _step_marks(model, programs)
    notes = (
        "The step computes the loss and the gradients, and applies Adam with `update_and_apply` to donated arrays. The "
        "time is a prediction: for each kernel, the larger of the time to move its bytes at 3.35 TB/s and the time to "
        "compute its matmuls at peak throughput. Caches, launches and tuning are not considered.",
        "Transformers: flax, 8 x 256 and 8 x 1024 tokens. ResNets: 64 images of 224 x 224. Mamba: 2 blocks of width "
        "512, an associative scan in float32, 8 x 512 tokens. LSTM: 2 layers of width 512, 64 x 256 tokens. Manual "
        "casts: the argument `dtype=float16` of the layers.",
        "Experts: 8 experts, 2 blocks of width 512, 8 x 512 tokens. Words: an embedding table that is read by a matmul "
        "with a one-hot array (8,192 x 512, 8 x 512 tokens), or by index (50,304 x 1,024, 8 x 256 tokens). Convolution "
        "net: 3 blocks, 64 images of 56 x 56 x 64.",
    )
    return Table("Training steps for an H100, not run", _STEPS, rows, marks, notes, quick)


def _rows(programs: dict[str, Program]) -> Iterator[tuple[Cell, ...]]:
    manual = programs.get(MANUAL_CASTS)
    for way, program in programs.items():
        matmuls = ", ".join(f"{n} in {dtype}" for dtype, n in dtypes_of_matmuls(program.kernels).items())
        time, temporaries = program.over(manual) if manual else (None, None)
        row = (way, 1e3 * program.seconds, time, program.temporaries / _MIB, temporaries, program.bytes / 1e9)
        yield (*row, len(program.kernels), matmuls)


def _step_marks(model: str, programs: dict[str, Program]) -> Iterator[Mark]:
    manual, float32 = programs.get(MANUAL_CASTS), programs.get(FLOAT32)
    for way, goals in (AUTOCAST, _GOALS), (HALF_RESIDUAL_STREAM, _SKIP_GOALS):
        values, note = [None] * 3, cuda.missing() or "XLA did not compile it"
        if manual and float32 and (ours := programs.get(way)):
            values, note = [*ours.over(manual), ours.over(float32)[0]], ""
        whats = ("predicted time over manual casts", "temporaries over manual casts", "predicted time over float32")
        for what, value, goal in zip(whats, values, (*goals[model], 1.0) if model in goals else (), strict=False):
            yield Mark(f"GPU program (compiled, not run): {way}, {model}: {what}", value, goal, note=note)


def _compile_time(quick: bool, progress: Progress) -> Table:
    note = cuda.missing() or ("omitted by --quick" if quick else "")
    progress(0)
    timings = None if note else call_apart(gpu.seconds_to_compile, 12, 3, tuple(WAYS), timeout=_PATIENCE)
    over = {way: timings.minimum(way) / timings.minimum(FLOAT32) for way in WAYS} if timings else {}
    rows = [(way, timings.minimum(way), ratio) for way, ratio in over.items()]
    what = "autocast: trace, lower and compile over float32, 12 blocks"
    mark = Mark(what, over.get(AUTOCAST), 1.15, note=note or ("" if over else "XLA did not compile it"))
    title = "Trace, lower and compile for an H100: value and gradients of a transformer, 12 blocks of 768"
    return Table(title, columns("loss | processor {:.2f} s | over float32 {:.2f}"), rows, [mark])


def _saved(quick: bool) -> Table:
    rows, marks = [], []
    for rate, goal in _SAVED_GOALS.items():
        network = model_of(Transformer, (8, 256, 512), blocks=4, heads=8, dropout=rate)
        saved = {way: bytes_saved(loss(network, HALF), *network.arguments()) for way, loss in WAYS.items()}
        rows += [(rate, way, number / _MIB, number / saved[MANUAL_CASTS]) for way, number in saved.items()]
        what = "autocast: bytes saved for the backward pass over manual casts" + (", with dropout" if rate else "")
        marks.append(Mark(what, saved[AUTOCAST] / saved[MANUAL_CASTS], goal))
    notes = (
        "The values that `jax.vjp` saves for the backward pass, without the function's arguments, before XLA runs.",
    )
    heads = columns("dropout | loss | saved {:.1f} MiB | over manual casts {:.2f}")
    return Table("Saved for the backward pass: transformer 4 x 512", heads, rows, marks, notes, quick)
