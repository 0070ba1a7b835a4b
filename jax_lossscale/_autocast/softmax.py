"""A softmax that goes into products, and keeps for its backward pass what it gives them: its rounded result.

Its derivative needs nothing else, so neither the logits nor the exponentials are kept or computed again. A cut of the
program cannot find this, since it knows no "either, or".
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp

from jax_lossscale._autocast.marks import kept
from jax_lossscale._program.inline import Name, Program, Step, names


def softmaxes(program: Program, into_products: Set[Name]) -> dict[int, tuple[Step, tuple[int, ...]]]:
    """Each ``exp(x) / sum(exp(x))`` that goes into products alone, by the position of the division.

    Returns:
      Of each, a step of its operand and its result, which is that of ``exp`` but for what it computes; and the axes.
    """
    maker = {name: step for step in program.steps for name in step.outputs}
    found = {}
    for position, step in enumerate(program.steps):
        if step.eqn.primitive.name == "div" and {*step.outputs} <= into_products:
            above, below = (maker.get(name) for name in (*names(step.inputs), -1)[:2])
            axes = _axes_summed_up(step.inputs[0], below, maker)
            if axes is not None and above is not None and above.eqn.primitive.name == "exp":
                found[position] = above._replace(outputs=step.outputs), axes
    return found


def _axes_summed_up(exponentials: Any, below: Step | None, maker: dict[Any, Step]) -> tuple[int, ...] | None:
    """The axes over which a divisor sums the exponentials up, if it is their sum, each where it was summed."""
    broadcasts = []
    while below is not None and below.eqn.primitive.name == "broadcast_in_dim":
        broadcasts.append(below.eqn.params["broadcast_dimensions"])
        below = maker.get(below.inputs[0])
    if below is None or below.eqn.primitive.name != "reduce_sum" or below.inputs[0] != exponentials or not broadcasts:
        return None
    axes = below.eqn.params["axes"]
    places = list(range(len(below.eqn.outvars[0].aval.shape)))
    for dimensions in reversed(broadcasts):
        places = [dimensions[place] for place in places]
    return axes if places == [n for n in range(below.eqn.invars[0].aval.ndim) if n not in axes] else None


def rounded_softmax(x: Any, axes: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """``exp(x) / sum(exp(x))``, rounded, and differentiated by what it is rounded to."""

    @jax.custom_jvp
    def softmax(x: Any) -> Any:
        exponentials = jnp.exp(x)
        return (exponentials / exponentials.sum(axes, keepdims=True)).astype(dtype)

    @softmax.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        # Marked here: marked outside, another copy of it would be kept.
        result = kept(softmax(*primals))
        (tangent,), weights = tangents, result.astype(tangents[0].dtype)
        return result, (weights * (tangent - (weights * tangent).sum(axes, keepdims=True))).astype(dtype)

    return softmax(x)
