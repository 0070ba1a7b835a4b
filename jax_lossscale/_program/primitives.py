"""Tables of JAX primitives, grouped by kind of operation.

If a primitive is not in any table of this module, `autocast` computes it in float32 and evaluates the jaxprs in its
parameters unchanged, because this treatment is correct for every primitive. Reports list the names of all primitives
that are not in any table of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_lossscale._program.jaxpr import has_dtype, size_of_shape

# The primitives that `autocast` defines.
FLOAT32_RESULT_MATMUL, IN_HALF = "float32_result_matmul", "in_half"
SAVED, ROUNDED, ROUNDED_COTANGENT, UNFUSED = "saved", "rounded", "rounded_cotangent", "unfused"


def _names(words: str) -> frozenset[str]:
    """Return the set of space-separated names in a string."""
    return frozenset(words.split())


# Matrix multiplications and convolutions (matmuls), which tensor cores compute.
MATMULS = _names("conv_general_dilated dot_general ragged_dot ragged_dot_general") | {FLOAT32_RESULT_MATMUL}

# Operations that only determine where an array is stored (on which devices, or in which kind of memory).
PLACEMENTS = _names(
    "device_put layout_constraint mesh_cast pbroadcast pcast preduced pvary reduced_vary_cast reduced_vary_cast_p "
    "relayout reshard sharding_constraint vary_unreduced_cast vary_unreduced_cast_p"
)
# Operations that only move numbers or select numbers with a mask. All moved operands and all results of a data-movement
# operation have the same dtype.
_MOVES_AND_MASKS = _names(
    "concatenate copy copy_p dynamic_slice dynamic_update_slice expand_dims name pad reshape rev select_n slice split "
    "squeeze stack stage stop_gradient transpose unstack"
)
# Data-movement operations that may copy a number to several positions. Their backward pass is not data movement,
# because it sums the cotangents of all copies.
REPLICATING_DATA_MOVEMENT = _names("broadcast_in_dim broadcast_to gather tile")
# Data movement between devices. The results of data movement between devices are saved for the backward pass, so that
# the results are not communicated again.
DATA_MOVEMENT_BETWEEN_DEVICES = _names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all device_put pbroadcast_dynamic ppermute "
    "ragged_all_to_all"
)
# Data movement in which each result has the dtype of the operand at the same position.
OPERANDWISE_DATA_MOVEMENT = _names("optimization_barrier sort")
# Operations that select one of several numbers by comparing them. The numbers can be rounded before or after the
# selection, because rounding preserves the order of numbers. Max and min pooling select one number from each window.
POOLS = _names("reduce_window_max reduce_window_min")
SELECTIONS = _names("clamp cummax cummin max min reduce_max reduce_min") | POOLS
DATA_MOVEMENT = _MOVES_AND_MASKS | PLACEMENTS | {SAVED, ROUNDED, UNFUSED}
DATA_MOVEMENT |= REPLICATING_DATA_MOVEMENT | DATA_MOVEMENT_BETWEEN_DEVICES | OPERANDWISE_DATA_MOVEMENT
# The number of leading operands that are moved, for data movement with additional operands such as indices or sizes.
_NUM_MOVED_OPERANDS = {
    **dict.fromkeys(("broadcast_in_dim", "dynamic_slice", "gather", "pbroadcast_dynamic", "reshape"), 1),
    **dict.fromkeys(("dynamic_update_slice", "ragged_all_to_all"), 2),
}
# Operations that convert an operand to a different dtype or precision.
CONVERSIONS = _names("convert_element_type reduce_precision")

# Sums of many numbers, which may cancel if the numbers have different signs.
SUMS_OF_MANY = _names("cumsum reduce_sum reduce_window_sum scatter-add scatter_add")
SUMS = _names("add add_any sub") | SUMS_OF_MANY
# Additions and subtractions of whole arrays, of arrays on several devices, and of selected elements of an array.
# `scatter` replaces the selected elements.
ADDITIONS = _names(
    "add add_any neg psum psum2 psum_invariant psum_scatter reduce_scatter scatter scatter-add scatter-sub scatter_add "
    "sub"
)
# Functions that are infinite at zero, or whose derivative is infinite at zero.
STEEP_AT_ZERO = _names("cbrt div log log2 rsqrt sqrt")

# Reductions along axes, such as the mean and the variance in a normalization layer. The tables REDUCTIONS, WRITTEN and
# CHEAP describe how XLA fuses operations.
REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
# Operations whose result is written to memory, because XLA does not fuse these operations into their consumers.
WRITTEN = (
    _names("concatenate dynamic_update_slice reduce_window_sum scatter scatter-add scatter_add stack tile") | POOLS
)
# Operations that XLA fuses into their consumers at almost no cost.
CHEAP = _names(
    "add and broadcast_in_dim convert_element_type div eq expand_dims ge gt iota le lt max min mul ne neg not or "
    "reshape select_n squeeze stop_gradient sub transpose xor"
)

# Operations whose operands must not be rounded, because rounding a nearly singular matrix can change the result
# significantly. `linear_solve` is a primitive of lineax.
LINEAR_ALGEBRA = _names(
    "cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product linear_solve lu "
    "lu_pivots_to_permutation ormqr qr schur svd sylvester symmetric_product triangular_solve tridiagonal "
    "tridiagonal_solve"
)
# Operations whose computation is not described by a jaxpr, or is written for specific dtypes or memory spaces.
OPAQUE = _names(
    "call_exported compute_on custom_partitioning dot_product_attention_bwd_wrapper "
    "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd_wrapper "
    "dot_product_attention_fwd_wrapper ffi_call fused_call io_callback pallas_call pure_callback "
    "scaled_dot scaled_matmul_wrapper tpu_custom_call xla_call_module"
)
# The start and done operations of asynchronous collectives. The operation that starts a collective returns a future,
# which has no dtype.
_COLLECTIVES = _names(
    "all_gather all_gather_reduced all_to_all pbroadcast ppermute psum psum_invariant reduce_scatter unreduced_psum "
    "unreduced_reduce_scatter"
)
ASYNCHRONOUS = frozenset(f"{name}_{half}" for name in _COLLECTIVES for half in ("start", "done"))
_EXPENSIVE_OR_RANDOM = _names(
    "all_reduce approx_top_k cumlogsumexp cummax cummin cumprod cumsum fft philox2x32 philox4x32 pmax pmin psum psum2 "
    "psum_invariant psum_scatter random_bits random_clone random_fold_in random_gamma random_seed random_split "
    "random_unwrap random_wrap reduce_scatter rng_bit_generator rng_uniform sort threefry2x32 threefry4x32 top_k "
    "unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter"
)
# Operations whose results are saved for the backward pass instead of being recomputed.
COMPUTED_ONCE = _EXPENSIVE_OR_RANDOM | ASYNCHRONOUS | LINEAR_ALGEBRA | OPAQUE
# Operations that have no result, or whose result depends on the binary representation of the operand.
BITS = _names("bitcast_convert_type debug_callback debug_print")
# Operations that read, write or check state outside of the jaxpr, or that determine the order of such operations.
EFFECTS = _names(
    "accum_grad_in_ref addupdate after_all check create_token dce_sink empty_ref free_ref freeze get inspect_sharding "
    "new_ref shape_assertion swap"
)
# Elementwise operations and all sums.
ARITHMETIC = _names(
    "abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh axis_index bessel_i0e bessel_i1e cbrt "
    "ceil clz complex conj convert_element_type cos cosh digamma dim_as_value dimension_size div empty empty2 eq "
    "eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype ge gt igamma igamma_grad_a igammac imag integer_pow "
    "iota iota_2x32_shape is_finite le le_to lgamma log log1p log2 logistic lt lt_to mul mulhi ne neg nextafter not "
    "one_minus_square or platform_index polygamma polynomial population_count pow real reduce reduce_and reduce_or "
    "reduce_precision reduce_prod reduce_sum reduce_window reduce_window_sum reduce_xor regularized_incomplete_beta "
    "rem round rsqrt scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max "
    "scatter_min scatter_mul select_and_gather_add select_and_scatter select_and_scatter_add shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh tie to_edtype xor zeros_like "
    "zeta"
) | {ROUNDED_COTANGENT}
KNOWN = MATMULS | {IN_HALF} | DATA_MOVEMENT | SELECTIONS | COMPUTED_ONCE | BITS | EFFECTS | ARITHMETIC


def moved_operands(eqn: Any) -> Sequence[Sequence[int]] | None:
    """Return, for each result of an equation, the positions of the operands from which numbers are moved to the result.

    Operands such as masks, indices and sizes are ignored, because these operands only determine which numbers are
    moved, and to which positions. If the operation is neither data movement nor a cast, return None.
    """
    name = eqn.primitive.name
    if name not in DATA_MOVEMENT | CONVERSIONS:
        return None
    operands = range(len(eqn.invars))
    operands = operands[1:] if name == "select_n" else operands[: _NUM_MOVED_OPERANDS.get(name)]
    if len(operands) == len(eqn.outvars):
        return [[operand] for operand in operands]
    return [operands] * len(eqn.outvars)


def name_in_reports(primitive: Any) -> str:
    """Return the name of a primitive, followed by the name of the library that defines it (unless it is JAX)."""
    made_by = getattr(getattr(primitive.impl, "func", primitive.impl), "__module__", "").partition(".")[0]
    is_jax = made_by in ("", "builtins", "functools", "jax", "jax_lossscale")
    return str(primitive.name) if is_jax else f"{primitive.name} of {made_by}"


def operation_name(eqn: Any) -> str:
    """Return the name of an equation's primitive.

    For a `float32_result_matmul`, return the name of the matmul primitive that it replaces.
    """
    name: str = eqn.primitive.name
    return eqn.params["matmul"].name if name == FLOAT32_RESULT_MATMUL else name


def is_matmul(eqn: Any) -> bool:
    """Return whether an equation is a matmul: a matrix multiplication or a convolution.

    A `dot_general` or convolution whose sums have only one term, such as ``t[:, None] @ freq[None]``, does not count as
    a matmul, because it is an elementwise multiplication.
    """
    return terms_per_sum(eqn) != 1


def is_cast_to_integer(eqn: Any) -> bool:
    """Return whether an equation casts floats to integers."""
    is_cast = eqn.primitive.name == "convert_element_type" and has_dtype(eqn.invars[0].aval, jnp.floating)
    return is_cast and jnp.issubdtype(eqn.params["new_dtype"], jnp.integer)


def is_cheap(eqn: Any) -> bool:
    """Return whether XLA fuses an equation into its consumers at almost no cost."""
    name = eqn.primitive.name
    return name in CHEAP or (name == "dot_general" and not is_matmul(eqn))


def terms_per_sum(eqn: Any) -> int:
    """Return the number of terms that are summed for each element of a matmul's result, or 1 for any other equation."""
    name, params = operation_name(eqn), eqn.params
    if name not in MATMULS:
        return 1
    left, right = (atom.aval.shape for atom in eqn.invars[:2])
    if name == "conv_general_dilated":
        return size_of_shape(right[axis] for axis in params["dimension_numbers"].rhs_spec[1:])
    numbers = params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = numbers.dot_dimension_numbers if numbers else params["dimension_numbers"]
    return size_of_shape(left[axis] for axis in contracted)
