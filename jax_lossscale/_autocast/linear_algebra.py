"""Matmuls whose results must not be rounded to half precision, because of the operations that use these results.

There are three kinds of such matmuls:

- The result is used by a factorization or a solver. For example, the Cholesky factor of ``A @ A.T + 1e-3 * I`` can be
  NaN if the matmul is computed in half precision.
- The result is used in a product of several matrices that is factorized, such as ``C @ P`` in the Cholesky factor of
  ``C @ P @ C.T + R``. If only the outer matmul is computed in float32, its result is as inaccurate as the result of the
  inner matmul.
- The result is converted to an integer. Half precision cannot represent every integer above 2048 (float16) or 256
  (bfloat16). For example, in a mixture of experts, ``(jnp.tril(jnp.ones((n, n))) @ one_hot).astype(int)`` numbers the
  tokens of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_lossscale._program import primitives
from jax_lossscale._program.inline import Graph, ValueId, inlined, value_ids
from jax_lossscale._program.jaxpr import has_dtype, size_of_shape
from jax_lossscale._program.subjaxprs import subjaxprs

# The reasons why a value must not be rounded. The set is empty if the value may be rounded.
Reasons: TypeAlias = frozenset[str]
# The values of a graph that must not be rounded, each with the reasons why.
Unrounded: TypeAlias = Mapping[ValueId, Reasons]

NO_REASON: Reasons = frozenset()
_FACTORED = frozenset({"its result is factorized"})
_CONVERTED = frozenset({"its result is converted to an integer"})
_IN_PRODUCT = frozenset({"its result is part of a product that is factorized"})
# Operations that propagate the reason `_IN_PRODUCT` to all operands. `sort` compares the numbers that it moves.
_LINEAR = (primitives.ADDITIONS | primitives.CONVERSIONS | primitives.DATA_MOVEMENT) - {"sort"}


class Feeding:
    """Finds the values from which the operands of factorizations and of conversions to integers are computed.

    For each value, the class collects the reasons why the value must not be rounded. Reasons are propagated backward,
    from the results of an operation to its operands, with the following exceptions:

    - If the result of a matmul is factorized or belongs to a product that is factorized, the operands of the matmul
      belong to such a product as well. Otherwise, the operands may be rounded.
    - Only matmuls, data movement, additions, subtractions, and multiplications or divisions by a scalar propagate the
      reason `_IN_PRODUCT`. For example, rounding is allowed for the result of a matmul before an activation function. A
      selection with a mask counts as data movement, unless the mask is the result of an elementwise comparison of
      floats, as in the leaky ReLU.
    - Results that are not floats do not propagate reasons. Examples are `argmax` and comparisons. Rounding the operands
      changes the result of `argmax` or a comparison only if two numbers are almost equal.

    The analysis of a loop visits its body several times. Therefore, the reasons for the arguments of a jaxpr are cached
    for each combination of reasons for the results of the jaxpr. An equation that `subjaxprs` does not support, such as
    a kernel, is treated as one operation.
    """

    def __init__(self) -> None:
        self._arguments: dict[tuple[Jaxpr, tuple[Reasons, ...]], list[Reasons]] = {}

    def values(self, graph: Graph, outputs: Sequence[Reasons]) -> dict[ValueId, Reasons]:
        """Return the values of a graph that must not be rounded, as a dictionary that maps each value to the reasons.

        Args:
          graph: the graph.
          outputs: for each of the first results of the graph, the reasons why it must not be rounded. All other results
            may be rounded.
        """
        found: dict[ValueId, Reasons] = {}

        def add(atoms: Sequence[Any], reasons: Sequence[Reasons]) -> None:
            for atom, of_atom in zip(atoms, reasons, strict=False):
                for value_id in value_ids([atom]) if of_atom else ():
                    found[value_id] = found.get(value_id, NO_REASON) | of_atom

        add(graph.outputs, outputs)
        comparisons = _elementwise_comparisons(graph)
        for node in reversed(graph.nodes):
            of_operands, _ = self._equation(node.eqn, of_values(found, node.outputs))
            if not comparisons.isdisjoint(value_ids(node.inputs)):
                of_operands = [of_operand - _IN_PRODUCT for of_operand in of_operands]
            add(node.inputs, of_operands)
        return found

    def results_of_subjaxprs(self, eqn: Any, outputs: Sequence[Reasons]) -> list[list[Reasons]]:
        """Return the reasons why the results of each jaxpr in an equation must not be rounded.

        Args:
          eqn: the equation.
          outputs: the reasons for the results of the equation.
        """
        _, of_results = self._equation(eqn, outputs)
        return [_of_subjaxpr(subjaxpr.results, of_results) for subjaxpr in subjaxprs(eqn).jaxprs]

    def _equation(self, eqn: Any, outputs: Sequence[Reasons]) -> tuple[list[Reasons], list[Reasons]]:
        """Return the reasons why the operands and the results of an equation must not be rounded.

        For each result, ``outputs`` contains the reasons why it must not be rounded. For a loop, reasons are added for
        the results of the body that are arguments of the next iteration.
        """
        of_results = list(outputs)
        jaxprs, carried, *_ = subjaxprs(eqn)
        if eqn.primitive.name in primitives.LINEAR_ALGEBRA and not jaxprs:
            return [_FACTORED] * len(eqn.invars), of_results
        if primitives.is_matmul(eqn):
            is_factored = not (_FACTORED | _IN_PRODUCT).isdisjoint(outputs[0])
            return [_IN_PRODUCT if is_factored else NO_REASON] * len(eqn.invars), of_results
        # Half precision can represent all integers of at most 8 bits, such as those of quantized networks.
        if primitives.is_cast_to_integer(eqn) and jnp.iinfo(eqn.params["new_dtype"]).bits > 8:
            return [_CONVERTED] * len(eqn.invars), of_results
        if not jaxprs:
            with_reasons = zip(eqn.outvars, outputs, strict=True)
            reasons = NO_REASON.union(*(each for atom, each in with_reasons if has_dtype(atom.aval, jnp.inexact)))
            return [reasons if is_linear else reasons - _IN_PRODUCT for is_linear in _linear_operands(eqn)], of_results
        # Each carry that the body of a loop returns is an argument of the next iteration. If the argument must not be
        # rounded, the returned carry must not be rounded either, so its set of reasons must include those of the
        # argument. Adding reasons to a carry can add reasons to other arguments, so the body is analyzed again until
        # the sets no longer change.
        while True:
            of_operands = [NO_REASON] * len(eqn.invars)
            for subjaxpr in jaxprs:
                of_subjaxpr = self._of_jaxpr(subjaxpr.closed.jaxpr, tuple(_of_subjaxpr(subjaxpr.results, of_results)))
                for operand, of_operand in zip(subjaxpr.operands, of_subjaxpr, strict=True):
                    of_operands[operand] |= of_operand
            again = [(result, operand) for result, operand in carried if not of_operands[operand] <= of_results[result]]
            if not again:
                return of_operands, of_results
            for result, operand in again:
                of_results[result] |= of_operands[operand]

    def _of_jaxpr(self, jaxpr: Jaxpr, outputs: tuple[Reasons, ...]) -> list[Reasons]:
        if (jaxpr, outputs) not in self._arguments:
            graph = inlined(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))
            self._arguments[jaxpr, outputs] = of_values(self.values(graph, outputs), graph.inputs)
        return self._arguments[jaxpr, outputs]


def of_values(found: Unrounded, values: Sequence[ValueId]) -> list[Reasons]:
    """Return the reasons why each value must not be rounded. Values that are not in ``found`` may be rounded."""
    return [found.get(value_id, NO_REASON) for value_id in values]


def reason_in_reports(reasons: Reasons) -> str:
    """Return the reason that the reports print for a matmul, or "" if ``reasons`` is empty."""
    return next((reason for kind in (_FACTORED, _CONVERTED, _IN_PRODUCT) for reason in kind & reasons), "")


def _of_subjaxpr(results: Sequence[int], of_results: Sequence[Reasons]) -> list[Reasons]:
    return [of_results[n] if n >= 0 else NO_REASON for n in results]


def _linear_operands(eqn: Any) -> list[bool]:
    """Return, for each operand of an operation, whether the reason `_IN_PRODUCT` is propagated to this operand.

    This is true for data movement, additions, subtractions, and multiplications or divisions of the operand by a
    scalar.
    """
    name = eqn.primitive.name
    if name == "mul":
        return [_is_scalar(other) for other in reversed(eqn.invars)]
    if name == "div":
        return [_is_scalar(eqn.invars[1]), False]
    return [name in _LINEAR] * len(eqn.invars)


def _elementwise_comparisons(graph: Graph) -> set[ValueId]:
    """Return the boolean arrays of a graph that are computed from elementwise comparisons of floats.

    An array that contains a single boolean for each matrix selects whole matrices, so it is not included.
    """
    found: set[ValueId] = set()
    for node in graph.nodes:
        eqn = node.eqn
        is_for_each_matrix = eqn.primitive.name == "broadcast_in_dim" and all(
            axis < eqn.outvars[0].aval.ndim - 2 for axis in eqn.params["broadcast_dimensions"]
        )
        are_of_floats = any(has_dtype(atom.aval, jnp.inexact) for atom in eqn.invars)
        if not is_for_each_matrix and (are_of_floats or not found.isdisjoint(value_ids(node.inputs))):
            for value_id, variable in zip(node.outputs, eqn.outvars, strict=True):
                if getattr(variable.aval, "dtype", None) == np.dtype(bool) and not _is_scalar(variable):
                    found.add(value_id)
    return found


def _is_scalar(atom: Any) -> bool:
    """Return whether an array is a scalar, or contains one scalar for each matrix in a batch of matrices.

    If a matrix is multiplied by a scalar under `jax.vmap`, each matrix of the batch is multiplied by its own scalar.
    """
    return size_of_shape(atom.aval.shape[-2:]) == 1
