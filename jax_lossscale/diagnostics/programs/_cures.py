"""What is known to help an operation whose results leave the range of a dtype: a line each."""

from __future__ import annotations

from jax_lossscale.diagnostics.programs._operation_range import ACCUMULATED, MANY_ZEROS
from jax_lossscale.diagnostics.programs._shadow import Statistics
from jax_lossscale.diagnostics.programs._sites import Site

_IN_THE_FORWARD_PASS = {
    "convert_element_type": "Do not cast it, or scale it down before the cast.",
    "dot_general": "Make the operands smaller (divide queries by the square root of their width before the product), "
    "or compute the product in float32 with `preferred_element_type`, and keep it there.",
    "conv_general_dilated": "Normalize the inputs, or compute the convolution in float32.",
    "reduce_sum": "Take sums in float32 and divide there: `jnp.mean`, or `jnp.sum(x, dtype=jnp.float32)`.",
    "cumsum": "Take sums in float32.",
    "square": "Square in float32.",
    "integer_pow": "Take the power in float32.",
    "pow": "Take the power in float32.",
    "mul": "Multiply in float32, or make one factor smaller before.",
    "exp": "Subtract the maximum before (`jax.nn.softmax` and `jax.nn.logsumexp` do), or compute it in float32.",
    "div": "Divide in float32, or bound the divisor from below.",
    "rsqrt": "Compute it in float32, as all statistics of a normalization.",
}
# Nothing but a mask is so large on purpose.
_MASK = 1e8
_MAY_MASK = ("add", "convert_element_type", "sub")
_A_MASK = (
    "If it is a mask, choose by it: `jnp.where(mask, scores, jnp.finfo(scores.dtype).min)`. One that is added must "
    "leave room for what it is added to, such as -1e4; or take the softmax in float32."
)
_A_DERIVATIVE = (
    "The derivative of {operation} is computed in the forward pass and not scaled, so no loss scale helps: compute "
    "{operation} in float32 (as all statistics of a normalization), or keep it away from zero by a larger epsilon."
)
_NOT_A_NUMBER = (
    "It is not a number in float32 either, so no loss scale helps: look for a root, a norm or a logarithm at zero, and "
    "for 0 * inf behind a `jnp.where`."
)
_A_CAST_OF_AUTOCAST = (
    "`autocast` casts it for the product there: keep that in float32, with `jls.keep_float32`, or let `find_precision` "
    "measure what must be."
)
_OVERFLOW_BACKWARD = "A smaller loss scale; if other gradients are lost by that, a scale of its own."
_VANISHING_BACKWARD = (
    "A larger loss scale; if others overflow then, a scale of its own for this branch: `jls.scale_gradient` for its "
    "result in float32, `jls.unscale_gradient` for its parameters and inputs."
)
_VANISHING_FORWARD = "No loss scale reaches the forward pass: compute it in float32, or make it larger before."
_SUMMED_UP = ("scatter-add", "cumsum", "reduce_sum", "reduce_window_sum")
_OF_A_SUM = "A sum of 16 bits stands still when what is added is below its last bit: add up in float32."
_OF_ROUNDING = "It multiplies the rounding of its operands: compute it, and them, in float32."


def cure_of(site: Site, of: Statistics, *, is_harmful: bool, is_origin: bool, is_autocast: bool = False) -> str:
    """What to do about an operation, from what `blame` says of it; "" if nothing is wrong.

    ``is_autocast``: whether it is of a function under `autocast`, which makes its casts.
    """
    is_backward = site.place.is_backward
    if of.nan and not of.overflow:
        return _NOT_A_NUMBER
    if of.overflow:
        if site.derivative_of:
            return _A_DERIVATIVE.format(operation=f"`{site.derivative_of}`")
        if is_backward:
            return _OVERFLOW_BACKWARD
        if is_autocast and site.operation == "convert_element_type":
            return _A_CAST_OF_AUTOCAST
        if of.largest >= _MASK and site.operation in _MAY_MASK:
            return _A_MASK
        return _IN_THE_FORWARD_PASS.get(site.operation, "Compute it in float32.")
    if is_harmful and of.zero > MANY_ZEROS:
        return _VANISHING_BACKWARD if is_backward else _VANISHING_FORWARD
    if not is_origin:
        return ""
    if is_backward and of.zero + of.subnormal > 0:
        return _VANISHING_BACKWARD
    return _OF_A_SUM if of.amplification < ACCUMULATED or site.operation in _SUMMED_UP else _OF_ROUNDING
