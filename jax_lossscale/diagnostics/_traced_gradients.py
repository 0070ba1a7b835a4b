"""The traced program of value and gradients of a loss function, with the facts that several reports use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._program.jaxpr import Traced, half_dtypes
from jax_lossscale.diagnostics._loss_call import ArgumentFaults, LossCall, argument_faults
from jax_lossscale.diagnostics._lost_constants import LostConstant, lost_constants
from jax_lossscale.diagnostics._matmuls import MatmulSummary, summarize_matmuls


@dataclasses.dataclass(frozen=True, eq=False)
class TracedGradients:
    """The program of the value and the scaled gradients of a function.

    Its properties are facts about the program. Each is computed when a report first uses it.

    Attributes:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      program: the program. The loss scale is its first input.
      planners: the planners of the `autocast` calls in it.
      has_reference: whether the user passed a float32 version of the function.
    """

    call: LossCall
    dtype: jnp.dtype
    program: Traced
    planners: Sequence[Planner]
    has_reference: bool = False

    @property
    def is_autocast(self) -> bool:
        """Whether the function, or a part of it, is under `autocast`."""
        return bool(self.planners)

    @functools.cached_property
    def half_dtypes(self) -> list[jnp.dtype]:
        """The half-precision dtypes in which the function computes."""
        return half_dtypes(self.program.jaxpr.jaxpr)

    @functools.cached_property
    def input_names(self) -> list[str]:
        """The names of the inputs of the program."""
        names = ["the loss scale", *(name for leaves in self.call.named_leaves() for name, _ in leaves)]
        return [names[position] for position in self.program.positions]

    @functools.cached_property
    def parameter_names(self) -> list[str]:
        """The names of the differentiated inputs, in the order of the gradients."""
        named = self.call.named_leaves()
        return [name for position in self.call.positions for name, _ in named[position]]

    @functools.cached_property
    def matmuls(self) -> MatmulSummary:
        """The number of matmuls, how many of them are in half precision, and why the first other one is not."""
        return summarize_matmuls(self.program, self.dtype, self.input_names, self.planners)

    @functools.cached_property
    def argument_faults(self) -> ArgumentFaults:
        """The NaNs and infinities in the arguments, and the largest magnitude of each leaf."""
        return argument_faults(self.call)

    @functools.cached_property
    def lost_constants(self) -> Sequence[LostConstant]:
        """The constants that became zero or infinite in half precision, and are so in the float32 reference, too.

        A reference that the user passed has constants of its own.
        """
        return () if self.has_reference else lost_constants(self.program, self.is_autocast)


def trace_gradients(call: LossCall, dtype: jnp.dtype, has_reference: bool = False) -> TracedGradients:
    """Trace the function and its gradients, once for all facts."""
    return TracedGradients(call, dtype, *call.scaled(), has_reference)
