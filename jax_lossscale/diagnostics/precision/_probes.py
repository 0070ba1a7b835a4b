"""A program in float32 that can be told, while it runs, which of its products to round as `autocast` would.

Around each product that `autocast` makes narrow stand probes: identities that know which product it is, and that leave
others in the backward pass. The program of value and gradient is traced and compiled once. Where it meets a probe it
rounds the number to half precision, or leaves it, by a number that is an argument. So one program is the function in
float32, under `autocast`, and under each policy. A probe of the backward pass has the value of the forward pass that
its cotangent belongs to: the two tell what rounding this value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._measure.devices import vary
from jax_lossscale._program import custom_rules
from jax_lossscale._program.jaxpr import Traced, bind, bind_here
from jax_lossscale._program.parameters import Path, parameters_of_products, path_of
from jax_lossscale._program.place import Place, place_within
from jax_lossscale.diagnostics.shadow._measuring import MeasuringEvaluator, Rows
from jax_lossscale.diagnostics.tree._reduced import reduced

# What is probed of a product; and of each, its cotangent.
LEFT, RIGHT, RESULT = range(3)
NUMBER_OF_ROLES = 3


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


Key: TypeAlias = tuple[int, int]  # site, and role; those of cotangents come after those of values


class ProductSite(NamedTuple):
    """Products, or calls of `in_half`, that no rule of a policy can tell apart."""

    operation: str
    place: Place  # of which rules know the layer, the source, the functions and the parameter


class Probes:
    """The function with probes, and the products that were met when it was traced.

    Attributes:
      sites: the products, the position of each being its number.
      equations: the products at each, by their ids.
    """

    def __init__(self, fun: Callable[..., Any], dtype: jnp.dtype, names_parameters: bool) -> None:
        self.sites: dict[ProductSite, int] = {}
        self.equations: dict[ProductSite, dict[int, Any]] = {}
        self._dtype = dtype
        self._fun = fun
        self._names_parameters = names_parameters
        self._parameters: dict[Path, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.equations.clear()
        traced = Traced(self._fun, args, kwargs)
        self._parameters = parameters_of_products(traced, args, kwargs) if self._names_parameters else {}
        planner = Planner(self._dtype, PrecisionPolicy(recompute=False))
        rewriting = Rewriting(planner, measured=self._product)
        return traced.result(rewriting.declared(planner.plan(traced.jaxpr), traced.jaxpr, traced.inputs))

    def _product(self, eqn: Any, within: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
        place = place_within(eqn, within)
        known = place._replace(stack="", column="", is_backward=False, instructions=())
        known = known._replace(parameter=self._parameters.get(path_of(within, eqn), ""))
        site = ProductSite(eqn.primitive.name, known)
        number = self.sites.setdefault(site, len(self.sites))
        self.equations.setdefault(site, {})[id(eqn)] = eqn  # kept, lest its id be taken by another
        operands = [_probe_float(value, number, min(n, RIGHT)) for n, value in enumerate(operands)]
        # Else a GPU would round operands that are meant to be exact.
        exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if "precision" in eqn.params else {}
        return [_probe_float(value, number, RESULT) for value in bind_here(eqn, operands, {**eqn.params, **exact})]


_probe_primitive = Primitive("probe")  # of a number, and of the value that it belongs to
_probe_primitive.def_impl(lambda number, value, **_: number)
_probe_primitive.def_abstract_eval(lambda number, value, **_: number)
mlir.register_lowering(_probe_primitive, lambda context, number, value, **_: [number])


def _differentiate(primals: Any, tangents: Any, *, site: int, role: int, kind: str) -> tuple[Any, Any]:
    (number, value), (tangent, _) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _probe(tangent, value, site, role, "tangent")
    return _probe(number, value, site, role, kind), tangent


def _transpose(cotangent: Any, number: Any, value: Any, *, site: int, role: int, kind: str) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent, None]
    if ad.is_undefined_primal(value):  # of a function that is linear, and transposed as it stands: there is no value
        value = jnp.zeros_like(cotangent)
    return [_probe(cotangent, value, site, role, "cotangent"), None]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    size = next(each.shape[axis] for each, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = (
        jnp.broadcast_to(each, (size, *each.shape)) if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(operands, axes, strict=True)
    )
    return _probe_primitive.bind(*moved, **params), 0


ad.primitive_jvps[_probe_primitive] = _differentiate
ad.primitive_transposes[_probe_primitive] = _transpose
batching.primitive_batchers[_probe_primitive] = _batch


def _probe(number: Any, value: Any, site: int, role: int, kind: str) -> Any:
    return _probe_primitive.bind(number, value, site=site, role=role, kind=kind)


def _probe_float(value: Any, site: int, role: int) -> Any:
    return _probe(value, value, site, role, "value") if value.dtype == jnp.float32 else value


class RoundingEvaluator(MeasuringEvaluator):
    """Evaluates jaxprs with probes.

    Args:
      dtype: the half precision.
      strengths: ``float32[2, sites]``: whether what is rounded, 0 or 1: the result of each product, and all else (its
        operands, and every cotangent).
      axes: those of the mesh that it is evaluated on, inside `jax.shard_map`.
    """

    fields = len(Measured._fields)

    def __init__(self, dtype: jnp.dtype, strengths: jax.Array, axes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._dtype = dtype
        self._strengths = strengths
        self._axes = axes

    def measured(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], dict[Key, jax.Array]]:
        """Give the outputs, and the worst of each probe: ``float32[2]``, the fields of `Measured`."""
        outputs, rows = self.evaluate(program, inputs)
        worst: dict[Key, jax.Array] = {}
        for key, row in zip(self.names(program), rows, strict=True):
            worst[key] = jnp.maximum(worst[key], row) if key in worst else row
        return outputs, worst

    def goes_into(self, eqn: Any) -> bool:
        return super().goes_into(eqn) and bool(self.names_within(eqn))

    def measured_of(self, eqn: Any) -> list[Any]:
        is_met = eqn.primitive is _probe_primitive and eqn.params["kind"] != "tangent"
        return [_key(**eqn.params)] if is_met else []

    def nothing(self, program: ClosedJaxpr) -> Rows:
        return [vary(row, self._axes) for row in super().nothing(program)]

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if not self.measured_of(eqn):
            return bind(eqn, inputs, eqn.params)
        number, value = inputs
        site, role = _key(**eqn.params)
        strength = self._strengths[0 if role == RESULT else 1, site]
        self.rows.append(vary(_statistics(number, value, self._dtype, role >= NUMBER_OF_ROLES), self._axes))
        return [jnp.where(strength > 0, number.astype(self._dtype).astype(number.dtype), number)]

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        """Return what each shard measures as an output that is divided over the mesh."""
        axes = custom_rules.axes_of_shard_map(eqn)
        of_shards = RoundingEvaluator(self._dtype, self._strengths, axes)

        def evaluated(jaxpr: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
            outputs, rows = of_shards.evaluate(jaxpr, shards)
            return [*outputs, *(row[None] for row in rows)]

        number = len(self.names_within(eqn))
        divided = [jax.sharding.PartitionSpec(tuple(sorted(axes)))] * number
        outputs = custom_rules.shard_map(evaluated, eqn, inputs, more_out_specs=divided)
        count = len(outputs) - number
        return outputs[:count], [vary(jnp.max(row, axis=0), self._axes) for row in outputs[count:]]

    rules: ClassVar[dict[str, Callable[..., Any]]] = MeasuringEvaluator.rules | {"shard_map": _shard_map}


def _statistics(number: jax.Array, value: jax.Array, dtype: jnp.dtype, is_cotangent: bool) -> jax.Array:
    magnitude = jnp.where(jnp.isfinite(number), jnp.abs(number), 0)
    largest, off, norm, damage = reduced(
        largest=[magnitude],
        sums=[
            _rounding(number, dtype, magnitude),
            magnitude,
            magnitude * _rounding(value, dtype, jnp.abs(value)) if is_cotangent else jnp.zeros_like(magnitude),
        ],
    )
    return jnp.stack([largest, off / jnp.where(norm > 0, norm, 1), damage])


def _rounding(number: jax.Array, dtype: jnp.dtype, otherwise: jax.Array) -> jax.Array:
    """Give the magnitudes of the rounding errors, and something else where they are not finite."""
    error = jnp.abs(number.astype(dtype).astype(number.dtype) - number)
    return jnp.where(jnp.isfinite(error), error, jnp.where(jnp.isfinite(otherwise), otherwise, 0))


def _key(site: int, role: int, kind: str) -> Key:
    return site, role + NUMBER_OF_ROLES * (kind == "cotangent")
