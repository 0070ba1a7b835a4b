"""`autocast` is here as a user meets it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from jax_lossscale._autocast.plan import record
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
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

    **The rule.** Matrix products and convolutions are computed in ``dtype``, forward and backward. Operations that only
    move numbers, or choose among them (relu, max, clip, sort), follow their operands; a function with a derivative of
    its own does, if its derivative only chooses, too. All other arithmetic is float32. So nothing but a product can
    overflow, cancel or round away in 16 bits. A pool whose result goes into a product is computed in ``dtype``. A
    product that adds up only one term for each element of its result is arithmetic, because it is an elementwise
    multiplication. Examples are `jnp.outer`, ``positions[:, None] @ frequencies[None]``, and a convolution with one
    input channel per group and a window of size 1. The largest or smallest of more numbers than ``dtype`` can count
    (2048 in float16, 256 in bfloat16) is arithmetic, too: JAX divides its gradient by the number of equal ones, which
    it counts in the dtype of the numbers.

    **The exceptions.** These products stay float32:

    - products marked by the author or by JAX: ``precision="highest"``, unless `jax.default_matmul_precision` marks all
      of them, or an algorithm;
    - products of whose result a factorization is made, such as the Gram matrix of a Cholesky factor;
    - products whose result is converted to an integer of more than 8 bits, possibly after other operations, such as the
      positions of tokens in an expert's buffer. This does not apply if another product, `argmax`, the indices of
      `top_k`, a comparison or a conversion to bool is in between;
    - products with a constant operand, or one made of constants alone by anything but a product, unless its numbers lie
      between bounds that ``dtype`` holds. Nothing is known of what loops, factorizations, sums at places or random
      numbers make of constants;
    - products in `keep_float32`, and those that a rule of ``policy`` speaks of. Even ``"half"`` and
      ``"float32_result"`` have no effect on a product with a constant operand whose bounds ``dtype`` does not hold.

    Only float32 is touched. Integers, keys, random bits, complex numbers, float64 and what is cast by hand stay as they
    are, to the bit. Kernels (Pallas, FFI calls), callbacks and solvers such as `jax.scipy.sparse.linalg.cg` are
    computed as they are written. So is the backward pass of a `jax.custom_vjp` in the rule of a `jax.custom_jvp`. The
    backward pass of a `jax.custom_vjp` may use its residuals, but no other traced array, as below `jax.checkpoint`:
    jaxopt's implicit differentiation uses others, and raises `jax.errors.UnexpectedTracerError`. With `in_half`, a
    kernel that takes 16 bits only gets them. `jls.diagnostics.autocast_report` tells what became of each product, and
    why.

    **Memory.** What the backward pass asks for is kept, or computed again from what is kept, whichever moves fewer
    bytes. A value that is rounded for a product anyway is kept narrow. No product is computed again, nor anything that
    is costly. What is more than twice as large as what it is made of by cheap arithmetic, such as a mask, is made again
    by whatever takes it. A softmax that goes into a product is differentiated by its rounded result. In float16, less
    than 2^-25 rounds to zero, and its gradient with it: from where one logit leads by 14, small gradients of logits are
    lost, which ``PrecisionPolicy(recompute=False)`` keeps. A relu whose result goes into a product and, as float32,
    past it is differentiated so, too: the derivative of what rounds to zero is zero.

    **Sums.** Carries of loops are float32. So are sums of gradients over the iterations of a loop, of what is gathered
    or broadcast, of an argument that is used several times, and of all that one stretch of arithmetic makes of a
    product's result. Where a narrow value goes into several products or stretches, its cotangents are added in
    ``dtype``, as they are in code that casts by hand. A bias and the product that it is added to get the same
    cotangent, rounded once.

    The function is rewritten as a program, and goes with `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.shard_map` and
    `jax.export` on either side; with `jax.experimental.jet` under a ``PrecisionPolicy(recompute=False)``.
    ``jax.grad(autocast(fun))`` is the usual order, and the one for a loss scale:
    ``value_and_scaled_grad(autocast(fun), opt_state)``. In ``autocast(jax.grad(fun))``, the products of the backward
    pass are products like any, and their results do not pass through the casts of the forward pass.

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
        `jax.custom_vjp` function has not been traced yet. Therefore, there is no warning if the rule matches the layer
        and the line of such a function, and a rule for a scope that only the backward rule opens causes a warning.

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
      ``autocast`` decides operation by operation. Both compute in half precision between the products.
    """
    check_function(fun, "autocast(fun=...)")
    dtype = checked_half_precision(dtype, "autocast(dtype=...)")
    policy = checked_policy(policy, "autocast(policy=...)")
    if dtype == jnp.float32:
        return fun

    @functools.wraps(fun)
    def half(*args: Any, **kwargs: Any) -> Any:
        result, planner = compute_with(fun, args, kwargs, dtype, policy)
        unmatched = [rule for rule in policy.rules if rule not in planner.rule.matched]
        if unmatched:
            warn_user(
                f"`autocast(policy=...)`: no operation matches {', '.join(map(repr, unmatched))}. "
                "`jls.diagnostics.autocast_report` shows the layers, operations and lines that there are."
            )
        return result

    return half


def compute_with(
    fun: Callable[..., Any], args: Any, kwargs: Any, dtype: jnp.dtype, policy: PrecisionPolicy
) -> tuple[Any, Planner]:
    """Return the result of a function that is computed under `autocast`, and the planner."""
    fun, its_object = nnx_objects.with_its_object(fun)
    args = (*its_object, *args)
    traced = Traced(fun, args, kwargs)
    names_parameters = any(rule.parameter != "*" for rule in policy.rules)
    planner = Planner(dtype, policy, parameters_of_operations(traced, args, kwargs) if names_parameters else {})
    plan = planner.plan(traced.jaxpr)
    record(plan)
    if not plan.is_rewritten:
        return traced.array_result(jaxpr_as_fun(traced.jaxpr)(*traced.inputs)), planner
    return traced.array_result(Rewriting(planner).declared(plan, traced.jaxpr, traced.inputs)), planner


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
