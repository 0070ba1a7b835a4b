"""What is asked about, as each report on gradients looks at it first: what is known before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_lossscale._program.jaxpr import Traced, narrow_dtypes
from jax_lossscale.diagnostics.asked._arguments import ArgumentFaults, faults_of
from jax_lossscale.diagnostics.asked._call import Call
from jax_lossscale.diagnostics.asked._constants import LostConstant, lost_constants
from jax_lossscale.diagnostics.asked._facts import ProductFacts, products_of


class Question(NamedTuple):
    """What is asked about.

    Attributes:
      call: the function, and what it is called with.
      dtype: the narrow dtype.
      program: the program of value and scaled gradients, of which the scale is the first input.
      inputs: the names of the inputs of the program.
      parameters: the names of the inputs that are differentiated, in the order of the gradients.
      products: how many products it has, and how many are narrow.
      faults: what is wrong with the arguments; too large are those that are cast.
      lost: the constants of which zero or infinity was left, in float32, too.
    """

    call: Call
    dtype: jnp.dtype
    program: Traced
    inputs: list[str]
    parameters: list[str]
    products: ProductFacts
    faults: ArgumentFaults
    lost: Sequence[LostConstant]

    @property
    def narrow_dtypes(self) -> list[jnp.dtype]:
        """The narrow dtypes that the function computes in."""
        return narrow_dtypes(self.program.jaxpr.jaxpr)


def asked(call: Call, dtype: jnp.dtype) -> Question:
    """Trace the function and its gradients, once for all that is asked of it."""
    program, planners = call.scaled()
    named = call.named_leaves()
    names = ["the loss scale", *(name for leaves in named for name, _ in leaves)]
    inputs = [names[position] for position in program.positions]
    return Question(
        call=call,
        dtype=dtype,
        program=program,
        inputs=inputs,
        parameters=[name for n in call.positions for name, _ in named[n]],
        products=products_of(program, dtype, inputs, planners),
        faults=faults_of(named, dtype, program.jaxpr, inputs),
        lost=lost_constants(program),
    )
