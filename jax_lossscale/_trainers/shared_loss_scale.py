"""The loss scale that the loss function and the optimizer of a `MixedPrecision` share.

The loss function and the optimizer have no argument in common. The current scale is therefore stored in a reference
(`jax.Ref`), which JAX adds to the arguments of every compiled function that uses it. References cannot be used in
`jax.pmap` or `jax.shard_map`. In these transformations, `MixedPrecision.step` finds the loss scale in the arguments of
the training step and makes it available to the loss function while the step is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_lossscale._gradients.cotangent import is_frozen
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._optax.wrapper import is_concrete_array

_AnyMesh: TypeAlias = Mesh | AbstractMesh  # the mesh of a traced array is abstract: it has a shape, but no devices

# `MixedPrecision.step` enters this context. Otherwise, JAX would reuse functions that it traced in another step, such
# as the argument of `jax.checkpoint`, although they contain the loss scale of that step.
_in_step = jax.make_user_context()

_USE_STEP = "Wrap the training step before it is compiled: `train_step = mp.step(train_step)`."

_PASS_MESH = "Create `MixedPrecision(optimizer, mesh=mesh)` with the mesh of the training step."


class _KnownScale:
    """A loss scale that is known when the step is traced and therefore does not need to be stored in a reference.

    The loss scale is either a constant without arrays, such as a `NoOpLossScale`, or an argument of a function returned
    by `MixedPrecision.step`. This function returns the next loss scale as part of the optimizer state.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale

    def read(self) -> LossScale:
        """Return the loss scale for a backward pass."""
        if is_frozen(self._loss_scale):
            raise ValueError(
                "`MixedPrecision.step(train_step=...)` got a compiled function, in which the loss scale would be a "
                "constant. Wrap the function before it is compiled: `jax.jit(mp.step(train_step))`."
            )
        return self._loss_scale

    def gradient_scale(self, of_state: LossScale) -> None:
        """Return ``None``, because the gradients are computed at the loss scale in the state of the optimizer.

        Raises:
          ValueError: if the loss scale in the state has a different class or configuration.
        """
        if len({jax.tree.structure(loss_scale) for loss_scale in (of_state, self._loss_scale)}) > 1:
            raise ValueError(
                f"`MixedPrecision(loss_scale={self._loss_scale!r})` got a state with a different loss scale, "
                f"{of_state!r}. Pass this loss scale to `MixedPrecision`."
            )

    def write(self, loss_scale: LossScale) -> None:
        """Do nothing, because the state of the optimizer contains the next loss scale."""


class _StoredScale:
    """A reference (`jax.Ref`) to the scale, which each update overwrites with the scale of the next step."""

    def __init__(self, scale: jax.Array) -> None:
        self._ref = jax.new_ref(scale)
        self.num_devices = len(scale.sharding.device_set)

    def read(self) -> LossScale:
        """Return the scale as a `FixedLossScale`. A backward pass needs the scale, but not the rule that updates it."""
        # The leaf of the `FixedLossScale` is replaced, because the constructor would reject a scale below 1.
        fixed: LossScale = jax.tree.map(lambda _: self._ref[...], FixedLossScale(jnp.ones([])))
        return fixed

    def gradient_scale(self, of_state: LossScale) -> jax.Array:
        """Return the scale at which the gradients of the current update were computed."""
        return self.read()()

    def write(self, loss_scale: LossScale) -> None:
        """Store the scale of the next step."""
        self._ref[...] = _unbatched(jnp.asarray(loss_scale(), jnp.float32))


@jax.custom_batching.custom_vmap
def _unbatched(scale: jax.Array) -> jax.Array:
    """Return the scale, or raise a `ValueError` if it is batched by `jax.vmap`."""
    return scale


@_unbatched.def_vmap
def _raise_error(axis_size: int, in_batched: Any, scale: jax.Array) -> NoReturn:
    # JAX also calls this function if `jax.vmap` is applied to a loop whose body contains the update.
    raise ValueError(
        "Inside `jax.vmap`, `MixedPrecision` cannot store the loss scale without `MixedPrecision.step`. "
        f"{_USE_STEP} If the training step is the body of a loop, such as `jax.lax.scan`, wrap this body."
    )


class SharedLossScale:
    """The loss scale that the loss function and the optimizer of a `MixedPrecision` share.

    The method `source` returns the object that contains the current loss scale:

    - a `_KnownScale`, if the loss scale contains no arrays, or inside a function returned by `MixedPrecision.step`;
    - otherwise, the only `_StoredScale`, which is created when it is needed for the first time.

    Attributes:
      initial: the loss scale of the first step.
      is_read: whether a function returned by `MixedPrecision.loss` was called or traced.
      is_initialized: whether ``init`` of the optimizer was called or traced.
    """

    def __init__(self, initial: LossScale, mesh: Mesh | None) -> None:
        self.initial = initial
        self.is_read = False
        self.is_initialized = False
        constant = None if jax.tree.leaves(jax.eval_shape(lambda: initial)) else _KnownScale(initial)
        self._known: contextvars.ContextVar[_KnownScale | None] = contextvars.ContextVar("known", default=constant)
        self._stored: _StoredScale | None = None
        # The devices for a new `_StoredScale`, or `None` if they are not known yet.
        self._placement: Mesh | jax.Device | None = mesh

    def source(self, method: str, arguments: Any) -> _KnownScale | _StoredScale:
        """Return the object that contains the current loss scale.

        Args:
          method: the calling method of `MixedPrecision`, for error messages.
          arguments: the arguments of the method, which determine the devices if they are on a mesh.

        Raises:
          ValueError: if the method is called inside `jax.pmap` or `jax.shard_map`, if the number of devices differs
            from that of the stored scale, or if the devices of the step cannot be determined.
        """
        # A known scale does not need a reference, so it can also be used inside `jax.pmap` and `jax.shard_map`.
        known = self._known.get()
        if known is not None:
            return known
        # The scale is stored in a reference. JAX adds this reference to the arguments of the compiled step, so the
        # reference must be on the devices of the step. These devices are the mesh of `jax.set_mesh`, if it was called,
        # and otherwise the mesh of the arguments.
        context = jax.sharding.get_abstract_mesh()
        if context.manual_axes:
            raise ValueError(
                f"`MixedPrecision.{method}` was called inside `jax.pmap` or `jax.shard_map` (axes "
                f"{', '.join(map(repr, context.manual_axes))}), where JAX does not support references. {_USE_STEP}"
            )
        mesh = _mesh_of(arguments) if context.empty else context
        if self._stored is None:
            self._stored = self._new_stored_scale(mesh, is_context=not context.empty)
        elif mesh is not None and mesh.size != self._stored.num_devices:
            raise ValueError(
                f"`MixedPrecision.{method}` was called with a mesh of {mesh.size} devices, but the loss "
                f"scale is stored on {self._stored.num_devices}. {_PASS_MESH}"
            )
        return self._stored

    @contextlib.contextmanager
    def set_to(self, loss_scale: LossScale) -> Iterator[None]:
        """Make `source` return a `_KnownScale` that contains ``loss_scale`` within the ``with`` block."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(loss_scale))
        token = self._known.set(_KnownScale(loss_scale))
        try:
            # JAX must not reuse a function that was traced in another step, because it contains the tracers of that
            # step. If a step is being traced, it therefore enters the context with a new object. Otherwise, all steps
            # use the same compiled functions.
            with _in_step(object() if is_traced else self):
                yield
        finally:
            self._known.reset(token)

    def place_like(self, params: Any) -> None:
        """If the parameters are committed to devices, select the mesh or the device of the first committed leaf.

        This has no effect after the scale has been stored. A single device is ignored if it does not belong to the
        default backend, because parameters that were created on the CPU, for example, are usually moved to the
        accelerator before the first step.
        """
        if isinstance(self._placement, Mesh):
            return
        arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and is_concrete_array(leaf)]
        committed = [array for array in arrays if array.committed]
        mesh = _mesh_of(committed)
        if isinstance(mesh, Mesh):
            self._placement = mesh
        elif committed and len(committed[0].devices()) == 1:
            (device,) = committed[0].devices()
            self._placement = device if device.platform == jax.default_backend() else None

    def _new_stored_scale(self, mesh: _AnyMesh | None, is_context: bool) -> _StoredScale:
        """Store the initial scale, outside of all transformations.

        Args:
          mesh: the mesh of the arguments or of the context, or ``None`` if there is none.
          is_context: whether the mesh was set with `jax.set_mesh`.
        """
        with jax.core.eval_context(), jax.transfer_guard("allow"):
            # Under `jax.set_mesh`, the results of a compiled function are placed on all devices of the mesh.
            scale = jax.jit(lambda: jnp.asarray(self.initial(), jnp.float32))()
            return _StoredScale(scale if is_context else jax.device_put(scale, self._device_or_sharding(mesh)))

    def _device_or_sharding(self, mesh: _AnyMesh | None) -> jax.Device | NamedSharding | None:
        """Return the device or the sharding of the stored scale, or ``None`` for the default device.

        The mesh of the arguments may be an abstract mesh, which determines only the number of devices. If a mesh of the
        same size is known from the argument ``mesh`` of `MixedPrecision` or from the parameters, it takes precedence
        over the mesh of the arguments. If no mesh is known, an abstract mesh must contain all devices.
        """
        known = self._placement
        if mesh is None:
            return NamedSharding(known, PartitionSpec()) if isinstance(known, Mesh) else known
        if isinstance(known, Mesh) and known.size == mesh.size:
            mesh = known
        elif not isinstance(mesh, Mesh):
            if mesh.size != jax.device_count():
                raise ValueError(
                    f"`MixedPrecision` cannot determine the {mesh.size} devices of the training step. {_PASS_MESH}"
                )
            mesh = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
        return NamedSharding(mesh, PartitionSpec())


def _mesh_of(arguments: Any) -> _AnyMesh | None:
    """Return the mesh of the first array that is on several devices, or ``None`` if there is no such array."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    shardings = [array.sharding if is_concrete_array(array) else jax.typeof(array).sharding for array in arrays]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return next((mesh for mesh in meshes if mesh.size > 1), None)
