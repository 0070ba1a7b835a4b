"""The traced value and gradients of a loss function, which `range_report` and `compare_gradients` analyze."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_lossscale._autocast.reasons import trace_with_reasons
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import is_half
from jax_lossscale.diagnostics._argument_faults import ArgumentFaults, argument_faults
from jax_lossscale.diagnostics._loss_call import LossCall
from jax_lossscale.diagnostics._lost_constants import LostConstant, lost_constants
from jax_lossscale.diagnostics._operations import MatmulSummary, first_float32, operations, summary_of


class TracedGradients:
    """The program that computes the value and the scaled gradients, with information that several reports use.

    The cached properties are computed when a report first uses them.

    Attributes:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      reference: the float32 version of the function, if the user passed one.
      program: the program. Its first input is the loss scale.
      is_autocast: whether `autocast` is applied to any part of the function.

    Args:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      reference: the float32 version of the function, if the user passed one.
    """

    def __init__(self, call: LossCall, dtype: jnp.dtype, reference: LossCall | None = None) -> None:
        self.call, self.dtype, self.reference = call, dtype, reference
        self.program, self._used, self.is_autocast = trace_with_reasons(*call.scaled())

    def inputs_at(self, loss_scale: float) -> list[jax.Array]:
        """Return the inputs of the program for a given loss scale."""
        return [jnp.float32(loss_scale), *self.program.inputs[1:]]

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs of the program."""
        # The leaves of nnx objects are the last inputs. An array that occurs in several arguments has several names.
        arguments = [*self.call.args, *(argument for _, argument in sorted(self.call.kwargs.items()))]
        are_nnx = [bool(nnx_objects.flattened(argument).objects) for argument in arguments]
        names: dict[int, list[str]] = {}
        for _, leaves in sorted(zip(are_nnx, self.call.named_leaves(), strict=True), key=lambda pair: pair[0]):
            for name, leaf in leaves:
                names.setdefault(id(leaf), []).append(name)
        of_inputs = (names.get(id(leaf), ["an nnx object"]) for leaf in self.program.inputs[1:])
        return ["the loss scale", *(each.pop(0) if len(each) > 1 else each[0] for each in of_inputs)]

    @functools.cached_property
    def half_parameters(self) -> dict[str, list[str]]:
        """The names of the half-precision parameters, grouped by dtype name."""
        named = self.call.named_leaves()
        names: dict[str, list[str]] = {}
        for name, leaf in (pair for position in self.call.positions for pair in named[position]):
            if is_half(leaf):
                names.setdefault(leaf.dtype.name, []).append(name)
        return names

    @functools.cached_property
    def matmuls(self) -> MatmulSummary:
        """The number of matmuls in half precision, and the reason why the first float32 matmul is not among them."""
        summary = summary_of(operations(self._used.jaxpr, self.dtype), self.dtype.name, self.is_autocast)
        # Under `autocast`, the summary already states why the matmul is in float32. This reason is more informative
        # than the origin of the operands.
        if not summary.first_float32 or self.is_autocast:
            return summary
        origin = first_float32(self._used, self.dtype, self.input_names)
        return summary._replace(first_float32=origin or summary.first_float32)

    @functools.cached_property
    def argument_faults(self) -> ArgumentFaults:
        """The NaNs and infinities in the arguments, and the largest magnitude of each leaf of the arguments."""
        return argument_faults(self.call)

    @functools.cached_property
    def lost_constants(self) -> Sequence[LostConstant]:
        """The constants that are zero or infinite in half precision.

        The float32 reference contains the same rounded constants if the reference is derived from the function. If the
        user passed a separate reference, no constants are returned.
        """
        return () if self.reference is not None else lost_constants(self.program, self.is_autocast)
