"""Functions that validate the inner optimizer of a wrapper, and that inspect or convert its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_lossscale import _tree


def checked_optimizer(inner: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that accepts extra arguments.

    Raises:
      ValueError: if ``inner`` is not an optax transformation. The error message contains the name of the argument.
    """
    if isinstance(inner, optax.MultiSteps):
        # `MultiSteps.gradient_transformation` is not used here because it drops additional arguments.
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if not all(callable(getattr(inner, method, None)) for method in ("init", "update")):
        raise ValueError(f"`{name}` must be an optax transformation, such as `optax.adam(1e-3)`, got {inner!r}.")
    return optax.with_extra_args_support(inner)


def rounds_parameters(state: optax.OptState) -> bool:
    """Return whether an optimizer state contains the state of a wrapper that trains 16-bit parameters.

    The state of such a wrapper is recognized by its attribute ``rounds_parameters``, because this module cannot import
    the wrappers, which import this module.
    """

    def is_of_wrapper(node: Any) -> bool:
        return getattr(node, "rounds_parameters", False) is True

    return any(map(is_of_wrapper, jax.tree.leaves(state, is_leaf=is_of_wrapper)))


def check_rounding_is_last(state: optax.OptState, name: str) -> None:
    """Raise a `ValueError` if a wrapper for 16-bit parameters is followed by another transformation in `optax.chain`.

    The wrapper returns the difference of two 16-bit numbers. If another transformation changes this difference,
    `optax.apply_updates` rounds the sum again, so that small updates are lost. The state of `optax.chain` is a tuple of
    states, and that of `optax.named_chain` is a dictionary of states.
    """
    children: list[optax.OptState] = []
    of_groups = getattr(state, "inner_states", None)
    if isinstance(of_groups, dict):
        # `optax.partition` trains different parameters with these transformations, so their order is irrelevant.
        children = list(of_groups.values())
    elif isinstance(state, (tuple, list, dict)):
        children = list(state.values() if isinstance(state, dict) else state)
        do_round = list(map(rounds_parameters, children))
        # A tuple that contains arrays is not the state of a chain, because the state of a chain contains only the
        # states of its transformations.
        is_chain = not hasattr(state, "_fields") and not any(map(_tree.is_array, children))
        if is_chain and any(do_round[:-1]) and not do_round[-1]:
            raise ValueError(
                f"`{name}` contains `optax.chain(...)`, in which `master_weights` or `stochastic_rounding` is not the "
                "last transformation, so small updates would be lost. Wrap the complete chain: "
                "`master_weights(optax.chain(...))`."
            )
    for child in children:
        check_rounding_is_last(child, name)


def paths_with_state(state: optax.OptState) -> set[tuple[str, ...]]:
    """Return the paths of all parameters for which an optimizer state contains a floating-point array.

    The path of an array in the state begins with the path of a pytree with the structure of the parameters, such as the
    first moments of Adam, and ends with the path of a parameter. Because the length of this prefix is unknown, the
    result contains all suffixes of each path.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(state)
    paths = [tuple(map(str, path)) for path, leaf in with_paths if _tree.is_inexact(leaf)]
    return {path[start:] for path in paths for start in range(len(path) + 1)}


def with_dtypes_of(old: optax.OptState, new: optax.OptState) -> optax.OptState:
    """Return the optimizer state ``new`` with its numbers cast to the dtypes of ``old``, without weak types.

    If the dtypes or the weak types of an optimizer state changed in the first step, the second step would be traced and
    compiled again.
    """

    def with_dtype(a: Any, b: Any) -> Any:
        if isinstance(a, (int, float, complex)) and not isinstance(a, bool):
            a = jnp.asarray(a)
        is_number = _tree.is_array(a) and jnp.issubdtype(a.dtype, jnp.number)
        # If `init` is called with abstract parameters, a state that contains the parameters also has abstract leaves.
        is_abstract = isinstance(b, jax.ShapeDtypeStruct)
        return jnp.asarray(b).astype(a.dtype) if is_number and not is_abstract else b

    return jax.tree.map(with_dtype, old, new)


def with_own_buffers(state: optax.OptState) -> optax.OptState:
    """Return the optimizer state, with repeated occurrences of the same array replaced by copies.

    The initial states of some optimizers contain the same array several times, and JAX cannot donate an array twice.
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)
