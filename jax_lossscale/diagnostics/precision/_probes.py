"""A program in float32 that can be told, while it runs, which of its products to round as `autocast` would.

Around each product that `autocast` makes narrow stand probes: identities that know which product it is, and that leave
others in the backward pass. The program of value and gradient is traced and compiled once. Where it meets a probe it
rounds the number to half precision, or leaves it, by a number that is an argument. So one program is the function in
float32, under `autocast`, and under each policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from jax_lossscale._autocast.marks import identity
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
    """What a probe measures: the largest magnitude, and the sum of rounding errors, relative to that of magnitudes."""

    largest: Any
    error: Any


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


def _differentiate(primals: Any, tangents: Any, *, site: int, role: int, kind: str) -> tuple[Any, Any]:
    ((value,), (tangent,)) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _probe(tangent, site, role, "tangent")
    return _probe(value, site, role, kind), tangent


def _transpose(cotangent: Any, value: Any, *, site: int, role: int, kind: str) -> list[Any]:
    return [cotangent if isinstance(cotangent, ad.Zero) else _probe(cotangent, site, role, "cotangent")]


_probe_primitive = identity("probe", _transpose)
ad.primitive_jvps[_probe_primitive] = _differentiate


def _probe(value: Any, site: int, role: int, kind: str = "value") -> Any:
    return _probe_primitive.bind(value, site=site, role=role, kind=kind)


def _probe_float(value: Any, site: int, role: int) -> Any:
    return _probe(value, site, role) if value.dtype == jnp.float32 else value


class RoundingEvaluator(MeasuringEvaluator):
    """Evaluates jaxprs with probes.

    Args:
      dtype: the half precision.
      strengths: ``float32[2, sites]``: how much of the rounding is done, 0 or 1: of the result of each product, and of
        all else (its operands, and every cotangent).
      is_smooth: whether the strengths may be differentiated; then infinities do not come in, and nothing is measured.
      axes: those of the mesh that it is evaluated on, inside `jax.shard_map`.
    """

    fields = len(Measured._fields)

    def __init__(
        self, dtype: jnp.dtype, strengths: jax.Array, is_smooth: bool = False, axes: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._strengths = strengths
        self._is_smooth = is_smooth
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
        return [] if self._is_smooth else [vary(row, self._axes) for row in super().nothing(program)]

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if not self.measured_of(eqn):
            return bind(eqn, inputs, eqn.params)
        (value,), site, is_result = inputs, eqn.params["site"], _key(**eqn.params)[1] == RESULT
        strength = self._strengths[0 if is_result else 1, site]
        error = lax.stop_gradient(value.astype(self._dtype).astype(value.dtype) - value)
        if self._is_smooth:
            return [value + strength.astype(value.dtype) * jnp.where(jnp.isfinite(error), error, 0)]
        self.rows.append(vary(_statistics(value, error), self._axes))
        return [jnp.where(strength > 0, value.astype(self._dtype).astype(value.dtype), value)]

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        """Return what each shard measures as an output that is divided over the mesh."""
        axes = custom_rules.axes_of_shard_map(eqn)
        of_shards = RoundingEvaluator(self._dtype, self._strengths, self._is_smooth, axes)

        def evaluated(jaxpr: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
            outputs, rows = of_shards.evaluate(jaxpr, shards)
            return [*outputs, *(row[None] for row in rows)]

        number = 0 if self._is_smooth else len(self.names_within(eqn))
        divided = [jax.sharding.PartitionSpec(tuple(sorted(axes)))] * number
        outputs = custom_rules.shard_map(evaluated, eqn, inputs, more_out_specs=divided)
        count = len(outputs) - number
        return outputs[:count], [vary(jnp.max(row, axis=0), self._axes) for row in outputs[count:]]

    rules: ClassVar[dict[str, Callable[..., Any]]] = MeasuringEvaluator.rules | {"shard_map": _shard_map}


def _statistics(value: jax.Array, error: jax.Array) -> jax.Array:
    magnitude = jnp.where(jnp.isfinite(value), jnp.abs(value), 0)
    errors = jnp.where(jnp.isfinite(error), jnp.abs(error), magnitude)
    largest, off, norm = reduced(largest=[magnitude], sums=[errors, magnitude])
    return jnp.stack([largest, off / jnp.where(norm > 0, norm, 1)])


def _key(site: int, role: int, kind: str) -> Key:
    return site, role + NUMBER_OF_ROLES * (kind == "cotangent")
