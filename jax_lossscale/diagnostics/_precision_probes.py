"""Probes that measure and round the operands, results and cotangents of every matmul in a program.

A probe is an identity operation. The parameters of a probe are the index of a matmul and the role of the probed value
in this matmul: left operand, right operand or result. In the backward pass, each probe inserts another probe for the
cotangent of the probed value.

`RoundingEvaluator` evaluates a program with probes. An array argument of the compiled program determines which probes
round their values to half precision. The same compiled program can therefore compute the function in float32, under
`autocast`, or under any policy.

In a probe for a cotangent, the second operand is the forward-pass value to which the cotangent belongs. The product of
a cotangent and the rounding error of its forward-pass value estimates how much the result of the program changes if the
value is rounded.
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
from jax_lossscale._program.location import Location, Path, location_at
from jax_lossscale._program.parameters import parameters_of_operations
from jax_lossscale.diagnostics._bits import reduced, rounded
from jax_lossscale.diagnostics._shadow import HigherOrderRule, MeasuredRows, MeasuringEvaluator

# Precision levels of a matmul, from the lowest to the highest.
HALF, FLOAT32_RESULT, FLOAT32 = range(3)
# The role of a probed value is an index: 0, 1 and 2 for the left operand, the right operand and the result of a matmul,
# and 3, 4 and 5 for the cotangents of these three values. The slice `VALUES` contains the indices 0 to 2, and
# the slice `COTANGENTS` contains the indices 3 to 5.
LEFT, RIGHT, RESULT = range(3)
VALUES, COTANGENTS = slice(0, 3), slice(3, 6)


class MatmulSite(NamedTuple):
    """The site of matmuls (or calls to `in_half` functions) that the rules of a policy cannot distinguish."""

    operation: str  # the name of the primitive
    location: Location  # the layer, source, functions and parameter that the rules can match; the rest is empty


MatmulsBySite: TypeAlias = dict[MatmulSite, set[Path]]  # A dictionary from each site to the paths of its matmuls.


class ProbeMeasurements(NamedTuple):
    """The measurements of a probe, or arrays of the measurements of several probes."""

    largest: Any  # the largest magnitude
    error: Any  # the sum of the rounding errors in half precision, divided by the sum of the magnitudes
    # For a cotangent, the sum of its magnitudes multiplied by the rounding errors of the corresponding value in the
    # forward pass. The damage is a first-order estimate of how much the result of the program changes if this value is
    # rounded.
    damage: Any


def with_probes(
    fun: Callable[..., Any], dtype: jnp.dtype, names_parameters: bool, found: MatmulsBySite
) -> Callable[..., Any]:
    """Return a version of a function with probes at all matmuls that `autocast` computes in half precision.

    Args:
      fun: the function.
      dtype: the half-precision dtype.
      names_parameters: whether the sites contain the paths of parameters.
      found: a dictionary to which the matmuls are added when the new function is traced.
    """

    def probed(*args: Any, **kwargs: Any) -> Any:
        traced = Traced(fun, args, kwargs)
        parameters = parameters_of_operations(traced, args, kwargs) if names_parameters else {}

        def probed_matmul(eqn: Any, within: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
            location = location_at((*within, eqn))._replace(stack="", column="", is_backward=False)
            site = MatmulSite(eqn.primitive.name, location._replace(parameter=parameters.get((*within, eqn), "")))
            found.setdefault(site, set()).add((*within, eqn))
            number = list(found).index(site)
            operands = [_probe_float(value, number, min(n, RIGHT)) for n, value in enumerate(operands)]
            # Unless the precision of a matmul is `HIGHEST`, a GPU may round the float32 operands to fewer bits.
            exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if "precision" in eqn.params else {}
            return [_probe_float(value, number, RESULT) for value in bind_here(eqn, operands, {**eqn.params, **exact})]

        planner = Planner(dtype, PrecisionPolicy(recompute=False), parameters={})
        plan = planner.plan(traced.jaxpr)
        return traced.result(Rewriting(planner, measured=probed_matmul).declared(plan, traced.jaxpr, traced.inputs))

    return probed


# A probe returns its first operand unchanged and uses its second operand only for measurements.
_probe_primitive = Primitive("probe")
_probe_primitive.def_impl(lambda number, value, **_: number)
_probe_primitive.def_abstract_eval(lambda number, value, **_: number)
mlir.register_lowering(_probe_primitive, lambda context, number, value, **_: [number])


def _differentiate(primals: Any, tangents: Any, *, kind: str, **at: int) -> tuple[Any, Any]:
    (number, value), (tangent, _) = primals, tangents
    # The probe of the tangent does not measure anything, but its transpose is the probe of the cotangent.
    if not isinstance(tangent, ad.Zero):
        tangent = _probe_primitive.bind(tangent, value, kind="tangent", **at)
    return _probe_primitive.bind(number, value, kind=kind, **at), tangent


def _transpose(cotangent: Any, number: Any, value: Any, *, kind: str, **at: int) -> list[Any]:
    if ad.is_undefined_primal(value):
        # `jax.linear_transpose` transposes a function without evaluating it, so the forward-pass value is unknown.
        value = jnp.zeros_like(cotangent)
    return [_probe_primitive.bind(cotangent, value, kind="cotangent", **at), None]


# `deflinear2` also defines a rule for tangents, which `_differentiate` replaces.
ad.deflinear2(_probe_primitive, _transpose)
ad.primitive_jvps[_probe_primitive] = _differentiate


def _probe_float(value: Any, site: int, role: int) -> Any:
    is_probed = value.dtype == jnp.float32
    return _probe_primitive.bind(value, value, site=site, role=role, kind="value") if is_probed else value


class RoundingEvaluator(MeasuringEvaluator):
    """Interpreter for jaxprs with probes. Each probe records one row with the fields of `ProbeMeasurements`.

    Args:
      dtype: the half-precision dtype.
      are_rounded: an array ``bool[2, sites]`` that determines which values are rounded. For each site, the first row
        determines whether the results of its matmuls are rounded. The second row determines whether their operands and
        cotangents are rounded.
      axes: the names of the mesh axes inside `jax.shard_map`.
    """

    fields = len(ProbeMeasurements._fields)

    def __init__(self, dtype: jnp.dtype, are_rounded: Any = None, axes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._dtype, self._are_rounded, self._axes = dtype, are_rounded, axes

    # Sub-jaxprs without probes are bound as they are, because nothing in them is measured or rounded.
    def goes_into(self, eqn: Any) -> bool:
        return super().goes_into(eqn) and bool(self.names_within(eqn))

    def measured_of(self, eqn: Any) -> list[Any]:
        """Return ``[(site, role)]`` for a probe of a value or a cotangent, and ``[]`` for any other equation.

        ``site`` is the index of a matmul site, and ``role`` is one of the indices in ``VALUES`` and ``COTANGENTS``.
        """
        if eqn.primitive is not _probe_primitive or eqn.params["kind"] == "tangent":
            return []
        roles = COTANGENTS if eqn.params["kind"] == "cotangent" else VALUES
        return [(eqn.params["site"], roles.start + eqn.params["role"])]

    def nothing(self, program: ClosedJaxpr) -> MeasuredRows:
        return [vary(row, self._axes) for row in super().nothing(program)]

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        for site, role in self.measured_of(eqn):
            number, value = inputs
            self.rows.append(vary(_statistics(number, value, self._dtype, role >= COTANGENTS.start), self._axes))
            is_rounded = self._are_rounded[0 if role == RESULT else 1, site]
            return [jnp.where(is_rounded, rounded(number, self._dtype), number)]
        return bind(eqn, inputs, eqn.params)

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        """Evaluate a `jax.shard_map`.

        The measurements of each shard are returned as additional outputs, which are partitioned over the mesh.
        """
        axes = custom_rules.axes_of_shard_map(eqn)
        of_shards = RoundingEvaluator(self._dtype, self._are_rounded, axes)

        def evaluated(jaxpr: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
            outputs, rows = of_shards.evaluate(jaxpr, shards)
            return [*outputs, *(row[None] for row in rows)]

        divided = [jax.sharding.PartitionSpec(tuple(sorted(axes)))] * len(self.names_within(eqn))
        outputs = custom_rules.shard_map(evaluated, eqn, inputs, more_out_specs=divided)
        count = len(eqn.outvars)
        return outputs[:count], [vary(jnp.max(row, axis=0), self._axes) for row in outputs[count:]]

    rules: ClassVar[dict[str, HigherOrderRule]] = MeasuringEvaluator.rules | {"shard_map": _shard_map}


def _statistics(number: jax.Array, value: jax.Array, dtype: jnp.dtype, is_cotangent: bool) -> jax.Array:
    def rounding(number: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Return the magnitudes of the rounding errors of ``number``, or ``otherwise`` if an error is not finite."""
        error = jnp.abs(rounded(number, dtype) - number)
        return jnp.where(jnp.isfinite(error), error, jnp.where(jnp.isfinite(otherwise), otherwise, 0))

    magnitude = jnp.where(jnp.isfinite(number), jnp.abs(number), 0)
    damages = magnitude * rounding(value, jnp.abs(value)) if is_cotangent else jnp.zeros_like(magnitude)
    largest, error, norm, damage = reduced([magnitude], [rounding(number, magnitude), magnitude, damages])
    return jnp.stack([largest, error / jnp.where(norm > 0, norm, 1), damage])
