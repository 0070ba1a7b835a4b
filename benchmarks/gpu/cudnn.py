"""cuDNN attention in a float32 program with `in_half`, compared with manual casts; compiled for H100s, but not run.

The program computes the value and the gradients of two blocks, each with a norm and causal attention. A 2 x 4 mesh
shards the examples and the heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from benchmarks.gpu import cuda
from benchmarks.gpu.gpu_program import Program, read
from benchmarks.gpu.hlo import Computation, Instruction, parse
from benchmarks.gpu.meshes import mesh_of
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns

_BLOCKS, _WIDTH, _HEADS, _EXAMPLES, _CONTEXT = 2, 512, 8, 16, 1024
_FORWARD, _BACKWARD = (f'custom_call_target="__cudnn$fmha{name}"' for name in ("Softmax", "SoftmaxBackward"))
_LAID_OUT = frozenset({"bitcast", "copy", "get-tuple-element", "transpose"})
_COLUMNS = columns(
    "called | key heads | written | kernels forward | backward | casts beside them | predicted {:.3f} ms | "
    "over manual casts {:.2f} | temporaries over manual casts {:.2f}"
)
_NOTES = (
    "Manual casts: everything is cast to float16, except for norms and the loss. Collectives count as memory reads "
    "and writes.",
    "Kernels are the attention kernels of cuDNN. Casts are kernels that convert an operand or a result of attention.",
)

_PLAIN = functools.partial(jax.nn.dot_product_attention, is_causal=True)
_CUDNN = functools.partial(_PLAIN, implementation="cudnn")
_IN_HALF = jls.in_half(_CUDNN, _PLAIN)
_HALF_RESIDUAL_STREAM = jls.PrecisionPolicy(half_residual_stream=True)
_WAYS: dict[str, tuple[Any, Any, Any]] = {
    "manual casts": (_CUDNN, jnp.float16, lambda loss: loss),
    "autocast, in_half": (_IN_HALF, jnp.float32, jls.autocast),
    "the same, half_residual_stream": (
        _IN_HALF,
        jnp.float32,
        functools.partial(jls.autocast, policy=_HALF_RESIDUAL_STREAM),
    ),
}


def _on_shards(attend: Any) -> Any:
    by_head = P("data", None, "model")
    return jax.shard_map(attend, in_specs=(by_head,) * 3, out_specs=by_head)


# For each case: how attention is called, the type of the mesh axes, and the leading dimensions before the examples.
_CASES: dict[str, tuple[Callable[[Any], Any], AxisType, tuple[int, ...]]] = {
    "automatic axes": (lambda attend: attend, AxisType.Auto, ()),
    "explicit axes": (lambda attend: attend, AxisType.Explicit, ()),
    "shard_map": (_on_shards, AxisType.Auto, ()),
    "vmap": (jax.vmap, AxisType.Auto, (4,)),
}


def _compiled(case: str, key_heads: int, way: str) -> jax.stages.Compiled:
    call, axis_type, before = _CASES[case]
    attend, dtype, cast = _WAYS[way]
    mesh = mesh_of(cuda.devices("1x1x8"), {"data": 2, "model": 4}, axis_type)

    def block(x: jax.Array, weights: Any) -> jax.Array:
        weights = jax.tree.map(lambda weight: weight.astype(dtype), weights)
        x32 = x.astype(jnp.float32)
        normal = (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(dtype)
        q, k, v = (jnp.einsum("...sd,dhk->...shk", normal, weights[name]) for name in "qkv")
        out_sharding = P("data") if axis_type is AxisType.Explicit else None
        return x + jnp.einsum("...shk,hkd->...sd", call(attend)(q, k, v), weights["out"], out_sharding=out_sharding)

    def loss(blocks: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(functools.reduce(block, blocks, x.astype(dtype)).astype(jnp.float32) ** 2)

    def array(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    heads, size = {"q": _HEADS, "k": key_heads, "v": key_heads}, _WIDTH // _HEADS
    weights = {name: array(P(None, "model"), _WIDTH, count, size) for name, count in heads.items()}
    weights["out"] = array(P("model"), _HEADS, size, _WIDTH)
    x = array(P("data"), *before, _EXAMPLES // math.prod(before), _CONTEXT, _WIDTH)
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(cast(loss))).trace([weights] * _BLOCKS, x)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def _casts_beside(text: str) -> int:
    """Return the number of kernels that cast an operand or a result of cuDNN attention.

    Layout changes between the cast and the attention are ignored.
    """
    computations, _ = parse(text)

    def source(computation: Computation, name: str) -> Instruction:
        found = computation[name]
        return source(computation, found.operands[0]) if found.opcode in _LAID_OUT else found

    def is_attention(instruction: Instruction) -> bool:
        return "__cudnn$fmha" in instruction.attributes

    def casts(instruction: Instruction) -> bool:
        inside = computations[instruction.callees[0]].values() if instruction.opcode == "fusion" else [instruction]
        return any(part.opcode == "convert" for part in inside)

    edges = [
        (source(computation, operand), instruction)
        for computation in computations.values()
        for instruction in computation.values()
        if instruction.opcode not in _LAID_OUT
        for operand in instruction.operands
    ]
    return sum((casts(a) and is_attention(b)) or (is_attention(a) and casts(b)) for a, b in edges)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return one table of all cases."""
    what = "GPU program (compiled, not run): cuDNN by `in_half`"
    if why := cuda.missing():
        return [Table(what, (), (), [Mark(f"{what}: kernels missing", None, 0, exactly=True, note=why)])]
    cuda.start()
    from jax._src.cudnn import fused_attention_stablehlo

    # By default, JAX queries the version of the cuDNN library, which may not be installed.
    fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    rows: list[Any] = []
    for n, (case, key_heads) in enumerate(itertools.product(_CASES, (_HEADS, _HEADS // 2))):
        programs: dict[str, Program] = {}
        for way in _WAYS:
            progress(n / len(_CASES) / 2, f"{case}, {key_heads} key heads, {way}")
            compiled = _compiled(case, key_heads, way)
            text = compiled.as_text() or ""
            program = programs[way] = read(text, compiled.memory_analysis().temp_size_in_bytes)
            counts = text.count(_FORWARD), text.count(_BACKWARD), _casts_beside(text)
            times = 1e3 * program.seconds(), *program.over(programs["manual casts"])
            rows.append((case, key_heads, way, *counts, *times))
    marks = [
        Mark(f"{what}: kernels missing", max(_BLOCKS - min(row[3:5]) for row in rows), 0, exactly=True),
        Mark(f"{what}: casts beside them", max(row[5] for row in rows), 0, exactly=True),
    ]
    title = f"Programs for eight H100s, not run: {_BLOCKS} blocks, {_EXAMPLES} x {_CONTEXT} tokens, {_HEADS} heads"
    return [Table(title, _COLUMNS, rows, marks, _NOTES)]
