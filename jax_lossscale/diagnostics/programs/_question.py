"""A function and its arguments, as a report on its gradients looks at them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_lossscale._check import check_function
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics.programs._arguments import (
    ArgumentFaults,
    faults_of,
    names_of_inputs,
    names_of_leaves,
)
from jax_lossscale.diagnostics.programs._facts import ProductFacts, facts_of
from jax_lossscale.diagnostics.programs._gradient_program import gradient_program, with_gradients


class Question(NamedTuple):
    """What is asked about.

    Attributes:
      program: the program of value and scaled gradients, of which the scale is the first input.
      args: the arguments, with `Leaves` for those that are differentiated.
      kwargs: the keyword arguments.
      argnums: which arguments are differentiated.
      has_aux: whether there is an auxiliary result.
      dtype: the narrow dtype.
      names: of each argument, and then of each keyword, its leaves as the function names them.
      inputs: the names of the inputs of the program.
      facts: which products are narrow.
      faults: what is wrong with the arguments.
    """

    program: Traced
    args: list[Any]
    kwargs: Mapping[str, Any]
    argnums: int | Sequence[int]
    has_aux: bool
    dtype: jnp.dtype
    names: list[list[str]]
    inputs: list[str]
    facts: ProductFacts
    faults: ArgumentFaults


def asked(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    dtype: jnp.dtype,
) -> Question:
    """Trace the function and its gradients, once for all that is asked of it."""
    check_function(fun, f"{caller}(fun=...)")
    of_leaves, chosen = with_gradients(fun, args, argnums, f"{caller}(argnums=...)")
    program, planners = gradient_program(caller, of_leaves, 1.0, chosen, kwargs, argnums, has_aux)
    names = names_of_leaves(fun, chosen, kwargs)
    inputs = names_of_inputs(program, names)
    facts = facts_of(program, dtype, inputs, planners)
    faults = faults_of(names, chosen, kwargs, dtype)
    return Question(program, chosen, kwargs, argnums, has_aux, dtype, names, inputs, facts, faults)
