"""The public function `autocast`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import autocast_scope, with_reasons
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._check import Function, check_function, checked_dtype, is_dtype, shown
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.parameters import parameters_of_operations
from jax_lossscale._program.remat3 import with_equations
from jax_lossscale._warn import warn_user

# The context `in_variant(variant)` changes the behavior of `autocast` in all functions that are traced in it, including
# those that the user decorated with `autocast`. JAX traces a function again for each variant.
in_variant = jax.make_user_context()
_OMITTED = "omitted"  # `autocast` has no effect
HALF_STREAM = "half_stream"  # `autocast` adds `half_residual_stream=True` to its policy


@overload
def autocast(
    dtype: str | np.dtype[Any] | type[np.generic], /, *, policy: PrecisionPolicy | None = None
) -> Callable[[Function], Function]: ...
@overload
def autocast(
    *, dtype: DTypeLike = jnp.float16, policy: PrecisionPolicy | None = None
) -> Callable[[Function], Function]: ...
@overload
def autocast(fun: Function, dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None) -> Function: ...
def autocast(fun: Any = ..., dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None) -> Any:
    """Transform a float32 function so that its matmuls are computed in half precision.

    Matrix multiplications and convolutions (matmuls) are computed in ``dtype``, both in the forward pass and in the
    backward pass. The results of data movement and selections (transpose, relu, max, clip, sort) have the dtype of the
    operands, but lookups in a tied embedding table read the table in ``dtype``. All other arithmetic, such as norms,
    softmax and losses, is computed in float32, so only matmuls and these lookups can overflow or lose digits. Integers,
    random keys, complex numbers, float64 and the results of manual casts do not change. A matmul with one operand in
    float32 and one in ``dtype``, such as a 16-bit parameter, is computed in ``dtype``.

    Some matmuls stay in float32: those with ``precision="highest"``, those in `keep_float32`, those that a rule of
    ``policy`` matches, and a few in which half precision would destroy the result, such as the Gram matrix of a
    Cholesky factorization. `jls.diagnostics.autocast_report` prints the dtype of each matmul and the reason for each
    dtype.

    Args:
      fun: a function of arbitrary pytrees, written for float32. ``fun`` is traced again on every call of the returned
        function, so use `jax.jit` to compile the returned function. Arrays in the arguments are traced, and other
        arguments (Python numbers, strings, functions) are passed to ``fun`` unchanged. If ``fun`` is omitted, or if
        the first argument is a dtype, `autocast` returns a decorator.
      dtype: float16, which needs a loss scale, or bfloat16. With float32, `autocast` returns ``fun`` itself.
      policy: exceptions to the rule of `autocast`, as a `PrecisionPolicy`.

    Returns:
      A function with the same arguments and keyword arguments as ``fun``. The results of the returned function have the
      same structure, shapes and dtypes as the results of ``fun``, and the gradients of float32 arguments are float32.
      If `autocast` is applied again with the same policy, it has no further effect.

    Raises:
      TypeError: if `autocast` is used in a ``with`` statement.
      ValueError: if ``fun`` is not callable, if ``dtype`` is not float16, bfloat16 or float32, or if ``policy`` is not
        a `PrecisionPolicy`.

    Warns:
      UserWarning: when the function is traced, if a rule of ``policy`` matches no operation. There is no warning about
        a rule that might apply to the backward pass of a `jax.custom_vjp` function, because the backward pass is traced
        later. This includes every rule that matches the source line of the function and either the layer of the
        function or a layer inside this layer.

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
      >>> @jls.autocast(dtype=jnp.bfloat16)
      ... def predict(params, x):
      ...     return jax.nn.gelu(x @ params["in"]) @ params["out"]

    **Details.** Kernels (Pallas, FFI calls), callbacks and solvers such as `jax.scipy.sparse.linalg.cg` are not
    rewritten. Use `in_half` for a kernel that supports only 16-bit dtypes.

    The transformation can be combined in any order with `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.shard_map` and
    `jax.export`. The usual order for gradients is ``jax.grad(autocast(fun))``, or
    ``value_and_scaled_grad(autocast(fun), opt_state)`` with a loss scale.

    The page "How autocast works" (docs/guide/autocast.md) describes

    - all matmuls that stay in float32, and the exceptions to the rule,
    - the values that are saved for the backward pass, and the sums that are computed in float32,
    - the effect on loops, custom derivatives and other transformations,
    - the optimizations of XLA that cause small differences between results with and without `jax.jit`.

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018. TensorFlow's
      ``tf.train.experimental.enable_mixed_precision_graph_rewrite`` selects operations by lists. ``torch.autocast``
      selects the dtype of each operation separately. Both also use half precision for operations between matmuls.
    """
    # Some dtypes, such as `jnp.float16`, are callable.
    if isinstance(fun, str) or is_dtype(fun):
        if dtype is not jnp.float16:
            raise ValueError(
                f"`autocast(fun=...)` must be a function, got the dtype {shown(fun)}. Call `autocast(fun, dtype)`, or "
                "use the decorator `@autocast(dtype=...)`."
            )
        fun, dtype = ..., fun
    dtype = checked_half_precision(dtype, "autocast(dtype=...)")
    policy = checked_policy(policy, "autocast(policy=...)")
    if fun is ...:
        return _Decorator(dtype, policy)
    check_function(fun, "autocast(fun=...)")
    if dtype == jnp.float32:
        return fun

    @functools.wraps(fun)
    def in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        if in_variant.value == _OMITTED:
            return fun(*args, **kwargs)
        result, planner = compute_with(fun, args, kwargs, dtype, policy)
        unmatched = [rule for rule in policy.rules if rule not in planner.node_planner.matched]
        if unmatched:
            warn_user(
                f"`autocast(policy=...)`: no operation matches {', '.join(map(repr, unmatched))}. "
                "`jls.diagnostics.autocast_report` prints the layers, operations and lines of the function."
            )
        return result

    return in_mixed_precision


@dataclasses.dataclass(frozen=True)
class _Decorator:
    """The decorator that `autocast` returns if it is called without a function."""

    dtype: jnp.dtype
    policy: PrecisionPolicy

    def __call__(self, fun: Function) -> Function:
        return autocast(fun, self.dtype, policy=self.policy)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`autocast` transforms a function and cannot be used in a `with` statement. Call `autocast(fun)`, or use "
            f"the decorator `@autocast(dtype=jnp.{self.dtype.name})`. To compute a part of the function in float32, "
            "use `with keep_float32():` inside the function."
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing. Python looks up this method before it calls `__enter__`."""


def without_autocast(fun: Function) -> Function:
    """Return a version of a function in which `autocast` has no effect, even if the function is decorated with it."""

    @functools.wraps(fun)
    def original(*args: Any, **kwargs: Any) -> Any:
        with in_variant(_OMITTED):
            return fun(*args, **kwargs)

    return original  # type: ignore[return-value]


def compute_with(
    fun: Callable[..., Any], args: Any, kwargs: Any, dtype: jnp.dtype, policy: PrecisionPolicy
) -> tuple[Any, Planner]:
    """Evaluate a function under `autocast` and return the result of the function and the `Planner`."""
    if in_variant.value == HALF_STREAM:
        policy = dataclasses.replace(policy, half_residual_stream=True)
    fun, its_object = nnx_objects.with_its_object(fun)
    args = (*its_object, *args)
    traced = Traced(fun, args, kwargs)
    names_parameters = any(rule.parameter != "*" for rule in policy.rules)
    parameters = parameters_of_operations(traced, args, kwargs) if names_parameters else {}
    planner = Planner(dtype, policy, parameters)
    plan = planner.plan(traced.jaxpr)
    with autocast_scope():
        if plan.is_rewritten:
            outputs = Rewriting(planner).declared(plan, traced.jaxpr, traced.inputs)
        else:
            unchanged = with_equations(traced.jaxpr, lambda eqn: with_reasons((eqn,), plan.reasons))
            outputs = jaxpr_as_fun(unchanged)(*traced.inputs)
    return traced.array_result(outputs), planner


def checked_half_precision(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype``, or raise a `ValueError` if the argument ``name`` is not float16, bfloat16 or float32."""
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
        raise ValueError(
            f"`{name}` must be a `PrecisionPolicy` (such as `find_precision(...).policy`) or None, got {shown(policy)}."
        )
    return policy
