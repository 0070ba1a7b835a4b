"""Find the operations that cause errors in the value or in a gradient, and suggest fixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from jax_lossscale._program.jaxpr import is_half
from jax_lossscale._program.primitives import MATMULS, STEEP_AT_ZERO, SUMS, SUMS_OF_MANY
from jax_lossscale.diagnostics._report import at
from jax_lossscale.diagnostics._shadow import Statistics
from jax_lossscale.diagnostics._sites import Dataflow, Site

# Relative errors above this threshold are traced to their origin. The rounding error of float16 is 0.0005, and
# functions that work in float16 usually have errors below 0.01.
_WRONG = 0.1
# If an operation amplifies an error by less than this factor, the error is assumed to accumulate in a loop.
ACCUMULATED = 2
# An operation is reported if more than this fraction of the elements of its result becomes zero.
MANY_ZEROS = 0.5
# A value of at least this magnitude is assumed to be the fill value of a mask.
_MASK = 1e8
_MAY_MASK = ("add", "convert_element_type", "sub")


class Blame(NamedTuple):
    """The nodes of a dataflow that make the results of a function inaccurate."""

    harmful: set[int]  # the inaccurate nodes through which an error propagates to a result
    origins: set[int]  # the subset of `harmful` in which these errors begin
    # If an operation in the forward pass amplifies the rounding error of a half-precision value, this dictionary maps
    # the node of the value to the name and location of the operation.
    amplifiers: dict[int, str]


def blame(flow: Dataflow, measured: Mapping[int, Statistics], results: Collection[int], least: float = _WRONG) -> Blame:
    """Find the operations that make the results of a function inaccurate.

    Args:
      flow: the dataflow of the function.
      measured: the statistics of each node that is not a carry.
      results: the nodes that represent the results of the function.
      least: the threshold above which relative errors are traced to their origin.
    """
    # An outlier can hide the errors of the other elements, so `error` also accounts for the error without outliers.
    # However, a result of the function counts as inaccurate only if its error is large when outliers are included.
    results = [node for node in results if node not in measured or measured[node].error_of_all > least]
    wrong = _followed(flow, results, lambda node: node not in measured or measured[node].error > least)
    harmful = wrong & measured.keys()
    # An overflow may not affect the result, for example if a `tanh` maps infinity to 1. Such an overflow also counts as
    # harmful, because derivatives that depend on the overflowed value may be wrong.
    before = _followed(flow, harmful, lambda node: True) & measured.keys()
    harmful |= {node for node in before if measured[node].overflow}
    begins = {node for node in harmful if measured[node].input_error <= least and measured[node].amplification > 1}
    # If an error accumulates over the iterations of a loop, no single operation amplifies it, so the operation that
    # computes the loop carry is reported.
    ends = {node for loop in wrong - measured.keys() for node in flow.ends_of_carries[loop]}
    origins = begins or harmful & ends
    return Blame(harmful, origins, _amplifiers(flow, measured, origins))


def _followed(flow: Dataflow, results: Collection[int], is_followed: Callable[[int], bool]) -> set[int]:
    """Search backward from the results through the nodes that satisfy a condition and return the visited nodes."""
    reached: set[int] = set()
    ahead = list(results)
    while ahead:
        node = ahead.pop()
        if node not in reached and is_followed(node):
            reached.add(node)
            ahead += flow.sources[node]
    return reached


def _amplifiers(flow: Dataflow, measured: Mapping[int, Statistics], origins: Collection[int]) -> dict[int, str]:
    """Return the attribute ``amplifiers`` of a `Blame`.

    Even in float32, the result of an operation that amplifies errors, such as the cosine of a large angle, is accurate
    only if the values from which the result is computed are in float32 as well.
    """
    found: dict[int, str] = {}
    for origin in origins:
        site, of_origin = flow.sites[origin], measured[origin]
        is_in_range = not of_origin.overflow and of_origin.zero <= MANY_ZEROS
        adds_up_in_half = is_half(site.aval) and site.operation in SUMS_OF_MANY
        is_amplified = of_origin.amplification >= ACCUMULATED and not adds_up_in_half
        if is_in_range and is_amplified and not site.location.is_backward:
            in_float32 = _followed(
                flow, flow.sources[origin], lambda node: node not in measured or not is_half(flow.sites[node].aval)
            )
            operands = {operand for node in (origin, *in_float32) for operand in flow.sources[node]} - in_float32
            name = f"`{site.operation}`{at(site.location.layer, site.location.source)}"
            found.update({node: name for node in operands if measured[node].error > 0})
    return found


_NAN = (
    "The result is NaN in float32 as well, so no loss scale helps. The NaN is harmless only if a later operation, such "
    "as `jnp.where`, discards it."
)
# The suggestions for fixing an operation. The names in braces are keys of the dictionary ``facts`` in `suggestion_for`.
_SUGGESTIONS = {
    "division by zero": f"{_NAN} Zero is divided by zero (or infinity by infinity). Look for the mean of an empty "
    "selection, and for a vector of zeros that is divided by its norm.",
    "nan": f"{_NAN} Look for a square root or logarithm of a negative number, for the gradient of a square root, norm "
    "or logarithm at zero, for inf - inf, and for 0 * inf hidden by a `jnp.where`.",
    "derivative overflows": "The derivative of `{derivative}` is computed in the forward pass, so no loss scale helps. "
    "Compute `{derivative}` in float32{epsilon}.",
    "backward pass overflows": "Use a smaller loss scale. If other gradients then underflow, give this part of the "
    "model a separate loss scale. If it overflows at every loss scale, compute it in float32.",
    "cast by autocast overflows": "`autocast` casts this value, an operand of a matmul on the same line. Keep the "
    "matmul in float32 with `jls.keep_float32`, or use `find_precision` to determine which operations must be in "
    "float32.",
    "mask overflows": "If this is the fill value of a mask, use `jnp.where(mask, scores, "
    "jnp.finfo(scores.dtype).min)`. If the mask is added to the scores, use a smaller magnitude, such as -1e4, so that "
    "the sum does not overflow. Alternatively, compute the softmax in float32.",
    "overflow": "{of_operation}",
    "backward pass underflows": "Use a larger loss scale. If other gradients then overflow, give this branch a "
    "separate loss scale: Apply `jls.scale_gradient` to its result in float32, and `jls.unscale_gradient` to its "
    "parameters and inputs.",
    "forward pass underflows": "A loss scale does not affect the forward pass. Compute this operation in float32, or "
    "make its operands larger.",
    "amplified later": "{amplifier} amplifies the rounding error of this operation. Compute both in float32{how}.",
    "terms cancel": "The terms of this sum cancel, which amplifies their rounding errors about {factor:,.0f} times. "
    "Compute the terms in float32 as well.",
    "sum in 16 bits": "A sum in 16 bits stops changing when the added numbers are smaller than the last bit of the "
    "sum. Compute the sum in float32.",
    "amplified here": "This operation amplifies the rounding errors of its operands. Compute {in_float32}.",
}
_EPSILON = " (like all statistics of a normalization layer), or use a larger epsilon to keep its operand away from zero"
# For each operation, the suggestion for fixing an overflow in the forward pass, used if no more specific suggestion
# applies.
_FORWARD_OVERFLOWS = {
    "convert_element_type": "Do not cast this value to half precision. Alternatively, scale it down before the cast.",
    "dot_general": "Make the operands smaller before the matmul (for example, divide one of them by the square root "
    "of the size of the contracted axis), or make the matmul return float32 (with `jls.keep_float32` under `autocast`, "
    "or with `preferred_element_type` in code with manual casts).",
    "conv_general_dilated": "Normalize the inputs, or compute the convolution in float32.",
    "reduce_sum": "Compute the sum and the subsequent division in float32: use `jnp.mean`, or divide the result of "
    "`jnp.sum(x, dtype=jnp.float32)`.",
    "exp": "Subtract the maximum first, as `jax.nn.softmax` and `jax.nn.logsumexp` do, or compute `exp` in float32.",
    "div": "Divide in float32, or bound the divisor from below.",
    "mul": "Multiply in float32, or make one of the factors smaller.",
}


def suggestion_for(node: int, site: Site, measured: Statistics, blamed: Blame, is_autocast: bool) -> str:
    """Return a suggestion for fixing an operation, or "" if nothing is wrong with it.

    The suggestion is the first one whose condition is true.

    Args:
      node: the result of the operation.
      site: the static information about the result.
      measured: the statistics of the result.
      blamed: the nodes that make the value or a gradient inaccurate.
      is_autocast: whether the function is under `autocast`, which adds the casts.
    """
    is_origin, amplifier = node in blamed.origins, blamed.amplifiers.get(node, "")
    operation, derivative, is_in_half = site.operation, site.derivative_of, is_half(site.aval)
    is_backward, overflows = site.location.is_backward, measured.overflow > 0
    is_nan = measured.nan > 0 and not overflows
    # A value is said to underflow if most of its elements become zero and its errors are harmful. In the backward pass,
    # for a value in which errors begin, a single element that becomes zero or subnormal is enough.
    vanishes = node in blamed.harmful and measured.zero > MANY_ZEROS
    underflows = is_backward and (vanishes or (is_origin and measured.zero + measured.subnormal > 0))
    factor = float(f"{measured.amplification:.0e}")  # rounded to one significant digit
    accumulates = is_in_half and (operation in SUMS_OF_MANY or measured.amplification < ACCUMULATED)
    conditions = {
        "division by zero": is_nan and operation == "div",
        "nan": is_nan,
        "derivative overflows": overflows and derivative != "",
        "backward pass overflows": overflows and is_backward,
        "cast by autocast overflows": overflows and site.is_cast_for_matmul,
        "mask overflows": overflows and measured.largest >= _MASK and operation in _MAY_MASK,
        "overflow": overflows,
        "backward pass underflows": underflows,
        "forward pass underflows": vanishes,
        "amplified later": amplifier != "" and not is_origin,
        "terms cancel": is_origin and not is_in_half and operation in SUMS | MATMULS and factor > 1,
        "sum in 16 bits": is_origin and accumulates,
        "amplified here": is_origin,
    }
    facts = {
        "derivative": derivative,
        "epsilon": _EPSILON if derivative in STEEP_AT_ZERO else "",
        "of_operation": _FORWARD_OVERFLOWS.get(operation, f"Compute `{operation}` in float32."),
        "amplifier": amplifier,
        "how": ", this operation with `jls.keep_float32`" if is_autocast else "",
        "factor": factor,
        "in_float32": "this operation and its operands in float32" if is_in_half else "the operands in float32 as well",
    }
    return next((_SUGGESTIONS[name].format(**facts) for name, applies in conditions.items() if applies), "")
