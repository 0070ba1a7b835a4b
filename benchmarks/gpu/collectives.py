"""Bytes that one of eight devices sends and receives in a training step of a decoder, for common sharding layouts.

XLA partitions and compiles the program for H100s (group ``bench-cuda``), and the compiled program is analyzed but not
run. The bytes of a collective are the size of its operands or of its results, whichever is larger.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from benchmarks.gpu import cuda
from benchmarks.gpu.hlo import Computation, parse
from benchmarks.gpu.kernels import turns
from benchmarks.gpu.meshes import mesh_of
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Table, columns

_HEADS, _BATCH, _CONTEXT, _VOCABULARY, _BLOCKS = 8, 16, 512, 8192, 2
_GATHERED, _REDUCED, _OTHER = "gathered", "reduced", "other"
_KINDS = {
    **{"all-gather": _GATHERED, "all-reduce": _REDUCED, "reduce-scatter": _REDUCED},
    **{"all-to-all": _OTHER, "collective-permute": _OTHER, "ragged-all-to-all": _OTHER},
}
_COLUMNS = columns(
    "layout | written | gathered in float32 {:.1f} MB | in float16 {:.1f} MB | reduced in float32 {:.1f} MB | "
    "in float16 {:.1f} MB | other {:.1f} MB | all {:.1f} MB | over manual casts {:.2f} | temporaries {:.0f} MB"
)
_NOTES = (
    "Manual casts: parameters and activations are cast to float16; softmax, norms and the loss are float32. Table "
    "cast: the program for `autocast` casts the embedding table for the lookup of tokens.",
    "The step computes the loss and the gradients, and applies Adam to donated arrays. All iterations of a loop count.",
    "The gradient of the tied table is the sum of two gradients. In float32, XLA combines their all-reduces into one. "
    "In FSDP, the float32 program gathers one gradient to scatter the other one into it.",
)


class Layout(NamedTuple):
    """A variant of the decoder, and its sharding on a mesh of eight devices.

    Attributes:
      name: the name in the table.
      mesh: the shape of the mesh by axis name.
      weights: the partition specs of the weights by name; "all" for all other weights.
      is_scanned: whether the blocks are executed by `jax.lax.scan`.
      axis_type: the type of the mesh axes.
    """

    name: str
    mesh: dict[str, int]
    weights: dict[str, P]
    is_scanned: bool = False
    axis_type: AxisType = AxisType.Auto

    def placed(self, mesh: Mesh, name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of a weight. The weights of blocks are stacked for a scan."""
        spec = self.weights.get(name, self.weights["all"])
        if self.is_scanned and name != "table":
            shape, spec = (_BLOCKS, *shape), P(None, *spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def params(self, mesh: Mesh, width: int) -> Any:
        """Return the shapes, dtypes and shardings of all weights."""
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        block = {name: self.placed(mesh, name, shape) for name, shape in shapes.items()}
        blocks = block if self.is_scanned else [block] * _BLOCKS
        return {"table": self.placed(mesh, "table", (_VOCABULARY, width)), "blocks": blocks}


_ON_ROWS = {"all": P("data")}
_BY_COLUMNS_THEN_ROWS = {"all": P(None, "model"), "table": P("model"), "out": P("model"), "down": P("model")}
LAYOUTS = (
    Layout("data parallel", {"data": 8}, {"all": P()}),
    Layout("data parallel, explicit axes", {"data": 8}, {"all": P()}, axis_type=AxisType.Explicit),
    Layout("FSDP", {"data": 8}, _ON_ROWS),
    Layout("FSDP, explicit axes", {"data": 8}, _ON_ROWS, axis_type=AxisType.Explicit),
    Layout("FSDP, scan", {"data": 8}, _ON_ROWS, is_scanned=True),
    Layout("tensor parallel, 2 x 4", {"data": 2, "model": 4}, _BY_COLUMNS_THEN_ROWS),
)
_NOTHING_AGAIN = jls.PrecisionPolicy(recompute=False)
WAYS = {
    "float32": {"dtype": jnp.float32},
    "manual casts": {"dtype": jnp.float16},
    "autocast": {"cast": jls.autocast},
    "autocast, recompute=False": {"cast": functools.partial(jls.autocast, policy=_NOTHING_AGAIN)},
    "autocast, table cast": {"cast": jls.autocast, "table": jnp.float16},
}


def loss_of(layout: Layout, dtype: Any = jnp.float32, table: Any = None) -> Any:
    """Return the cross-entropy of a decoder.

    Args:
      layout: the layout of the decoder.
      dtype: the dtype of the activations and of the operands of matmuls.
      table: the dtype to which the embedding table is cast for the lookup of tokens, if any.
    """
    is_explicit = layout.axis_type is AxisType.Explicit  # then the program gathers what the compiler does not

    def whole(weight: jax.Array, dtype: Any = dtype) -> jax.Array:
        weight = weight.astype(dtype)
        return jax.sharding.reshard(weight, P()) if is_explicit else weight

    def by_example(x: jax.Array) -> jax.Array:
        return x if is_explicit else jax.lax.with_sharding_constraint(x, P("data"))

    def norm(x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(dtype)

    def block(x: jax.Array, weights: Any) -> jax.Array:
        w = jax.tree.map(whole, weights)
        q, k, v = (part.reshape(*x.shape[:2], _HEADS, -1) for part in jnp.split(norm(x) @ w["qkv"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        seen = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", seen, v).reshape(x.shape) @ w["out"]
        return by_example(x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        looked_up = whole(params["table"], table or dtype).at[tokens[:, :-1]]
        x = by_example(looked_up.get(out_sharding=P("data") if is_explicit else None).astype(dtype))
        if layout.is_scanned:
            x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["blocks"])
        else:
            x = functools.reduce(block, params["blocks"], x)
        logits = (norm(x) @ whole(params["table"]).T).astype(jnp.float32)
        right = jnp.sum(jnp.where(tokens[:, 1:, None] == jnp.arange(_VOCABULARY)[None, None], logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    return loss


def compiled(layout: Layout, way: str, width: int) -> jax.stages.Compiled:
    """Return the compiled training step, as XLA partitions it."""
    mesh = mesh_of(cuda.devices("1x1x8"), layout.mesh, layout.axis_type)
    options = dict(WAYS[way])
    cast = options.pop("cast", lambda loss: loss)
    tx = jls.loss_scaled(optax.adam(1e-3), None if way == "float32" else "auto")
    return compile_step(mesh, cast(loss_of(layout, **options)), tx, layout.params(mesh, width))


def compile_step(
    mesh: Mesh, loss: Callable[..., Any], tx: jls.LossScaledTransformation, params: Any
) -> jax.stages.Compiled:
    """Compile a training step that XLA partitions for a mesh according to the shardings of the parameters."""

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = jls.value_and_scaled_grad(loss, opt_state)(params, tokens)
        return *tx.update_and_apply(grads, opt_state, params, value=value), value

    tokens = jax.ShapeDtypeStruct((_BATCH, _CONTEXT + 1), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        state = _placed(jax.eval_shape(tx.init, params), params, NamedSharding(mesh, P()))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
        traced = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None)).trace(params, state, tokens)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def _placed(state: Any, params: Any, replicated: NamedSharding) -> Any:
    """Return the shapes of an optimizer state with shardings.

    Each array has the sharding of the parameter whose path is the end of the path of the array.
    """
    by_path = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def place(path: Any, leaf: Any) -> Any:
        ends = (jax.tree_util.keystr(path[n:]) for n in range(len(path)))
        param = next((by_path[end] for end in ends if end in by_path), None)
        is_alike = param is not None and param.shape == leaf.shape
        return leaf.update(sharding=param.sharding if param is not None and is_alike else replicated)

    return jax.tree_util.tree_map_with_path(place, state)


def moved(text: str) -> Counter[tuple[str, str]]:
    """Return the number of bytes that collectives move, by kind of collective and by dtype.

    Scalars, such as the loss, are not counted.
    """
    computations, entry = parse(text)
    return _moved(computations, entry)


def _moved(computations: Mapping[str, Computation], computation: Computation) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for instruction in computation.values():
        if instruction.opcode == "while":
            inside = _moved(computations, computations[instruction.attribute(r"body=%([^\s,]+)")])
            times = turns(computations, computation, instruction) if inside else 0
            found.update({key: times * count for key, count in inside.items()})
        elif instruction.opcode in ("call", "conditional"):
            branches = [_moved(computations, computations[name]) for name in instruction.callees]
            found += max(branches, key=Counter.total, default=Counter())
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind:
            taken = [array for name in instruction.operands for array in computation[name].arrays]
            # The start operation of a collective returns its operands in addition to its results.
            given = instruction.arrays[-len(taken) :]
            for one, other in zip(taken, given, strict=True):
                if max(one.size, other.size) > 1:
                    found[kind, one.dtype] += max(one.bytes, other.bytes)
    return found


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return one table of all layouts. Without the group ``bench-cuda``, raise an error."""
    if why := cuda.missing():
        raise RuntimeError(f"the benchmark collectives {why}")
    cuda.start()
    rows = list(_rows(256 if quick else 1024, progress))
    title = f"Collectives of one device, compiled for eight H100s: {_BLOCKS} blocks, {_BATCH} x {_CONTEXT} tokens"
    return [Table(title, _COLUMNS, rows, (), _NOTES, quick)]


def _rows(width: int, progress: Progress) -> Iterator[tuple[Any, ...]]:
    for n, layout in enumerate(LAYOUTS):
        manual = None
        for k, way in enumerate(WAYS):
            progress((n + k / len(WAYS)) / len(LAYOUTS), f"{layout.name}, {way}")
            program = compiled(layout, way, width)
            found = moved(program.as_text() or "")
            total = found.total() / 1e6
            by_kind = [found.pop((kind, dtype), 0) / 1e6 for kind in (_GATHERED, _REDUCED) for dtype in ("f32", "f16")]
            other = found.total() / 1e6
            manual = total if way == "manual casts" else manual
            over = total / manual if manual and way != "float32" else None
            yield (layout.name, way, *by_kind, other, total, over, program.memory_analysis().temp_size_in_bytes / 1e6)
