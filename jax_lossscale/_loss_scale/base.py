"""Every kind of loss scale has this interface, and is a pytree."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure import AxisName, finite_and_largest

_T = TypeVar("_T", bound=type)
_Kind = TypeVar("_Kind", bound="LossScale")

# The most recently defined class of each name, because a notebook cell that defines a class can run several times.
KINDS: dict[str, type[LossScale]] = {}


class LossScale(abc.ABC):
    """A number by which the loss is multiplied, and the rule that changes it: an immutable value, a pytree.

    Configuration is static, state is array leaves, and every method is a pure function, so a loss scale goes through
    `jax.jit`, `jax.lax.scan`, `jax.vmap`, donation and checkpoints like any other value. To differentiation, its next
    state is a constant. Use it in this order::

        value, scaled_grads = jls.value_and_scaled_grad(loss_fn, loss_scale)(params, batch)
        grads = loss_scale.unscale(scaled_grads)
        loss_scale, should_apply = loss_scale.update(grads)

    The scale that is *applied*, to the cotangent, by `scale` and by `unscale` alike, never exceeds ``2**126``: then its
    reciprocal is a normal number, and one exact factor. The state may hold more, and ``loss_scale()`` returns it.

    To write your own kind, write a subclass that is a frozen dataclass and is registered as a pytree (for example with
    `jax.tree_util.register_dataclass`), with the methods `__call__`, `adjust` and `get_config`. Everything in this
    library then takes it. The class attributes below state other properties of a kind.

    References:
      ``tf.compat.v1.mixed_precision.LossScale``, whose interface this is, with state returned instead of assigned.
      Micikevicius et al., Mixed Precision Training, ICLR 2018.
    """

    checks_gradients: ClassVar[bool] = True
    """Whether the gradients are looked at. If not, `update` is free and returns the same loss scale."""

    skip_nonfinite: bool = True
    """Whether a step whose gradients are not finite is skipped, where they are looked at."""

    needs_largest: ClassVar[bool] = False
    """Whether `adjust` is told the largest gradient, too: ``adjust(grads_finite, largest=...)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        KINDS[cls.__name__] = cls

    @property
    def upper_bound(self) -> ArrayLike | None:
        """Return what the scale can never exceed: ``float32[]``; ``None`` if only float32's range bounds it."""
        return None

    @property
    def lower_bound(self) -> ArrayLike | None:
        """Return what overflows never lower the scale below: ``float32[]``; ``None`` if that is not known."""
        return None

    @abc.abstractmethod
    def __call__(self) -> jax.Array:
        """Return the current scale (linear, not its logarithm): ``float32[]``."""

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the loss scale after a step, from what is already known of its gradients.

        A kind with ``needs_largest`` takes one more keyword argument, ``largest``: ``float32[]``, the largest finite
        magnitude among the *unscaled* gradients, agreed over devices; NaN where it was not measured, as of gradients
        that are not finite.

        Args:
          grads_finite: ``bool[]``, such as `all_finite` gives, agreed over devices.

        Returns:
          The new loss scale, of the same tree structure, shapes and dtypes.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as values that JSON can hold; never the current state."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a fresh loss scale from what `get_config` returned; a `ValueError` for anything else."""
        try:
            return cls(**config)
        except TypeError as error:
            raise ValueError(
                f"`{cls.__name__}.from_config(config=...)` must be its arguments, got {config!r}: {error}."
            ) from error

    def __eq__(self, other: object) -> bool:
        """Return whether configuration and state are equal. Batches are equal if all of their members are equal.

        Raises:
          ValueError: if a leaf is traced, because its value is not known yet. A user can compare the scales themselves,
            ``a() == b()``, which is a traced ``bool[]``.
        """
        if type(self) is not type(other):
            return NotImplemented
        with jax.ensure_compile_time_eval():  # under `jax.jit`, the NumPy scalars of fresh loss scales become arrays
            (leaves, structure), (others, other_structure) = jax.tree.flatten(self), jax.tree.flatten(other)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, *others)):
            raise ValueError(
                f"`==` got a traced `{type(self).__name__}`, whose state is not known yet. Compare outside `jax.jit`, "
                "or compare the scales: `a() == b()`."
            )
        return bool(structure == other_structure) and all(map(np.array_equal, leaves, others))  # type: ignore[operator]

    def __hash__(self) -> int:
        return hash((type(self), *config_of(self).items()))

    def scale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Multiply the floating and complex leaves of a tree by the scale.

        To scale a loss, prefer `value_and_scaled_grad`: it does not touch the loss, which therefore cannot overflow.

        Args:
          tree: any pytree.

        Returns:
          A tree of the same structure, shapes and dtypes, times ``2**126`` at most. A float16 leaf overflows where the
          product exceeds what float16 holds.
        """
        _tree.check_tree(tree, f"{type(self).__name__}.scale(tree=...)")
        return _tree.scale(tree, self())

    def unscale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Divide the floating and complex leaves of a tree by the scale, in float32.

        Exact when the scale is a power of two and the result a normal number; otherwise within two units in the last
        place. Like `scale`, it applies at most ``2**126`` (and at least ``2**-126``).

        Args:
          tree: scaled gradients, any pytree.

        Returns:
          A tree of the same structure and shapes. Floating leaves narrower than float32 become float32; float64 and
          complex leaves keep their dtype; other leaves are the same objects.
        """
        _tree.check_tree(tree, f"{type(self).__name__}.unscale(tree=...)")
        return _tree.unscale(tree, self())

    def update(self, grads: chex.ArrayTree, *, axis_name: AxisName = None) -> tuple[Self, jax.Array]:
        """Move the scale after a step, and say whether the step may be applied.

        Args:
          grads: **unscaled** gradients, any pytree, as `unscale` returns them. ``None`` leaves are ignored.
          axis_name: as in `all_finite`, if devices must agree whether all gradients are finite.

        Returns:
          ``(loss_scale, should_apply)``; ``should_apply``: ``bool[]``. If it is false, keep the old parameters,
          optimizer state and everything else that this step has changed (`select_tree`).

        Raises:
          ValueError: if ``grads`` is a boolean, or no pytree of arrays.
        """
        name = f"{type(self).__name__}.update(grads=...)"
        _tree.check_tree(grads, name)
        if getattr(grads, "dtype", type(grads)) in (bool, np.bool_):
            raise ValueError(f"`{name}` must be the unscaled gradients, got {grads!r}. For a verdict, use `adjust`.")
        if not self.checks_gradients:
            return self, jnp.array(True)
        return _update(self, _tree.inexact_leaves(grads), axis_name)


@partial(jax.jit, static_argnums=2, inline=True)
def _update(loss_scale: _Kind, grads: list[ArrayLike], axis_name: AxisName) -> tuple[_Kind, jax.Array]:
    grads_finite, largest = finite_and_largest(grads, axis_name=axis_name)
    should_apply = grads_finite if loss_scale.skip_nonfinite else jnp.array(True)
    return adjust(loss_scale, grads_finite, largest), should_apply


def adjust(loss_scale: _Kind, grads_finite: jax.Array, largest: jax.Array | None) -> _Kind:
    """Call `LossScale.adjust`, with the largest gradient where the kind needs it."""
    if loss_scale.needs_largest:
        return loss_scale.adjust(grads_finite, largest=largest)  # type: ignore[call-arg]
    return loss_scale.adjust(grads_finite)


def static_field(**kwargs: Any) -> Any:
    """Make a dataclass field that is configuration: part of the tree's structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def register(cls: _T) -> _T:
    """Register a frozen dataclass as a pytree: static fields are structure, all other fields are children.

    `jax.tree_util.register_dataclass` would call the constructor to unflatten, and so fill in defaults and validate
    where a library has put strings, ``None`` or shapes in the place of arrays. Here unflatten only puts the leaves
    back: construction is for users.
    """
    fields = dataclasses.fields(cls)
    config_names = tuple(field.name for field in fields if field.metadata.get("static"))
    leaf_names = tuple(field.name for field in fields if not field.metadata.get("static"))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaf_names)

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (
            tuple(_as_array(getattr(node, name)) for name in leaf_names),
            tuple(getattr(node, name) for name in config_names),
        )

    def flatten_with_keys(node: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, config = flatten(node)
        return tuple(zip(keys, leaves, strict=True)), config

    def unflatten(config: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        node: Any = object.__new__(cls)
        for name, value in zip(config_names + leaf_names, (*config, *leaves), strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _as_array(leaf: Any) -> Any:
    """Make an array of a fresh leaf, a NumPy scalar that started no backend: JAX then compiles once."""
    return jnp.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def with_state(loss_scale: _Kind, **leaves: ArrayLike | None) -> _Kind:
    """Return the same loss scale with new leaves, which a rule has computed, and which need no validation.

    The leaves are constants to differentiation: a rule has corners, and its counts have no derivative.
    """
    moved = copy.copy(loss_scale)
    for name, leaf in leaves.items():
        object.__setattr__(moved, name, jax.lax.stop_gradient(leaf))
    return moved


def config_of(loss_scale: LossScale) -> dict[str, Any]:
    """Return the static fields of a loss scale, by name."""
    return {
        field.name: getattr(loss_scale, field.name)
        for field in dataclasses.fields(loss_scale)  # type: ignore[arg-type]
        if field.metadata.get("static")
    }
