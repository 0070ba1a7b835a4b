"""The benchmark ``python -m benchmarks tpu``: training steps in bfloat16 that are compiled for TPUs, but not run.

XLA estimates the cycles of each operation of the program, and the size of the temporary memory is exact. Each program
takes up to two minutes to compile. Its estimates are appended to ``results/tpu.jsonl``, and ``--resume`` reuses them.
On a TPU, the steps are also timed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.autocast import on_gpu
from benchmarks.autocast.gpu import networks, training_step
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, HALF_RESIDUAL_STREAM, MANUAL_CASTS
from benchmarks.gpu.hlo import Computation, parse
from benchmarks.gpu.kernels import turns
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns

ESTIMATES = Path(__file__).parents[1] / "results" / "tpu.jsonl"
_TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
_MODELS = (
    *("transformer 4 x 512", "transformer 12 x 768", "12 x 768, scan and remat", "50,304 words", "ResNet-18"),
    *("convolution net", "LSTM", "Mamba", "experts", "MLP-Mixer", "LoRA", "DiT", "Mamba-2", "Llama"),
)
_WAYS = (FLOAT32, MANUAL_CASTS, AUTOCAST, HALF_RESIDUAL_STREAM)
_UNKNOWN_CYCLES = 2**63 - 1  # XLA reports this number if it cannot estimate the cycles of an operation.
_PATIENCE = 1200.0  # The time limit in seconds to compile a program.
# The goals of `autocast` relative to other ways: the largest median and maximum of the cycles and of the temporaries.
_GOALS = {MANUAL_CASTS: ((1.00, 1.10), (0.95, 1.15)), FLOAT32: ((0.95, 1.00), (0.75, 1.00))}
_COLUMNS = columns(
    "model | cycles, manual casts {:.2f} M | over manual casts {:.2f} | over float32 {:.2f} | "
    "half residual stream {:.2f} | temporaries, manual casts {:.0f} MiB | over manual casts {:.2f} | "
    "over float32 {:.2f} | half residual stream {:.2f} | bytes, over manual casts {:.2f} | over float32 {:.2f}"
)
_OPTIMIZERS = "four layers of 1,024"  # The name under which the estimates of `optimizers` are stored.
_OPTIMIZER_COLUMNS = columns("step | cycles {:.3f} M | over Adam in float32 {:.2f} | temporaries {:.0f} MiB")
_OPTIMIZER_NOTES = (
    "Training steps of a network with four layers of 1,024 units and a batch of 4,096, compiled for a v5e. Clipping by "
    "the global norm and the check of `loss_scaled` need all gradients before the first update. XLA therefore cannot "
    "update the weights in the kernels that compute their gradients.",
)
_NOTES = (
    "Estimated cycles, temporary memory and accessed bytes of training steps with Adam in bfloat16, under `autocast`. "
    "The columns for `PrecisionPolicy(half_residual_stream=True)` are relative to manual casts. Only models that do "
    "not reach a goal with the default policy are compiled with it.",
    "XLA estimates the cycles of a gather, a scatter and an asynchronous copy as 0. Operations without an estimate "
    "also count as 0. The bytes that a loop accesses are counted for one iteration.",
    "On a TPU, float32 matmuls are computed in bfloat16 by default. Arrays in VMEM (128 MiB) do not count as "
    "temporaries.",
)


class Estimate(NamedTuple):
    """Properties of a compiled program: estimated cycles, bytes of temporaries, and estimated bytes accessed."""

    cycles: float
    temporaries: float
    bytes: float

    def over(self, other: Estimate) -> Estimate:
        """Divide the properties of this program by those of another program."""
        return Estimate(*(mine / theirs for mine, theirs in zip(self, other, strict=True)))


def run(quick: bool, progress: Progress, resume: bool = False) -> list[Table]:
    """Return a table for each kind of TPU, a table of optimizers, and on a TPU, a table of measured times.

    Args:
      quick: whether to compile only one model. The estimates are then not stored.
      progress: the progress.
      resume: whether to reuse the stored estimates of an earlier run.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError("the benchmark tpu needs libtpu: pip install -e '.[bench]' --group bench-tpu")
    names = ("LSTM",) if quick else _MODELS
    if not quick and not resume:
        ESTIMATES.unlink(missing_ok=True)
    known = {} if quick else dict(_stored())
    cases = [(kind, name, way) for kind in _TOPOLOGIES for name in names for way in _WAYS]
    cases += [] if quick else [("v5e", _OPTIMIZERS, way) for way in optimizers()]
    for n, case in enumerate(cases):
        progress(n / len(cases), ", ".join(case))
        if case[-1] == HALF_RESIDUAL_STREAM and not _misses_goal(known, *case[:2]):
            continue
        if case not in known and (found := call_apart(estimate, *case, timeout=_PATIENCE)):
            known[case] = found
            if not quick:
                with ESTIMATES.open("a") as file:
                    file.write(json.dumps([*case, *found]) + "\n")
    tables = [_table(kind, names, known, quick) for kind in _TOPOLOGIES]
    if not quick:
        tables.append(_optimizer_table(known))
    return tables + (
        [on_gpu.measured(names, quick, progress, jnp.bfloat16, {})] if jax.default_backend() == "tpu" else []
    )


def estimate(kind: str, name: str, way: str) -> Estimate:
    """Compile a training step for a TPU, and return its estimates. This function must run in a separate process."""
    if name == _OPTIMIZERS:
        step, *arguments = optimizer_step(*optimizers()[way])
        return read(compile_for_one(step, *arguments, kind=kind))
    step, begin = training_step(networks()[name], way, jnp.bfloat16)
    return read(compile_for_one(step, *jax.eval_shape(begin), kind=kind))


def optimizers() -> dict[str, tuple[optax.GradientTransformation, DTypeLike, DTypeLike]]:
    """Return a dictionary that maps names to optimizers, each with the dtypes of `autocast` and of the parameters."""
    adam = optax.adam(1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    half_rounded = jls.stochastic_rounding(jls.half_precision_state(adam))
    return {
        "Adam in float32": (adam, jnp.float32, jnp.float32),
        "Adam in float32, clipped by the global norm": (clipped, jnp.float32, jnp.float32),
        "`loss_scaled(adam)` in float32": (jls.loss_scaled(adam), jnp.float32, jnp.float32),
        "Adam, `autocast` in bfloat16": (adam, jnp.bfloat16, jnp.float32),
        "`loss_scaled(adam)`, `autocast` in float16": (jls.loss_scaled(adam), jnp.float16, jnp.float32),
        "Adam, bfloat16 parameters": (adam, jnp.bfloat16, jnp.bfloat16),
        "`stochastic_rounding(adam)`": (jls.stochastic_rounding(adam), jnp.bfloat16, jnp.bfloat16),
        "`stochastic_rounding(half_precision_state(adam))`": (half_rounded, jnp.bfloat16, jnp.bfloat16),
        "`master_weights(adam)`": (jls.master_weights(adam), jnp.bfloat16, jnp.bfloat16),
    }


def optimizer_step(tx: Any, dtype: DTypeLike, params_dtype: DTypeLike) -> tuple[Any, ...]:
    """Return a jitted training step of a network with four layers, and the types of its arguments."""
    params = [jax.ShapeDtypeStruct(shape, params_dtype) for shape in ((1024, 1024), (1024,)) for _ in range(4)]

    def loss(params: Any, x: Any) -> Any:
        for weights, bias in zip(params[:4], params[4:], strict=True):
            x = x + jax.nn.gelu(x @ weights + bias)
        return jnp.mean(x**2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss_fn = jls.autocast(loss, dtype)
        if isinstance(tx, jls.LossScaledTransformation):
            value, grads = jls.value_and_scaled_grad(loss_fn, opt_state)(params, batch)
            return *tx.update_and_apply(grads, opt_state, params, value=value), value
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    return jax.jit(step, donate_argnums=(0, 1)), params, jax.eval_shape(tx.init, params), batch


def compile_for_one(function: Any, *arguments: Any, kind: str) -> jax.stages.Compiled:
    """Compile a jitted function for one TPU. Only the shapes and dtypes of the arguments are used."""
    # libtpu would otherwise look for a TPU, and wait for other processes that use libtpu.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    device = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[kind]).devices[0]
    there = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), arguments)
    return function.trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def read(program: jax.stages.Compiled) -> Estimate:
    """Return the estimates of a program that is compiled for a TPU."""
    computations, entry = parse(program.as_text() or "")
    temporaries = program.memory_analysis().temp_size_in_bytes
    return Estimate(_cycles(computations, entry), temporaries, program.cost_analysis()["bytes accessed"])


def _cycles(computations: Mapping[str, Computation], computation: Computation) -> int:
    """Return the estimated cycles of a computation, including all iterations of its loops."""
    total = 0
    for instruction in computation.values():
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        total += cycles if cycles < _UNKNOWN_CYCLES else 0
        if instruction.opcode == "while":
            body = computations[instruction.attribute(r"body=%([^\s,]+)")]
            total += turns(computations, computation, instruction) * _cycles(computations, body)
        elif instruction.opcode in ("call", "conditional"):
            total += max(_cycles(computations, computations[name]) for name in instruction.callees)
    return total


def _stored() -> Iterator[tuple[tuple[str, str, str], Estimate]]:
    """Yield the estimates that earlier runs have stored."""
    for line in ESTIMATES.read_text().splitlines() if ESTIMATES.exists() else ():
        kind, name, way, *numbers = json.loads(line)
        yield (kind, name, way), Estimate(*numbers)


def _misses_goal(known: Mapping[tuple[str, str, str], Estimate], kind: str, name: str) -> bool:
    """Return whether a program with `autocast` needs more cycles or temporaries than the goals permit."""
    manual, ours = (known.get((kind, name, way)) for way in (MANUAL_CASTS, AUTOCAST))
    (_, cycles), (_, temporaries) = _GOALS[MANUAL_CASTS]
    if manual is None or ours is None:
        return False
    ratios = ours.over(manual)
    return ratios.cycles > cycles or ratios.temporaries > temporaries


def _table(kind: str, names: Sequence[str], known: Mapping[tuple[str, str, str], Estimate], quick: bool) -> Table:
    """Return a table that compares the programs of each model."""
    rows: list[tuple[Cell, ...]] = []
    ratios: dict[str, list[Estimate]] = {way: [] for way in _GOALS}
    for name in names:
        if any((kind, name, way) not in known for way in _WAYS[:3]):
            rows.append((name, "not compiled", *[None] * (len(_COLUMNS) - 2)))
            continue
        float32, manual, ours = (known[kind, name, way] for way in _WAYS[:3])
        half = known.get((kind, name, HALF_RESIDUAL_STREAM))
        in_half = half.over(manual) if half and _misses_goal(known, kind, name) else None
        to_manual, to_float32 = ours.over(manual), ours.over(float32)
        ratios[MANUAL_CASTS].append(to_manual)
        ratios[FLOAT32].append(to_float32)
        rows.append(
            (
                *(name, manual.cycles / 1e6, to_manual.cycles, to_float32.cycles, in_half and in_half.cycles),
                *(manual.temporaries / 2**20, to_manual.temporaries, to_float32.temporaries),
                *(in_half and in_half.temporaries, to_manual.bytes, to_float32.bytes),
            )
        )
    marks = []
    for way, goals in _GOALS.items():
        for what, of_what in zip(("cycles", "temporaries"), goals, strict=True):
            values = [getattr(ratio, what) for ratio in ratios[way]]
            for goal, statistic in zip(of_what, (statistics.median, max), strict=True):
                name = f"TPU {kind} program (compiled, not run): autocast: {statistic.__name__} {what} over {way}"
                marks.append(Mark(name, statistic(values) if values else None, goal))
    return Table(f"Training steps in bfloat16 for a TPU {kind}, not run", _COLUMNS, rows, marks, _NOTES, quick)


def _optimizer_table(known: Mapping[tuple[str, str, str], Estimate]) -> Table:
    """Return the table of the estimates for the `optimizers`."""
    found = {way: known["v5e", _OPTIMIZERS, way] for way in optimizers() if ("v5e", _OPTIMIZERS, way) in known}
    adam = next(iter(found.values()), None)
    rows = [(way, step.cycles / 1e6, step.over(adam).cycles, step.temporaries / 2**20) for way, step in found.items()]
    return Table("Optimizers on a TPU v5e, not run", _OPTIMIZER_COLUMNS, rows, [], _OPTIMIZER_NOTES, False)
