"""What kind of operation each primitive of JAX is. Everything that is not named here is arithmetic, and float32."""

from __future__ import annotations

from typing import Any

from jax_lossscale._autocast.wide_product import WIDE_PRODUCT

# Matrix products and convolutions: what tensor cores compute.
PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", WIDE_PRODUCT})

# They say where numbers lie, and change nothing else.
PLACEMENTS = frozenset({"device_put", "mesh_cast", "pbroadcast", "pcast", "pvary", "reshard", "sharding_constraint"})
# They only move numbers, or choose among them: results are in the dtype of the operands, all of which are of one.
MOVES = frozenset(
    {
        *("concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "expand_dims", "name", "pad"),
        *("reshape", "rev", "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose"),
        *PLACEMENTS,
    }
)
# Likewise, but one number may be moved to many places. Its cotangent is their sum, which is arithmetic.
REPEATING_MOVES = frozenset({"broadcast_in_dim", "gather"})
# Between devices, likewise. What is received is not asked for again in the backward pass.
MOVES_BETWEEN_DEVICES = frozenset(
    {
        *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "device_put", "ppermute"),
        "ragged_all_to_all",
    }
)
# Each result is in the dtype of its own operand.
MOVES_EACH_BY_ITSELF = frozenset({"optimization_barrier"})

# Whose operands must not have been rounded: a matrix that is nearly singular becomes another one.
LINEAR_ALGEBRA = frozenset(
    {
        *("cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
        *("householder_product", "lu", "lu_pivots_to_permutation", "ormqr", "qr", "schur", "svd", "sylvester"),
        *("symmetric_product", "tridiagonal", "tridiagonal_solve", "triangular_solve"),
    }
)
# Costly, or random: kept for the backward pass rather than computed again.
COMPUTED_ONCE = frozenset(
    {
        *("approx_top_k", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "fft", "sort", "top_k"),
        *("all_reduce", "pmax", "pmin", "psum", "psum2", "psum_invariant", "psum_scatter", "reduce_scatter"),
        *("unreduced_psum", "unreduced_reduce_scatter"),
        *("random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap"),
        *("random_wrap", "random_clone", "rng_bit_generator", "rng_uniform", "threefry2x32"),
        *LINEAR_ALGEBRA,
    }
)


def is_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product or a convolution: what sums nothing up is a multiplication."""
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in PRODUCTS
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return len(contracted) > 0
