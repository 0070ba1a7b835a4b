"""The public function `autocast`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import are_added, autocast_scope, jaxpr_with_reasons
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._check import check_function, checked_dtype
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.parameters import parameters_of_operations
from jax_lossscale._warn import warn_user


def autocast(
    fun: Callable[..., Any], dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None
) -> Callable[..., Any]:
    """Compute a function that was written for float32 in half precision.

    **The rule.** Matrix multiplications and convolutions (matmuls) are computed in ``dtype``, forward and backward.
    Data movement and selections (relu, max, clip, sort) have the dtype of their operands. This includes a function with
    a custom derivative if the function and its derivative only move and select numbers. All other arithmetic is
    float32. Therefore, only matmuls can overflow, cancel or lose digits in 16 bits. There are three special cases:

    - A pool whose result goes into a matmul is computed in ``dtype``.
    - A matmul that adds up only one term for each element of its result is arithmetic, because it is an elementwise
      multiplication. Examples are `jnp.outer`, ``positions[:, None] @ frequencies[None]``, and a convolution with one
      input channel per group and a window of size 1.
    - The maximum or minimum of more numbers than ``dtype`` can count (2048 in float16, 256 in bfloat16) is arithmetic.
      JAX divides its gradient by the number of equal maxima, which it counts in the dtype of the operand.

    **The exceptions.** These matmuls stay in float32:

    - matmuls with ``precision="highest"`` or an algorithm, unless `jax.default_matmul_precision` sets the same
      precision for all matmuls;
    - matmuls whose result is factorized, such as the Gram matrix of a Cholesky factor;
    - matmuls whose result is converted to an integer of more than 8 bits, possibly after other operations, such as the
      positions of tokens in an expert's buffer. This does not apply if another matmul, `argmax`, the indices of
      `top_k`, a comparison or a conversion to bool is in between;
    - matmuls with an operand that is a constant, or is computed from constants by operations other than matmuls, unless
      its numbers are known to be in the range of ``dtype``. The range is unknown after loops, factorizations,
      scatter-adds and random number generators;
    - matmuls in `keep_float32`, and those that a rule of ``policy`` matches. Even ``"half"`` and ``"float32_result"``
      have no effect on a matmul with a constant operand whose range exceeds that of ``dtype``.

    Only float32 values are changed. Integers, keys, random bits, complex numbers, float64 and the results of manual
    casts are the same to the bit. Kernels (Pallas, FFI calls), callbacks and solvers such as
    `jax.scipy.sparse.linalg.cg` are computed as they are written. So is the backward pass of a `jax.custom_vjp` in the
    rule of a `jax.custom_jvp`. The backward pass of a `jax.custom_vjp` may use its residuals, but no other traced
    array, as below `jax.checkpoint`: jaxopt's implicit differentiation uses others, and raises
    `jax.errors.UnexpectedTracerError`. With `in_half`, a kernel that supports 16 bits only can be used.
    `jls.diagnostics.autocast_report` reports the dtype of each matmul and the reason.

    **Memory.** Every value that the backward pass needs is saved, or recomputed from saved values, whichever moves
    fewer bytes. A value that is rounded for a matmul is saved in half precision. Matmuls and other expensive operations
    are never recomputed. A value that is computed by cheap arithmetic from values of less than half its size, such as a
    mask, is recomputed wherever it is used. A softmax that goes into a matmul is differentiated from its rounded
    result. In float16, numbers below 2^-25 round to zero, and so do their gradients: if one logit exceeds the others by
    14 or more, small gradients of logits are lost. ``PrecisionPolicy(recompute=False)`` prevents this. A relu is
    differentiated from its rounded result, too, if this result goes into a matmul and the float32 result has other
    uses.

    **Sums.** Carries of loops are float32. The following sums are computed in float32: gradients over the iterations of
    a loop, cotangents of gathered or broadcast values, gradients of an argument that is used several times, and
    cotangents of a matmul's result that is used several times between two matmuls. If a half-precision value goes into
    several matmuls, its cotangents are added in ``dtype``, as with manual casts. A bias and the matmul to which it is
    added get the same cotangent, which is rounded once.

    The function is rewritten as a program, and goes with `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.shard_map` and
    `jax.export` on either side; with `jax.experimental.jet` under a ``PrecisionPolicy(recompute=False)``.
    ``jax.grad(autocast(fun))`` is the usual order, and the one for a loss scale:
    ``value_and_scaled_grad(autocast(fun), opt_state)``. In ``autocast(jax.grad(fun))``, the matmuls of the backward
    pass are treated like all others, and their results do not pass through the casts of the forward pass.

    XLA may leave out a cast to ``dtype`` and back (its option ``xla_allow_excess_precision``, which is on by default).
    So results may be more exact than is said here, and may differ in the last places with and without `jax.jit`.

    Args:
      fun: a function of any pytrees, written for float32. It is traced anew on each call; compile with `jax.jit`.
        Arrays are traced; other arguments (Python numbers, strings, functions) are passed on as they are.
      dtype: float16 (which needs a loss scale) or bfloat16. With float32, the result is ``fun`` itself.
      policy: exceptions, a `PrecisionPolicy`.

    Returns:
      A function of the same arguments, keyword arguments included. Its results are of the structure, the shapes and the
      dtypes of those of ``fun``; gradients of float32 arguments are float32. ``autocast`` of it, with the same policy,
      changes nothing more.

    Raises:
      ValueError: if ``fun`` cannot be called, ``dtype`` is none of the three, or ``policy`` is no `PrecisionPolicy`.

    Warns:
      UserWarning: when it is traced, if a rule of ``policy`` matches no operation. The backward rule of a
        `jax.custom_vjp` function has not been traced yet. Therefore, there is no warning if the rule matches the line
        of such a function, and its layer or a layer below.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> def loss_fn(params, x, y):
      ...     hidden = jax.nn.gelu(x @ params["in"])
      ...     return jnp.mean((hidden @ params["out"] - y) ** 2)
      >>> params = {"in": jnp.ones((8, 16)) / 8, "out": jnp.ones((16, 1)) / 16}
      >>> x, y = jnp.ones((4, 8)), jnp.zeros((4, 1))
      >>> tx = jls.loss_scaled(optax.adam(1e-3))
      >>> opt_state = tx.init(params)
      >>> value_and_grad = jls.value_and_scaled_grad(jls.autocast(loss_fn), opt_state)
      >>> loss, grads = value_and_grad(params, x, y)
      >>> loss.dtype.name, grads["in"].dtype.name
      ('float32', 'float32')
      >>> print(jls.diagnostics.autocast_report(loss_fn, params, x, y).summary)
      Matrix products and convolutions: 4 of 4 in float16.

      As a decorator:

      >>> @jls.autocast
      ... def predict(params, x):
      ...     return jax.nn.gelu(x @ params["in"]) @ params["out"]

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. TensorFlow's
      ``tf.train.experimental.enable_mixed_precision_graph_rewrite`` rewrites programs by lists of operations; torch's
      ``autocast`` decides operation by operation. Both compute in half precision between the matmuls.
    """
    check_function(fun, "autocast(fun=...)")
    dtype = checked_half_precision(dtype, "autocast(dtype=...)")
    policy = checked_policy(policy, "autocast(policy=...)")
    if dtype == jnp.float32:
        return fun

    @functools.wraps(fun)
    def in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        result, planner = compute_with(fun, args, kwargs, dtype, policy)
        unmatched = [rule for rule in policy.rules if rule not in planner.rule.matched]
        if unmatched:
            warn_user(
                f"`autocast(policy=...)`: no operation matches {', '.join(map(repr, unmatched))}. "
                "`jls.diagnostics.autocast_report` shows the layers, operations and lines that there are."
            )
        return result

    return in_mixed_precision


def compute_with(
    fun: Callable[..., Any], args: Any, kwargs: Any, dtype: jnp.dtype, policy: PrecisionPolicy
) -> tuple[Any, Planner]:
    """Return the result of a function that is computed under `autocast`, and the planner."""
    fun, its_object = nnx_objects.with_its_object(fun)
    args = (*its_object, *args)
    traced = Traced(fun, args, kwargs)
    names_parameters = any(rule.parameter != "*" for rule in policy.rules)
    parameters = parameters_of_operations(traced, args, kwargs) if names_parameters else {}
    planner = Planner(dtype, policy, parameters, are_added())
    plan = planner.plan(traced.jaxpr)
    with autocast_scope():
        if plan.is_rewritten:
            outputs = Rewriting(planner).declared(plan, traced.jaxpr, traced.inputs)
        else:
            outputs = jaxpr_as_fun(jaxpr_with_reasons(traced.jaxpr, plan.reasons))(*traced.inputs)
    return traced.array_result(outputs), planner


def checked_half_precision(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype``; raise a `ValueError` that names the argument if it is not float16, bfloat16 or float32."""
    dtype = checked_dtype(dtype, name)
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"`{name}` must be float16, bfloat16 or float32 (which changes nothing), got {dtype.name}.")
    return dtype


def checked_policy(policy: Any, name: str) -> PrecisionPolicy:
    """Return ``policy``, by default one without rules; raise a `ValueError` that names the argument for all else."""
    if policy is None:
        return PrecisionPolicy()
    if not isinstance(policy, PrecisionPolicy):
        raise ValueError(f"`{name}` must be a `PrecisionPolicy` or None, got {policy!r}.")
    return policy
