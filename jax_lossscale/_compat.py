"""What an older JAX lacks, or calls by another name: everything else is written for the newest.

Each fallback says before which version it is needed. Once `pyproject.toml` asks for that version a test fails until the
fallback is gone; ``python tests/versions.py`` tests with every minor version from the oldest to the newest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

_JAX = jax.__version_info__
SCOPE = "function_in_a_scope"  # which is no layer of the user's

# Whether a lowering rule may hold a `jax.shard_map`. Needed before jax 0.7.0: XLA aborts on such a program once stored.
CAN_LOWER_SHARD_MAP = _JAX >= (0, 7, 0)


def shard_map(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.shard_map`."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, **options)
    return _experimental_shard_map(function, **options)  # needed before jax 0.6.1


def _experimental_shard_map(
    function: Callable[..., Any], *, mesh: Any, axis_names: Any = frozenset(), check_vma: bool = True, **specs: Any
) -> Callable[..., Any]:
    from jax.experimental.shard_map import shard_map as experimental

    options = {"check_rep": check_vma, "auto": frozenset(mesh.axis_names if axis_names else ()) - frozenset(axis_names)}
    return experimental(function, mesh=mesh, **options, **specs)


def shard_map_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """What `shard_map` was called with, from the parameters of its equation in a jaxpr."""
    if "in_specs" in params:
        return {
            "mesh": params["mesh"],
            "in_specs": tuple(params["in_specs"]),
            "out_specs": list(params["out_specs"]),
            "axis_names": params.get("newly_manual_axes", params.get("manual_axes")),
            "check_vma": params["check_vma"],
        }
    return {  # needed before jax 0.6.1
        "mesh": params["mesh"],
        "in_specs": tuple(map(_spec_of_names, params["in_names"])),
        "out_specs": list(map(_spec_of_names, params["out_names"])),
        "axis_names": frozenset(params["mesh"].axis_names) - params["auto"],
        "check_vma": params["check_rep"],
    }


def _spec_of_names(names: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    """From the names of the mesh axes that each dimension is split over."""
    return PartitionSpec(*(names.get(dimension) for dimension in range(max(names, default=-1) + 1)))


def bind(primitive: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """What the primitive of an equation in a jaxpr gives, with the parameters that it has there."""
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # needed before jax 0.9.0
        functions, options = bound
        return primitive.bind(*functions, *inputs, **options)
    return primitive.bind(*inputs, **bound)


def called_jaxpr(params: Mapping[str, Any]) -> Any:
    """The jaxpr of a function with a derivative of its own, from the parameters of its equation."""
    return params["call_jaxpr"] if "call_jaxpr" in params else params["fun_jaxpr"]  # needed before jax 0.6.1


def in_a_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, the equations of whose derivative say which of them are backward."""
    if _JAX >= (0, 7, 0):
        return function

    @functools.wraps(function)  # needed before jax 0.7.0: what no scope surrounds has no mark of a transformation
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(SCOPE):
            return function(*args, **kwargs)

    return scoped


def transposable(solution: jax.Array) -> jax.Array:
    """What `jax.lax.custom_linear_solve` gave, whose transpose shall also take the cotangent of what nothing uses."""
    if _JAX >= (0, 7, 0):
        return solution
    # Needed before jax 0.7.0: that transpose takes no symbolic zero, and the barrier's makes an array of it.
    return jax.lax.optimization_barrier(solution)


def with_dtype(struct: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    """The same `jax.ShapeDtypeStruct`, of another dtype."""
    if hasattr(struct, "update"):
        return struct.update(dtype=dtype)
    # Needed before jax 0.6.1.
    return jax.ShapeDtypeStruct(struct.shape, dtype, sharding=struct.sharding, weak_type=struct.weak_type)


def types_of_result(function: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape`, with types that tell `axes_varied_over`."""
    if _JAX >= (0, 7, 0) or not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.eval_shape(function, *args)
    types: list[Any] = []  # needed before jax 0.7.0

    def note_types(*args: Any) -> Any:
        result = function(*args)
        types.append(jax.tree.map(jax.typeof, result))
        return result

    jax.eval_shape(note_types, *args)
    return types[0]


def as_varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same values, said to differ along these mesh axes, inside `jax.shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # type: ignore[attr-defined]  # needed before jax 0.8.0


def axes_varied_over(array_type: Any) -> frozenset[str]:
    """The mesh axes along which an array of this type, `jax.typeof` or `jax.ShapeDtypeStruct`, differs."""
    if _JAX >= (0, 10, 0):
        manual = array_type.manual_axis_type
        return frozenset() if manual is None else manual.varying
    return array_type.vma or frozenset()  # needed before jax 0.10.0
