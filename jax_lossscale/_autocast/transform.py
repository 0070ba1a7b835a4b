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
    """Transform a float32 function so that its matmuls are computed in half precision.

    Matrix multiplications and convolutions (matmuls) are computed in ``dtype``, both in the forward pass and in the
    backward pass. The results of data movement and selections (transpose, relu, max, clip, sort) have the dtype of the
    operands. All other arithmetic, such as norms, softmax and losses, is computed in float32, so only matmuls can
    overflow or lose digits. Integers, random keys, complex numbers, float64 and the results of manual casts do not
    change.

    Some matmuls stay in float32: those with ``precision="highest"``, those in `keep_float32`, those that a rule of
    ``policy`` matches, and a few in which half precision would destroy the result, such as the Gram matrix of a
    Cholesky factorization. `jls.diagnostics.autocast_report` prints the dtype of each matmul and the reason for each
    dtype.

    Args:
      fun: a function of arbitrary pytrees, written for float32. ``fun`` is traced again on every call of the returned
        function, so use `jax.jit` to compile the returned function. Arrays in the arguments are traced, and other
        arguments (Python numbers, strings, functions) are passed to ``fun`` unchanged.
      dtype: float16, which needs a loss scale, or bfloat16. With float32, `autocast` returns ``fun`` itself.
      policy: exceptions to the rule of `autocast`, as a `PrecisionPolicy`.

    Returns:
      A function with the same arguments and keyword arguments as ``fun``. The results of the returned function have the
      same structure, shapes and dtypes as the results of ``fun``, and the gradients of float32 arguments are float32.
      If `autocast` is applied again with the same policy, it has no further effect.

    Raises:
      ValueError: if ``fun`` is not callable, if ``dtype`` is not float16, bfloat16 or float32, or if ``policy`` is not
        a `PrecisionPolicy`.

    Warns:
      UserWarning: when the function is traced, if a rule of ``policy`` matches no operation. There is no warning about
        a rule that may match an operation in the backward pass of a `jax.custom_vjp` function, because the backward
        pass is traced later. A rule may match the backward pass if it matches the source line of the `jax.custom_vjp`
        function and either the layer of the function or a layer inside this layer.

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
      Matrix multiplications and convolutions (matmuls): 4 of 4 in float16.

      As a decorator:

      >>> @jls.autocast
      ... def predict(params, x):
      ...     return jax.nn.gelu(x @ params["in"]) @ params["out"]

    **Details.** These matmuls stay in float32:

    - matmuls with ``precision="highest"`` or an algorithm, unless `jax.default_matmul_precision` sets the same
      precision for all matmuls;
    - matmuls whose result is factorized, such as the Gram matrix of a Cholesky factorization;
    - matmuls whose result is converted to an integer of more than 8 bits, either directly or after other operations.
      An example is a matmul that computes positions of tokens. Matmuls are not affected if their result reaches the
      conversion only through another matmul, `argmax`, the indices of `top_k`, a comparison or a conversion to bool;
    - matmuls with an operand that is a constant, or that is computed from constants by operations other than matmuls,
      unless its values are known to be in the range of ``dtype``. The range is unknown after loops, factorizations,
      scatter-adds and random number generators. A rule of ``policy`` cannot change a matmul whose constant operand is
      known to be outside of the range;
    - matmuls in `keep_float32`, and matmuls that a rule of ``policy`` matches.

    Three operations do not follow the general rule:

    - A pool whose result goes into a matmul is computed in ``dtype``.
    - A matmul whose sums have only one term is an elementwise multiplication and is computed in float32. Examples are
      `jnp.outer` and a convolution with one input channel per group and a window of size 1.
    - A maximum or minimum of more elements than ``dtype`` can count (2048 in float16, 256 in bfloat16) is computed in
      float32, because its gradient is divided by the number of equal maxima.

    Kernels (Pallas, FFI calls), callbacks and solvers such as `jax.scipy.sparse.linalg.cg` are not rewritten. Use
    `in_half` for a kernel that supports only 16-bit dtypes. A `jax.custom_vjp` function must not use traced arrays in
    its backward pass, except for its residuals. Otherwise, JAX raises an `UnexpectedTracerError`.

    The transformation can be combined in any order with `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.shard_map` and
    `jax.export`, and with `jax.experimental.jet` under ``PrecisionPolicy(recompute=False)``. The usual order for
    gradients is ``jax.grad(autocast(fun))``, or ``value_and_scaled_grad(autocast(fun), opt_state)`` with a loss scale.
    In ``autocast(jax.grad(fun))``, the casts are inserted after the differentiation and are therefore not
    differentiated. If several matmuls use a value, the results of their backward matmuls are then added in float32. In
    the usual order, they are added in ``dtype`` if the value is cast only once.

    By default, XLA may remove a cast to ``dtype`` and back (option ``xla_allow_excess_precision``). If the forward pass
    then uses an unrounded number but the backward pass a rounded one, the gradient is wrong. `autocast` therefore
    rounds each value again where it casts the value from ``dtype`` to float32, so that both passes use the same number,
    with and without `jax.jit`. Casts in ``fun``, operands of matmuls and cotangents are not rounded again, so results
    can still differ slightly with and without `jax.jit`.

    The page "How autocast works" explains which values are saved for the backward pass, and which sums are computed in
    float32.

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. TensorFlow's
      ``tf.train.experimental.enable_mixed_precision_graph_rewrite`` selects operations by lists. ``torch.autocast``
      selects the dtype of each operation separately. Both also use half precision for operations between matmuls.
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
                "`jls.diagnostics.autocast_report` prints the layers, operations and lines of the function."
            )
        return result

    return in_mixed_precision


def compute_with(
    fun: Callable[..., Any], args: Any, kwargs: Any, dtype: jnp.dtype, policy: PrecisionPolicy
) -> tuple[Any, Planner]:
    """Evaluate a function under `autocast` and return the result of the function and the `Planner`."""
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
    """Return ``dtype``, or raise a `ValueError` that names the argument if it is not float16, bfloat16 or float32."""
    dtype = checked_dtype(dtype, name)
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"`{name}` must be float16, bfloat16 or float32 (which has no effect), got {dtype.name}.")
    return dtype


def checked_policy(policy: Any, name: str) -> PrecisionPolicy:
    """Return ``policy``, or a policy without rules if ``policy`` is None.

    Raise a `ValueError` if ``policy`` has any other type.
    """
    if policy is None:
        return PrecisionPolicy()
    if not isinstance(policy, PrecisionPolicy):
        raise ValueError(f"`{name}` must be a `PrecisionPolicy` or None, got {policy!r}.")
    return policy
