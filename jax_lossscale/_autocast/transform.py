"""The public function `autocast`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import are_added, autocast_scope, jaxpr_with_reasons
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._check import check_function, checked_dtype, shown
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.parameters import parameters_of_operations
from jax_lossscale._warn import warn_user

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def autocast(
    dtype: str | np.dtype[Any] | type[np.generic], /, *, policy: PrecisionPolicy | None = None
) -> Callable[[_Function], _Function]: ...
@overload
def autocast(
    *, dtype: DTypeLike = jnp.float16, policy: PrecisionPolicy | None = None
) -> Callable[[_Function], _Function]: ...
@overload
def autocast(fun: _Function, dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None) -> _Function: ...
def autocast(fun: Any = None, dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None) -> Any:
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
      >>> @jls.autocast(dtype=jnp.bfloat16)
      ... def predict(params, x):
      ...     return jax.nn.gelu(x @ params["in"]) @ params["out"]

    **Details.** These matmuls stay in float32:

    - matmuls with ``precision="highest"`` or an algorithm. The precision can be an argument of the matmul, or it can be
      set by `jax.default_matmul_precision` inside ``fun``. If the same precision is already set when the returned
      function is called, for example for the whole program, it has no effect;
    - matmuls whose result is factorized, such as the Gram matrix of a Cholesky factorization;
    - the other matmuls of a product of several matrices that is factorized, such as ``C @ P`` if ``C @ P @ C.T + R`` is
      factorized. The product continues through data movement, additions, subtractions, multiplications and divisions by
      scalars, calls, branches and the carries of loops. It ends at all other operations, such as nonlinear functions,
      elementwise products of two arrays and sums along an axis;
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
    if _is_dtype(fun):
        if dtype is not jnp.float16:
            raise ValueError(
                f"`autocast(fun=...)` must be a function, got the dtype {shown(fun)}. Call `autocast(fun, dtype)`, or "
                "use the decorator `@autocast(dtype=...)`."
            )
        fun, dtype = None, fun
    if fun is None:
        dtype = checked_half_precision(dtype, "autocast(dtype=...)")
        return _Decorator(dtype, checked_policy(policy, "autocast(policy=...)"))
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


@dataclasses.dataclass(frozen=True)
class _Decorator:
    """The result of `autocast` without a function."""

    dtype: jnp.dtype
    policy: PrecisionPolicy

    def __call__(self, fun: _Function) -> _Function:
        return autocast(fun, self.dtype, policy=self.policy)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`autocast` transforms a function and cannot be used in a `with` statement. Call `autocast(fun)`, or use "
            f"the decorator `@autocast(dtype=jnp.{self.dtype.name})`. To compute a part of the function in float32, "
            "use `with keep_float32():` inside the function."
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing. Python looks up this method before it calls `__enter__`."""


def _is_dtype(value: Any) -> bool:
    """Return whether a value is a dtype. Some dtypes, such as `jnp.float16`, are also callable."""
    is_scalar_type = isinstance(value, type) and issubclass(value, np.generic)
    return is_scalar_type or isinstance(value, (str, np.dtype, type(jnp.float16)))


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
        raise ValueError(
            f"`{name}` must be a `PrecisionPolicy` (such as `find_precision(...).policy`) or None, got {shown(policy)}."
        )
    return policy
