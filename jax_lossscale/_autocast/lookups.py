"""Lookups of rows in an argument, such as an embedding table, that read the table in half precision.

In general, the dtype of a lookup is that of the table. However, a table that is rounded before the lookup is sent
between devices in half precision. Rounding commutes with a lookup, so a lookup reads the rounded table if either

- only matmuls in half precision use the rows, or
- a matmul in half precision uses the table as well, so the table is rounded anyway, and a skip connection adds other
  values to the rows. Rows that are subtracted from each other, such as coordinates, are therefore not rounded.

The gradient of the table is summed in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jax_lossscale._autocast.marks import as_float32
from jax_lossscale._autocast.plan import NodeKind, NodePlan
from jax_lossscale._autocast.use_analysis import going_into_matmuls, takes_half
from jax_lossscale._program.inline import Graph, ValueId, value_ids
from jax_lossscale._program.jaxpr import as_dtype, bind_here, size_of
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import moved_operands
from jax_lossscale._program.propagation import Propagation


def lookups(graph: Graph, node_plans: Sequence[NodePlan], closed: ClosedJaxpr) -> Iterator[int]:
    """Return the positions of the nodes that read rows of an argument of the graph in half precision."""
    tables: dict[ValueId, ValueId] = {value_id: value_id for value_id in graph.inputs}
    multiplied: set[ValueId] = set()
    for node, node_plan in zip(graph.nodes, node_plans, strict=True):
        operands = [tables[operand] for operand in value_ids(node.inputs) if operand in tables]
        if takes_half(node_plan):
            multiplied.update(operands)
        elif node_plan.kind is NodeKind.DATA_MOVEMENT and len(node.inputs) == len(operands) == 1:
            tables.update(dict.fromkeys(node.outputs, operands[0]))
    into_matmuls: set[ValueId] | None = None
    for position, node in enumerate(graph.nodes):
        if node_plans[position].kind is NodeKind.DATA_MOVEMENT and _reads_rows(node.eqn) and node.inputs[0] in tables:
            into_matmuls = into_matmuls or going_into_matmuls(graph, node_plans)
            is_multiplied = tables[node.inputs[0]] in multiplied
            if node.outputs[0] in into_matmuls or (is_multiplied and _Sums(node.eqn).are_skip_connections(closed)):
                yield position


def _reads_rows(eqn: Any) -> bool:
    """Return whether an equation reads whole rows of a table, one row per index."""
    if eqn.primitive.name != "gather":
        return False
    collapsed, shape = eqn.params["dimension_numbers"].collapsed_slice_dims, eqn.invars[0].aval.shape
    return collapsed == (0,) and eqn.params["slice_sizes"] == (1, *shape[1:]) and len(shape) > 1


class _Sums(Propagation[int | None]):
    """Number the sums to which the rows of a lookup are added.

    The rows have the number 0, and each sum of rows and other values has a new number. Data movement and
    multiplications by scalars preserve the number. All other values are represented by None.

    Args:
      lookup: the equation of the lookup.
    """

    follows = Propagation.follows | {"shard_map"}

    def __init__(self, lookup: Any) -> None:
        self._lookup = lookup
        self._numbers = itertools.count(1)
        self._added: set[int | None] = set()
        self._used: set[int | None] = set()

    def are_skip_connections(self, closed: ClosedJaxpr) -> bool:
        """Return whether the rows, or a sum that contains them, are both added to a value and used otherwise."""
        self.outputs(closed, [None] * len(closed.in_avals))
        return not self._added.isdisjoint(self._used)

    def value_of(self, constant: Any, aval: Any) -> None:
        return None

    def joined(self, values: Sequence[int | None]) -> int | None:
        return next((value for value in values if value is not None), None)

    def operation(self, eqn: Any, location: Location, operands: Sequence[int | None]) -> Sequence[int | None]:
        numbers = {*operands} - {None}
        if eqn is self._lookup:
            return [0]
        if not numbers:
            return [None] * len(eqn.outvars)
        if eqn.primitive.name == "add":
            self._added |= numbers
            return [next(self._numbers)]
        is_scaled = eqn.primitive.name == "mul" and min(size_of(atom.aval) for atom in eqn.invars) == 1
        moved = [range(2)] if is_scaled else moved_operands(eqn)
        if moved is not None:
            return [self.joined([operands[n] for n in of_result]) for of_result in moved]
        self._used |= numbers
        return [None] * len(eqn.outvars)


def lookup(eqn: Any, operands: Sequence[Any], dtype: jnp.dtype) -> jax.Array:
    """Return rows of a table in float32, rounded to half precision. The gradient of the table is summed in float32."""

    @jax.custom_jvp
    def rows(table: Any, *indices: Any) -> Any:
        return as_float32(*bind_here(eqn, [as_dtype(table, dtype), *indices], eqn.params))

    @rows.defjvp
    def derivative(operands: Any, tangents: Any) -> Any:
        # Without the barrier, XLA adds the terms of the sum to the other gradient of a tied table. If this gradient is
        # sharded, XLA gathers it first.
        tangent = jax.lax.optimization_barrier(as_dtype(tangents[0], jnp.dtype(jnp.float32)))
        return rows(*operands), *bind_here(eqn, [tangent, *operands[1:]], eqn.params)

    result: jax.Array = rows(*operands)
    return result
