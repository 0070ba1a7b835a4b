"""The base classes of loss scales, and helper functions to implement loss scales as pytrees.

- `LossScale` is the base class of all loss scales, including user-defined ones.
- `BoundedLossScale` contains the code shared by `DynamicLossScale` and `AutoLossScale`.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import finite_number, is_array_or_scalar, is_real, positive_normal_number
from jax_lossscale._measure import AxisName, finite_and_largest

_T = TypeVar("_T", bound=type)
_Kind = TypeVar("_Kind", bound="LossScale")

# A dictionary from the names of all subclasses of `LossScale` to these subclasses. If a class is defined again, for
# example because a notebook cell runs twice, the new class replaces the old one.
KINDS: dict[str, type[LossScale]] = {}


class LossScale(abc.ABC):
    """Base class of loss scales, which consist of a factor for the loss and a rule that updates the factor.

    Loss scales are immutable pytrees whose configuration is static and whose state consists of arrays. All methods of a
    loss scale are pure functions. A loss scale can therefore be used with `jax.jit`, `jax.lax.scan`, `jax.vmap`, buffer
    donation and checkpoints. Call the methods of a loss scale in the following order::

        value, scaled_grads = jls.value_and_scaled_grad(loss_fn, loss_scale)(params, batch)
        grads = loss_scale.unscale(scaled_grads)
        loss_scale, should_apply = loss_scale.update(grads)

    To define a new loss scale, write a subclass with the methods `__call__`, `adjust` and `get_config`. A subclass of
    `LossScale` must be a frozen dataclass that is registered as a pytree, for example with
    `jax.tree_util.register_dataclass`. All functions in `jax_lossscale` accept instances of user-defined subclasses.
    The class attributes below describe additional properties of a loss scale.

    **Details.** The factor by which arrays are multiplied or divided is clipped to the range from ``2**-126`` to
    ``2**126``, in which its reciprocal is a normal float32 number. The clipped factor is used for the cotangent of the
    loss, and in `scale` and `unscale`. The scale in the state is not clipped, so ``loss_scale()`` can return a number
    outside the range from ``2**-126`` to ``2**126``. The updated state is a constant with respect to differentiation.

    References:
      ``tf.compat.v1.mixed_precision.LossScale`` has the same interface, but assigns its state instead of returning it.
      Micikevicius et al., Mixed Precision Training, ICLR 2018.
    """

    checks_gradients: ClassVar[bool] = True
    """Whether the gradients are checked. If not, `update` returns the same loss scale without any computation."""

    skip_nonfinite: bool = True
    """Whether a step is skipped if its gradients are not finite. The value is ignored if gradients are not checked."""

    needs_largest: ClassVar[bool] = False
    """Whether `adjust` needs the largest gradient, so that it is called as ``adjust(grads_finite, largest=...)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        KINDS[cls.__name__] = cls

    @property
    def upper_bound(self) -> ArrayLike | None:
        """Return the upper bound of the scale as a ``float32[]``, or ``None`` if the scale is unbounded."""
        return None

    @property
    def lower_bound(self) -> ArrayLike | None:
        """Return the lower bound that limits decreases of the scale (a ``float32[]``), or ``None`` if it is unknown."""
        return None

    @abc.abstractmethod
    def __call__(self) -> jax.Array:
        """Return the current scale (not its logarithm) as a ``float32[]``."""

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the loss scale for the next step, given the properties of the gradients of the current step.

        If ``needs_largest`` is true, this method has an additional keyword argument ``largest``, a ``float32[]`` with
        the largest finite magnitude among the *unscaled* gradients of all devices. The argument ``largest`` is NaN if
        the gradients are not finite, or if their largest magnitude was not measured.

        Args:
          grads_finite: ``bool[]``, whether the gradients on all devices are finite, as computed by `all_finite`.

        Returns:
          The new loss scale, with the same tree structure, shapes and dtypes.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON-serializable values, without the current state."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return a loss scale with the given configuration and the initial state.

        Args:
          config: the dictionary that `get_config` returned.

        Returns:
          The loss scale.

        Raises:
          ValueError: if ``config`` does not contain valid constructor arguments.
        """
        try:
            # The constructor does not validate the state of the update rule, so a configuration, which can come from a
            # file, must not contain this state.
            if isinstance(config, Mapping) and "_rule_state" in config:
                raise TypeError("the state is not part of a configuration")
            return cls(**config)
        except TypeError as error:
            raise ValueError(
                f"`{cls.__name__}.from_config(config=...)` must contain the arguments of the constructor, got "
                f"{config!r}: {error}."
            ) from error

    def __eq__(self, other: object) -> bool:
        """Return whether two loss scales have the same configuration and the same state.

        Two batches of loss scales are equal if all of their members are equal.

        Raises:
          ValueError: if a leaf is traced, because its value is not known at trace time. To compare traced loss scales,
            compare their current scales with ``a() == b()``, which returns a traced ``bool[]``.
        """
        if type(self) is not type(other):
            return NotImplemented
        # Without `ensure_compile_time_eval`, `jax.tree.flatten` would convert NumPy scalars to tracers inside
        # `jax.jit`.
        with jax.ensure_compile_time_eval():
            (leaves, structure), (others, other_structure) = jax.tree.flatten(self), jax.tree.flatten(other)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, *others)):
            raise ValueError(
                f"`==` got a traced `{type(self).__name__}`, whose state is not known yet. Compare the loss scales "
                "outside `jax.jit`, or compare only their current scales: `a() == b()`."
            )
        return bool(structure == other_structure) and all(map(np.array_equal, leaves, others))  # type: ignore[operator]

    def __hash__(self) -> int:
        return hash((type(self), *config_of(self).items()))

    def scale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the pytree with its floating and complex leaves multiplied by the scale.

        To scale a loss, use `value_and_scaled_grad` instead, which scales only the backward pass, so that the loss
        itself cannot overflow.

        Args:
          tree: any pytree.

        Returns:
          A pytree with the structure, shapes and dtypes of ``tree``. The factor by which the leaves are multiplied is
          clipped to the range from ``2**-126`` to ``2**126``. Elements of float16 leaves overflow to infinity if the
          product is too large for float16.
        """
        _tree.check_tree(tree, f"{type(self).__name__}.scale(tree=...)")
        return _tree.scale(tree, self())

    def unscale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the pytree with its floating and complex leaves divided by the scale, in at least float32.

        If the scale is a power of two and the quotient is a normal number, the division is exact. In all other cases,
        the rounding error of the division is at most two units in the last place. As in `scale`, the divisor is clipped
        to the range from ``2**-126`` to ``2**126``.

        Args:
          tree: any pytree of scaled gradients.

        Returns:
          A pytree with the structure and shapes of ``tree``. Floating-point leaves with fewer than 32 bits are returned
          in float32. Float64 and complex leaves keep their dtypes, and all other leaves are returned as the same
          objects.
        """
        _tree.check_tree(tree, f"{type(self).__name__}.unscale(tree=...)")
        return _tree.unscale(tree, self())

    def update(self, grads: chex.ArrayTree, *, axis_name: AxisName = None) -> tuple[Self, jax.Array]:
        """Return the loss scale for the next step, and whether to apply the current step.

        Args:
          grads: any pytree of **unscaled** gradients, as returned by `unscale`. Leaves that are ``None`` are ignored.
          axis_name: the name or names of the mesh axes over which the devices must agree on whether all gradients are
            finite, as in `all_finite`.

        Returns:
          ``(loss_scale, should_apply)``, where ``should_apply`` is a ``bool[]``. If ``should_apply`` is false, use
          `select_tree` to discard all changes made by the step, including changes to the parameters and the optimizer
          state.

        Raises:
          ValueError: if ``grads`` is a boolean, or a single leaf that is neither an array nor a number.
        """
        name = f"{type(self).__name__}.update(grads=...)"
        _tree.check_tree(grads, name)
        if getattr(grads, "dtype", type(grads)) in (bool, np.bool_):
            raise ValueError(
                f"`{name}` must be the unscaled gradients, got {grads!r}. To update the loss scale with a "
                "boolean, use `adjust`."
            )
        if not self.checks_gradients:
            return self, jnp.array(True)
        return _update(self, _tree.inexact_leaves(grads), axis_name)


# With `jax.jit`, an eager `update` requires only a single dispatch. With `inline=True`, the operations of an `update`
# inside another `jax.jit` become part of the outer program.
@partial(jax.jit, static_argnums=2, inline=True)
def _update(loss_scale: _Kind, grads: list[ArrayLike], axis_name: AxisName) -> tuple[_Kind, jax.Array]:
    grads_finite, largest = finite_and_largest(grads, axis_name=axis_name)
    should_apply = grads_finite if loss_scale.skip_nonfinite else jnp.array(True)
    return adjust(loss_scale, grads_finite, largest), should_apply


def adjust(loss_scale: _Kind, grads_finite: jax.Array, largest: jax.Array | None) -> _Kind:
    """Return the result of `LossScale.adjust`, which is called with ``largest`` only if ``needs_largest`` is true."""
    if loss_scale.needs_largest:
        return loss_scale.adjust(grads_finite, largest=largest)  # type: ignore[call-arg]
    return loss_scale.adjust(grads_finite)


class BoundedLossScale(LossScale):
    """A loss scale that changes between ``min_loss_scale`` and ``max_loss_scale``.

    The state consists of the current scale and of the numbers of the update rule in ``_rule_state``. The current scale
    is validated, because users can set it. The other numbers are not validated, because only this library creates them.
    """

    initial_loss_scale: float
    min_loss_scale: float
    max_loss_scale: float | None
    current_loss_scale: jax.Array
    _rule_state: Any  # a named tuple; each subclass has its own class of named tuples

    def __repr__(self) -> str:
        values = {**config_of(self), "current_loss_scale": self.current_loss_scale, **self._rule_state._asdict()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def upper_bound(self) -> float | None:
        """Return the upper bound ``max_loss_scale``."""
        return self.max_loss_scale

    @property
    def lower_bound(self) -> float:
        """Return the lower bound ``min_loss_scale``."""
        return self.min_loss_scale

    def __call__(self) -> jax.Array:
        """Return the current scale as a ``float32[]``."""
        return jnp.asarray(self.current_loss_scale)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments, without the current state."""
        return config_of(self)

    def _check_scales(self) -> None:
        """Convert the initial scale and its bounds to Python floats, and the current scale to a leaf.

        Raises:
          ValueError: if one of these values is not a finite number, if the lower bound or the current scale is not
            positive, or if the initial scale is not between the bounds.
        """
        initial, floor, ceiling = self.initial_loss_scale, self.min_loss_scale, self.max_loss_scale
        start = finite_number(initial, self._named("initial_loss_scale"))
        floor = positive_normal_number(floor, self._named("min_loss_scale"))
        ceiling = None if ceiling is None else finite_number(ceiling, self._named("max_loss_scale"))
        if start < floor:
            raise ValueError(
                f"`{self._named('initial_loss_scale')}` must not be below `min_loss_scale` = {floor!r}, got "
                f"{initial!r}. Lower `min_loss_scale`."
            )
        if ceiling is not None and start > ceiling:
            raise ValueError(
                f"`{self._named('initial_loss_scale')}` must not be above `max_loss_scale` = {ceiling!r}, got "
                f"{initial!r}. Lower `initial_loss_scale`, or raise `max_loss_scale`."
            )
        given: Any = self.current_loss_scale
        current = scale_leaf(start if given is ... else given, self._named("current_loss_scale"))
        self._set(initial_loss_scale=start, min_loss_scale=floor, max_loss_scale=ceiling, current_loss_scale=current)

    def _moved(self, current_loss_scale: jax.Array, rule_state: Any) -> Self:
        """Return a copy of the loss scale with a new state.

        `jax.lax.stop_gradient` is applied to the state, because an update rule is not differentiable everywhere, and
        integer counters do not have a derivative.
        """
        moved = copy.copy(self)
        scale, rule_state = jax.lax.stop_gradient((current_loss_scale, rule_state))
        moved._set(current_loss_scale=scale, _rule_state=rule_state)
        return moved

    def _named(self, argument: str) -> str:
        """Return the name of a constructor argument as it appears in error messages."""
        return f"{type(self).__name__}({argument}=...)"

    def _set(self, **fields: Any) -> None:
        """Set fields of a loss scale that is being constructed. `setattr` would fail, because the class is frozen."""
        vars(self).update(fields)


def scale_leaf(value: Any, name: str) -> ArrayLike:
    """Return a scale as a leaf of a loss scale: a ``float32[]``, or a float32 array for a batch of loss scales.

    If ``value`` is a concrete scalar, the leaf is a NumPy scalar, so that constructing a loss scale neither initializes
    a JAX backend nor creates a tracer.

    Args:
      value: the scale, or an array of scales. A tracer is not validated.
      name: the name of the argument in an error message.

    Raises:
      ValueError: if a concrete scale is not a positive normal float32 number, or if an array is not real.
    """
    if not (is_array_or_scalar(value) and (value.ndim > 0 or isinstance(value, jax.core.Tracer))):
        return np.float32(positive_normal_number(value, name))
    if not is_real(value):
        raise ValueError(f"`{name}` must be real, got {value.dtype.name}.")
    if not isinstance(value, jax.core.Tracer):
        for member in np.ravel(np.asarray(value)):
            positive_normal_number(member, name)
    return value.astype(np.float32)


def static_field(**kwargs: Any) -> Any:
    """Return a dataclass field for configuration, which `register` makes part of the pytree structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def register(cls: _T, rule_state: Any = None) -> _T:
    """Register a frozen dataclass as a pytree whose static fields are metadata and whose other fields are children.

    `jax.tree_util.register_dataclass` is not used, because it calls the constructor when a pytree is unflattened. Some
    libraries unflatten pytrees with strings, ``None`` or shapes in place of arrays, which the constructor would reject
    or replace with default values. In a class registered by `register`, unflattening only assigns the fields.

    Args:
      cls: the dataclass.
      rule_state: the class of the named tuple ``_rule_state`` of a `BoundedLossScale`. The elements of the named tuple
        are children of the loss scale itself, so that the paths of the leaves, which are stored in checkpoints, are the
        names of public attributes.
    """
    fields = [field for field in dataclasses.fields(cls) if field.name != "_rule_state"]
    rule_names = () if rule_state is None else rule_state._fields
    config_names = tuple(field.name for field in fields if field.metadata.get("static"))
    leaf_names = *(field.name for field in fields if not field.metadata.get("static")), *rule_names
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaf_names)

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves = tuple(_as_array(getattr(node, name)) for name in leaf_names)
        return leaves, tuple(getattr(node, name) for name in config_names)

    def flatten_with_keys(node: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, config = flatten(node)
        return tuple(zip(keys, leaves, strict=True)), config

    def unflatten(config: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        node: Any = object.__new__(cls)
        values = dict(zip(config_names + leaf_names, (*config, *leaves), strict=True))
        if rule_state is not None:
            values["_rule_state"] = rule_state(*map(values.pop, rule_names))
        vars(node).update(values)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _as_array(leaf: Any) -> Any:
    """Convert a NumPy scalar to a JAX array; return any other leaf unchanged.

    The constructor of a loss scale creates NumPy scalars, so that it does not initialize a JAX backend. When a loss
    scale is flattened, its NumPy scalars are converted to JAX arrays. As a result, the leaves of new and updated loss
    scales have the same types, so a training step is compiled only once.
    """
    return jnp.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def config_of(loss_scale: LossScale) -> dict[str, Any]:
    """Return a dictionary with the names and values of the static fields of a loss scale."""
    fields = dataclasses.fields(loss_scale)  # type: ignore[arg-type]
    return {field.name: getattr(loss_scale, field.name) for field in fields if field.metadata.get("static")}
