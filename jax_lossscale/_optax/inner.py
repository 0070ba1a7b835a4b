"""The inner chain: what it is shown of parameters and gradients, and what its answer must look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import is_transformation
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._warn import warn_user


def checked(inner: Any) -> optax.GradientTransformationExtraArgs:
    """``inner`` as a transformation that takes extra arguments, or a `ValueError`."""
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)  # its own view drops extra arguments
    if not is_transformation(inner):
        raise ValueError(
            f"`loss_scaled(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got {inner!r}."
        )
    return optax.with_extra_args_support(inner)


def check_holds_no_loss_scale(inner_state: optax.OptState) -> None:
    """Raise a `ValueError` if a chain that has made this state would unscale gradients itself."""
    if _holds(inner_state, LossScale):
        raise ValueError(
            "`loss_scaled(inner=...)` already contains a `loss_scaled`: the gradients would be unscaled twice. "
            "Wrap the whole chain once."
        )


def warn_of_float16(params: optax.Params, loss_scale: LossScale) -> None:
    """Warn of float16 parameters, which nobody may have asked for: some layers make them where the input is float16."""
    with_paths = jax.tree_util.tree_leaves_with_path(params) if loss_scale.checks_gradients else []
    narrow = [path for path, leaf in with_paths if _tree.is_array(leaf) and leaf.dtype == jnp.float16]
    if narrow:
        warn_user(
            f"`init(params)` got {len(narrow)} float16 parameters, the first at {jax.tree_util.keystr(narrow[0])!r}: "
            "updates below a 4096th of a parameter are lost in them. Keep them in float32, "
            "`params = jls.cast_floating(params, jnp.float32)`, and cast to float16 inside the loss function. If they "
            "were not meant to be float16, their layer took the dtype of its input: initialize it with a float32 one."
        )


def widened(tree: chex.ArrayTree, loss_scale: LossScale) -> chex.ArrayTree:
    """Parameters or unscaled gradients as the inner chain sees them: none of them narrow.

    Without a loss scale bfloat16 stays, as it would without this library. Float16 never does: the square of a small
    gradient would be zero, and Adam would divide zero by zero.
    """
    keep: tuple[DTypeLike, ...] = () if loss_scale.checks_gradients else (jnp.bfloat16,)
    return _tree.widen(tree, keep=keep)


def differentiable_where_skipped(
    grads: optax.Updates, should_apply: jax.Array, run: Callable[[optax.Updates], Any]
) -> optax.Updates:
    """``grads``; where derivatives of ``run(grads)`` are taken, and only there, ones in their place on a skipped step.

    The result of a skipped step is discarded, so its derivatives are multiplied by zero, but at an infinity they may be
    NaN. Always replacing the gradients would make every kernel that reads them wait for the verdict.
    """

    @jax.custom_jvp
    def identity(should_apply: jax.Array, grads: optax.Updates, closed_over: list[Any]) -> optax.Updates:
        del should_apply, closed_over
        return grads

    @identity.defjvp
    def differentiate(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[optax.Updates, optax.Updates]:
        should_apply, grads, _ = primals
        return ones_where_skipped(grads, should_apply), tangents[1]

    # Derivatives may be taken of what is closed over alone: of parameters, states, a learning rate.
    consts = jax.make_jaxpr(run)(grads).consts
    return identity(should_apply, grads, [const for const in consts if isinstance(const, jax.core.Tracer)])


def ones_where_skipped(tree: chex.ArrayTree, should_apply: jax.Array | None) -> chex.ArrayTree:
    """Gradients, or a loss; ones in their place where the step is skipped.

    Not zeros: the derivative of the square root in many an optimizer is infinite there.
    """
    if should_apply is None:
        return tree

    def leaf_or_ones(leaf: ArrayLike) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return jnp.where(should_apply, leaf, jnp.ones_like(leaf))

    return _tree.map_inexact(lambda leaves: list(map(leaf_or_ones, leaves)), tree)


def no_updates(like: optax.Updates) -> optax.Updates:
    """Updates that change nothing: -0.0, since 0.0 added to -0.0 would be 0.0."""
    return jax.tree.map(lambda leaf: -jnp.zeros_like(leaf) if _tree.is_inexact(leaf) else jnp.zeros_like(leaf), like)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, which adds float32 updates to narrow parameters, whatever JAX is told of promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def with_dtypes_of(old: optax.OptState, new: optax.OptState) -> optax.OptState:
    """``new`` in the dtypes of ``old``, none of them weak: a state that crosses `jax.jit` twice is traced once."""

    def with_dtype(a: Any, b: Any) -> Any:
        if isinstance(a, (int, float, complex)) and not isinstance(a, bool):
            a = jnp.asarray(a)
        is_number = _tree.is_array(a) and jnp.issubdtype(a.dtype, jnp.number)
        is_abstract = isinstance(b, jax.ShapeDtypeStruct)  # of abstract parameters, where a state holds them
        return jnp.asarray(b).astype(a.dtype) if is_number and not is_abstract else b

    return jax.tree.map(with_dtype, old, new)


def with_own_buffers(state: optax.OptState) -> optax.OptState:
    """A fresh state without any array twice, as some chains make it: it could not be donated."""
    met: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in met:
            return jnp.copy(leaf)
        met.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def with_gradients(grads: optax.Updates, params: optax.Params) -> optax.Params:
    """``params``, with ``None`` for what has ``None`` for a gradient: frozen layers, and numbers that are settings."""
    if len(jax.tree.leaves(grads)) == len(_tree.leaves_and_nones(grads)):
        return params

    def with_grads(params: optax.Params) -> optax.Params:
        return jax.tree.map(
            lambda grad, param: None if grad is None else param, grads, params, is_leaf=lambda grad: grad is None
        )

    return _of_each_copy(with_grads, params)


def check_no_integers(grads: optax.Updates, params: optax.Params | None) -> None:
    """Raise a `ValueError` if a floating parameter has an integer for a gradient, which would be taken for none."""
    param_at = dict(
        jax.tree_util.tree_leaves_with_path(params.fast if isinstance(params, optax.LookaheadParams) else params)
    )
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        is_integer = isinstance(grad, int) or (_tree.is_array(grad) and jnp.issubdtype(grad.dtype, np.integer))
        if is_integer and _tree.is_inexact(param_at.get(path)):
            raise ValueError(
                f"`update(updates=...)` must hold floating gradients for floating parameters, got {grad!r} at "
                f"{jax.tree_util.keystr(path)!r}. `jax.grad` makes them so; cast what was made otherwise."
            )


def check_not_masked(tree: optax.Params, name: str) -> None:
    """Raise a `ValueError` that names the argument if `optax.masked` is around the wrapper, and not inside it."""
    if _holds(tree, optax.MaskedNode):
        raise ValueError(
            f"`{name}` holds an `optax.MaskedNode`: a mask is around `loss_scaled`, and the gradients outside of it "
            "would stay scaled. Wrap the whole chain, mask included: `loss_scaled(optax.masked(inner, mask))`, or "
            "`loss_scaled(optax.partition(...))`."
        )


def _holds(tree: chex.ArrayTree, kind: type) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind)))


def check_not_scaled(extra_args: dict[str, Any], scaled_grads: optax.Updates) -> None:
    """Raise a `ValueError` if an argument that the chain gets as it is holds the scaled gradients themselves."""
    scaled = {id(grad) for grad in jax.tree.leaves(scaled_grads) if isinstance(grad, (jax.Array, np.ndarray))}
    for name, given in extra_args.items():
        if any(id(leaf) in scaled for leaf in jax.tree.leaves(given)):
            raise ValueError(
                f"`update({name}=...)` got the scaled gradients, which the chain would take for true ones. Pass "
                f"`{name}=state.loss_scale.unscale(scaled_grads)`."
            )


def updates_of_others(grads: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """What is added to the leaves of ``params`` that the inner chain is not shown; ``None`` for all others.

    Zeros for arrays. A Python number that has no gradient is part of the model's configuration, and gets no update.
    Where parameters are not given, the gradients themselves.
    """
    if params is None:
        return grads

    def update(grad: Any, param: Any) -> Any:
        is_array = _tree.is_array(param) and not jnp.issubdtype(param.dtype, jax.dtypes.extended)
        is_number = isinstance(param, (bool, int)) and grad is not None
        return jnp.zeros_like(param) if (is_array or is_number) and not _tree.is_inexact(param) else None

    def updates_below(grad: Any, params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda param: update(grad, param), params)

    return _of_each_copy(
        lambda params: jax.tree.map(updates_below, grads, params, is_leaf=lambda leaf: leaf is None), params
    )


def _of_each_copy(function: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    """``function(params)``; of both copies that `optax.lookahead` keeps, of which one has gradients."""
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams(*map(function, params))
    return function(params)
