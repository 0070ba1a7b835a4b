"""Matmuls whose results must not be rounded to half precision, because of the operations that use these results.

There are two kinds of such operations:

- Factorizations and solvers. For example, the Cholesky factor of ``A @ A.T + 1e-3 * I`` can be NaN if the matmul is
  computed in half precision.
- Conversions to integers. Half precision cannot represent every integer above 2048 (float16) or 256 (bfloat16). For
  example, in a mixture of experts, ``(jnp.tril(jnp.ones((n, n))) @ one_hot).astype(int)`` numbers the tokens of each
  expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_lossscale._program.inline import Graph, ValueId, inlined, value_ids
from jax_lossscale._program.primitives import LINEAR_ALGEBRA, is_matmul
from jax_lossscale._program.subjaxprs import subjaxprs

_FACTORED = "its result is factorized"
_CONVERTED = "its result is converted to an integer"


class Feeding:
    """Finds the values from which the operands of factorizations and of conversions to integers are computed.

    Each value that the class finds is marked with the reason why the value must not be rounded. The mark "" means that
    the value may be rounded. Marks are propagated backward, from the results of an operation to its operands, with two
    exceptions:

    - Matmuls do not propagate marks, so their operands may be rounded.
    - Results that are not floats do not propagate marks. Examples are `argmax` and comparisons. Rounding the operands
      changes the result of `argmax` or a comparison only if two numbers are almost equal.

    The marks of each jaxpr are cached for each combination of marks on its results, because the analysis of a loop
    visits its body several times. An equation that `subjaxprs` does not support, such as a kernel, is treated as one
    operation.
    """

    def __init__(self) -> None:
        self._arguments: dict[tuple[Jaxpr, tuple[str, ...]], list[str]] = {}

    def values(self, graph: Graph, outputs: Sequence[str]) -> dict[ValueId, str]:
        """Return the marked values of a graph and their marks; ``outputs`` contains the mark of each result."""
        marks: dict[ValueId, str] = {}

        def mark(atoms: Sequence[Any], reasons: Sequence[str]) -> None:
            for atom, reason in zip(atoms, reasons, strict=True):
                if reason:
                    marks.update(dict.fromkeys(value_ids([atom]), reason))

        mark(graph.outputs, outputs)
        for node in reversed(graph.nodes):
            mark(node.inputs, self._equation(node.eqn, [marks.get(name, "") for name in node.outputs])[0])
        return marks

    def results_of_subjaxprs(self, eqn: Any, outputs: Sequence[str]) -> list[list[str]]:
        """Return the marks of the results of each jaxpr in an equation, given the marks of the equation's results."""
        _, of_results = self._equation(eqn, outputs)
        return [_of_subjaxpr(subjaxpr.results, of_results) for subjaxpr in subjaxprs(eqn).jaxprs]

    def _equation(self, eqn: Any, outputs: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the marks of an equation's operands and results, after propagation through the carries of a loop."""
        of_results = list(outputs)
        jaxprs, carried, *_ = subjaxprs(eqn)
        if eqn.primitive.name in LINEAR_ALGEBRA:
            return [_FACTORED] * len(eqn.invars), of_results
        if is_matmul(eqn):
            return [""] * len(eqn.invars), of_results
        if _makes_integers(eqn):
            return [_CONVERTED] * len(eqn.invars), of_results
        if not jaxprs:
            of_floats = [mark for variable, mark in zip(eqn.outvars, outputs, strict=True) if _is_float(variable)]
            return [next(filter(None, of_floats), "")] * len(eqn.invars), of_results
        while True:
            of_operands = [""] * len(eqn.invars)
            for subjaxpr in jaxprs:
                of_subjaxpr = self._of_jaxpr(subjaxpr.closed.jaxpr, tuple(_of_subjaxpr(subjaxpr.results, of_results)))
                for operand, reason in zip(subjaxpr.operands, of_subjaxpr, strict=True):
                    of_operands[operand] = of_operands[operand] or reason
            again = [
                (result, operand) for result, operand in carried if of_operands[operand] and not of_results[result]
            ]
            if not again:
                return of_operands, of_results
            for result, operand in again:
                of_results[result] = of_operands[operand]

    def _of_jaxpr(self, jaxpr: Jaxpr, outputs: tuple[str, ...]) -> list[str]:
        if (jaxpr, outputs) not in self._arguments:
            graph = inlined(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))
            marks = self.values(graph, outputs)
            self._arguments[jaxpr, outputs] = [marks.get(name, "") for name in graph.inputs]
        return self._arguments[jaxpr, outputs]


def _of_subjaxpr(results: Sequence[int], of_results: Sequence[str]) -> list[str]:
    return [of_results[n] if n >= 0 else "" for n in results]


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(getattr(variable.aval, "dtype", bool), jnp.inexact)


def _makes_integers(eqn: Any) -> bool:
    """Return whether an equation converts floats to integers of more than 8 bits.

    Half precision can represent all integers of at most 8 bits, such as those of quantized networks.
    """
    if eqn.primitive.name != "convert_element_type" or not _is_float(eqn.invars[0]):
        return False
    dtype = eqn.params["new_dtype"]
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits > 8
