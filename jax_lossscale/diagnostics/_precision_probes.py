"""Probes that measure and round the operands, results and cotangents of every matmul of a program.

A probe is an identity that knows its matmul, and that inserts another probe for the cotangent in the backward pass.
`RoundingEvaluator` evaluates a program with probes. At each probe it rounds the value to half precision or leaves it in
float32, depending on an array that is an argument of the compiled program. One compiled program is therefore the
function in float32, under `autocast`, and under each policy. The probe of a cotangent also has the corresponding value
of the forward pass as an operand. The cotangent times the rounding error of this value estimates how much rounding it
changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, mlir

from jax_lossscale._autocast import PrecisionPolicy
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._measure.devices import vary
from jax_lossscale._program import custom_rules
from jax_lossscale._program.jaxpr import Traced, bind, bind_here
from jax_lossscale._program.location import Location, location_within
from jax_lossscale._program.parameters import parameters_of_operations
from jax_lossscale.diagnostics._bits import reduced
from jax_lossscale.diagnostics._shadow import MeasuringEvaluator, Rows

# The levels of precision of a matmul.
HALF, FLOAT32_RESULT, FLOAT32 = range(3)
# The roles of the values that are probed at a matmul, and the ranges of roles of values and of their cotangents.
LEFT, RIGHT, RESULT = range(3)
VALUES, COTANGENTS = slice(0, 3), slice(3, 6)


class MatmulSite(NamedTuple):
    """The matmuls, or calls of `in_half`, that no rule of a policy can distinguish."""

    operation: str
    location: Location  # of which rules know the layer, the source, the functions and the parameter


MatmulsBySite: TypeAlias = dict[MatmulSite, set[Any]]  # the equations at each site


class Measured(NamedTuple):
    """What a probe measures.

    Attributes:
      largest: the largest magnitude.
      error: the sum of rounding errors, relative to that of magnitudes.
      damage: of a cotangent, the sum of its magnitudes times the rounding errors of the value that it belongs to: what
        rounding that value changes in the result, to first order.
    """

    largest: Any
    error: Any
    damage: Any


def with_probes(
    fun: Callable[..., Any], dtype: jnp.dtype, names_parameters: bool, found: MatmulsBySite
) -> Callable[..., Any]:
    """Return the function with probes. When it is traced, it adds its matmuls to ``found``."""

    def probed(*args: Any, **kwargs: Any) -> Any:
        traced = Traced(fun, args, kwargs)
        parameters = parameters_of_operations(traced, args, kwargs) if names_parameters else {}

        def probed_matmul(eqn: Any, within: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
            location = location_within(eqn, within)._replace(stack="", column="", is_backward=False, instructions=())
            site = MatmulSite(eqn.primitive.name, location._replace(parameter=parameters.get((*within, eqn), "")))
            found.setdefault(site, set()).add(eqn)
            number = list(found).index(site)
            operands = [_probe_float(value, number, min(n, RIGHT)) for n, value in enumerate(operands)]
            # Else a GPU would round operands that are meant to be exact.
            exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if "precision" in eqn.params else {}
            return [_probe_float(value, number, RESULT) for value in bind_here(eqn, operands, {**eqn.params, **exact})]

        planner = Planner(dtype, PrecisionPolicy(recompute=False))
        plan = planner.plan(traced.jaxpr)
        return traced.result(Rewriting(planner, measured=probed_matmul).declared(plan, traced.jaxpr, traced.inputs))

    return probed


_probe_primitive = Primitive("probe")  # of a number, and of the value that it belongs to
_probe_primitive.def_impl(lambda number, value, **_: number)
_probe_primitive.def_abstract_eval(lambda number, value, **_: number)
mlir.register_lowering(_probe_primitive, lambda context, number, value, **_: [number])


def _differentiate(primals: Any, tangents: Any, *, kind: str, **at: int) -> tuple[Any, Any]:
    (number, value), (tangent, _) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _probe_primitive.bind(tangent, value, kind="tangent", **at)
    return _probe_primitive.bind(number, value, kind=kind, **at), tangent


def _transpose(cotangent: Any, number: Any, value: Any, *, kind: str, **at: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent, None]
    if ad.is_undefined_primal(value):  # of a function that is linear, and transposed as it stands: there is no value
        value = jnp.zeros_like(cotangent)
    return [_probe_primitive.bind(cotangent, value, kind="cotangent", **at), None]


ad.primitive_jvps[_probe_primitive] = _differentiate
ad.primitive_transposes[_probe_primitive] = _transpose


def _probe_float(value: Any, site: int, role: int) -> Any:
    is_probed = value.dtype == jnp.float32
    return _probe_primitive.bind(value, value, site=site, role=role, kind="value") if is_probed else value


class RoundingEvaluator(MeasuringEvaluator):
    """Evaluates jaxprs with probes, each of which measures, and adds a row of the fields of `Measured`.

    Args:
      dtype: the half precision.
      strengths: ``float32[2, sites]``: whether what is rounded, 0 or 1: the result of each product, and all else (its
        operands, and every cotangent).
      axes: those of the mesh that it is evaluated on, inside `jax.shard_map`.
    """

    fields = len(Measured._fields)

    def __init__(self, dtype: jnp.dtype, strengths: Any = None, axes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._dtype, self._strengths, self._axes = dtype, strengths, axes

    def goes_into(self, eqn: Any) -> bool:
        return super().goes_into(eqn) and bool(self.names_within(eqn))

    def measured_of(self, eqn: Any) -> list[Any]:
        """Name a probe by its site and its role; the roles of cotangents come after those of values."""
        if eqn.primitive is not _probe_primitive or eqn.params["kind"] == "tangent":
            return []
        roles = COTANGENTS if eqn.params["kind"] == "cotangent" else VALUES
        return [(eqn.params["site"], roles.start + eqn.params["role"])]

    def nothing(self, program: ClosedJaxpr) -> Rows:
        return [vary(row, self._axes) for row in super().nothing(program)]

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        for site, role in self.measured_of(eqn):
            number, value = inputs
            self.rows.append(vary(_statistics(number, value, self._dtype, role >= COTANGENTS.start), self._axes))
            is_rounded = self._strengths[0 if role == RESULT else 1, site] > 0
            return [jnp.where(is_rounded, number.astype(self._dtype).astype(number.dtype), number)]
        return bind(eqn, inputs, eqn.params)

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        """Return what each shard measures as an output that is divided over the mesh."""
        axes = custom_rules.axes_of_shard_map(eqn)
        of_shards = RoundingEvaluator(self._dtype, self._strengths, axes)

        def evaluated(jaxpr: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
            outputs, rows = of_shards.evaluate(jaxpr, shards)
            return [*outputs, *(row[None] for row in rows)]

        divided = [jax.sharding.PartitionSpec(tuple(sorted(axes)))] * len(self.names_within(eqn))
        outputs = custom_rules.shard_map(evaluated, eqn, inputs, more_out_specs=divided)
        count = len(eqn.outvars)
        return outputs[:count], [vary(jnp.max(row, axis=0), self._axes) for row in outputs[count:]]

    rules: ClassVar[dict[str, Callable[..., Any]]] = MeasuringEvaluator.rules | {"shard_map": _shard_map}


def _statistics(number: jax.Array, value: jax.Array, dtype: jnp.dtype, is_cotangent: bool) -> jax.Array:
    def rounding(number: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Give the magnitudes of the rounding errors, and something else where they are not finite."""
        error = jnp.abs(number.astype(dtype).astype(number.dtype) - number)
        return jnp.where(jnp.isfinite(error), error, jnp.where(jnp.isfinite(otherwise), otherwise, 0))

    magnitude = jnp.where(jnp.isfinite(number), jnp.abs(number), 0)
    damages = magnitude * rounding(value, jnp.abs(value)) if is_cotangent else jnp.zeros_like(magnitude)
    largest, error, norm, damage = reduced([magnitude], [rounding(number, magnitude), magnitude, damages])
    return jnp.stack([largest, error / jnp.where(norm > 0, norm, 1), damage])
