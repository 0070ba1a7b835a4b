"""The traced value and gradients of a loss function, with information that is shared by several reports."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jax_lossscale._program.jaxpr import is_half
from jax_lossscale.diagnostics._loss_call import ArgumentFaults, LossCall, argument_faults
from jax_lossscale.diagnostics._lost_constants import LostConstant, lost_constants
from jax_lossscale.diagnostics._matmuls import MatmulSummary, first_float32, summary_of
from jax_lossscale.diagnostics._operations import operations


class TracedGradients:
    """The traced program that computes the value and the scaled gradients of a function.

    The cached properties are computed when a report first uses them.

    Attributes:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      program: the program. Its first input is the loss scale.
      is_autocast: whether `autocast` is applied to any part of the function.

    Args:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      has_reference: whether the user passed a float32 version of the function.
    """

    def __init__(self, call: LossCall, dtype: jnp.dtype, has_reference: bool = False) -> None:
        self.call, self.dtype, self._has_reference = call, dtype, has_reference
        self.program, self._used, self.is_autocast = call.scaled_with_reasons()

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs of the program."""
        names = ["the loss scale", *(name for leaves in self.call.named_leaves() for name, _ in leaves)]
        return [names[position] for position in self.program.positions]

    @functools.cached_property
    def half_parameters(self) -> dict[str, list[str]]:
        """The names of the half-precision parameters, by the name of their dtype."""
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
        """The constants that became zero or infinite in half precision.

        The float32 reference contains the same rounded constants if the reference is derived from the function. If the
        user passed a separate reference, no constants are returned.
        """
        return () if self._has_reference else lost_constants(self.program, self.is_autocast)
