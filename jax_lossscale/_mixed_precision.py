"""`MixedPrecision`: float16 training in trainers that compute the gradients and apply the optimizer themselves.

In a trainer that computes the gradients itself, the loss function and the optimizer have no argument in common, but
they must use the same loss scale. The current scale is therefore stored in a reference (`jax.Ref`), which JAX adds to
the arguments of every compiled function that uses it. References cannot be used in `jax.pmap` or `jax.shard_map`. In
these transformations, `MixedPrecision.step` finds the loss scale in the arguments of the training step and makes it
available to the loss function while the step is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_lossscale import _compat, _tree
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.transform import autocast, checked_half_precision, checked_policy
from jax_lossscale._check import check_function
from jax_lossscale._gradients.cotangent import is_frozen, warn_if_half
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._loss_scale.lookup import find_loss_scale
from jax_lossscale._loss_scale.registry import LossScaleLike
from jax_lossscale._measure import AxisName
from jax_lossscale._optax.branch import Skip
from jax_lossscale._optax.state import LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, checked_options
from jax_lossscale._optax.wrapper import Wrapper, is_concrete_array
from jax_lossscale._scaled_backward import scaled_backward
from jax_lossscale._warn import warn_user

_Function = TypeVar("_Function", bound=Callable[..., Any])

# `MixedPrecision.step` enters this context. Otherwise, JAX would reuse functions that it traced in another step, such
# as the argument of `jax.checkpoint`, although they contain the loss scale of that step.
_in_step = _compat.new_cache_context()

_USE_STEP = "Wrap the training step before it is compiled: `train_step = mp.step(train_step)`."

_PASS_MESH = "Create `MixedPrecision(optimizer, mesh=mesh)` with the mesh of the training step."


class MixedPrecision:
    """Half-precision training with a loss scale, in a trainer that computes the gradients itself.

    Pass ``mp.loss(loss_fn)`` to the trainer instead of the loss function, and ``mp.optimizer`` instead of the
    optimizer::

        mp = jls.MixedPrecision(optax.adamw(3e-4))
        trainer = Trainer(loss_fn=mp.loss(loss_fn), optimizer=mp.optimizer)

    The loss function is evaluated under `autocast`, and its backward pass runs at the current loss scale. The trainer
    receives only unscaled values: the loss, the auxiliary outputs and the gradients. The trainer can therefore log the
    gradients, clip them by their norm, or average them over micro-batches as usual. After an overflow, the gradients
    are not finite, and the optimizer skips the step and adjusts the loss scale.

    Inside `jax.pmap`, `jax.shard_map` and `jax.vmap`, and for `jax.export`, the training step needs a third line of
    code, because JAX does not support references there: ``trainer.train_step = mp.step(trainer.train_step)``.

    Args:
      optimizer: an optax transformation, or `optax.MultiSteps`.
      loss_scale: a loss scale, or any argument of `get`. The default ``"auto"`` is an `AutoLossScale`.
      dtype: float16 or bfloat16, the dtype of `autocast`. With float32, the function is not changed by `autocast`.
      policy: exceptions to the rule of `autocast`, a `PrecisionPolicy`.
      axis_name: as in `loss_scaled`.
      skip: as in `loss_scaled`.
      record_bad_steps: as in `loss_scaled`.
      mesh: the devices of the training step. The mesh is needed only if the step runs on several devices that are
        determined neither by `jax.set_mesh` nor by the parameters passed to ``mp.optimizer.init``. It is not needed if
        the arguments of the step are on all devices, in the order of `jax.make_mesh`.

    Attributes:
      optimizer: the `LossScaledTransformation` that takes unscaled gradients. Its state is a `LossScaledState`, so
        `metrics`, `raise_if_stuck`, `get_loss_scale` and `diagnostics.explain` accept it.

    Raises:
      ValueError: if an argument is not valid, as in `autocast` and `loss_scaled`.
      TypeError: if the object is copied or pickled. A copy of the object would no longer share its loss scale with the
        optimizer.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> def loss_fn(params, x):  # float16 alone would round all gradients to zero
      ...     return 1e-8 * jnp.mean((x @ params["w"] - 1) ** 2)
      >>> mp = jls.MixedPrecision(optax.adam(0.1, eps=1e-15))
      >>> def train(loss_fn, optimizer, params, x):  # the trainer, which computes the gradients itself
      ...     @jax.jit
      ...     def train_step(params, opt_state, x):
      ...         loss, grads = jax.value_and_grad(loss_fn)(params, x)
      ...         updates, opt_state = optimizer.update(grads, opt_state, params)
      ...         return optax.apply_updates(params, updates), opt_state, loss
      ...
      ...     opt_state = optimizer.init(params)
      ...     for _ in range(100):
      ...         params, opt_state, loss = train_step(params, opt_state, x)
      ...     return params, opt_state
      >>> params, x = {"w": jnp.zeros(2)}, jnp.eye(2)
      >>> params, opt_state = train(mp.loss(loss_fn), mp.optimizer, params, x)
      >>> jnp.round(params["w"], 1)
      Array([1., 1.], dtype=float32)
      >>> jls.metrics(opt_state)["skipped_steps"]
      Array(0, dtype=int32)

    The page "Trainers and libraries that compute gradients themselves" (docs/guide/libraries.md) describes restarts,
    several optimizers, wrappers of the optimizer, evaluation and compilation. The page "Many devices: multi-GPU, TPU"
    (docs/guide/devices.md) describes when ``mesh`` is needed.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        loss_scale: LossScaleLike = "auto",
        *,
        dtype: DTypeLike = jnp.float16,
        policy: PrecisionPolicy | None = None,
        axis_name: AxisName = None,
        skip: Skip = "auto",
        record_bad_steps: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self._dtype = checked_half_precision(dtype, "MixedPrecision(dtype=...)")
        self._policy = checked_policy(policy, "MixedPrecision(policy=...)")
        names = "MixedPrecision", "optimizer"
        options = checked_options(optimizer, loss_scale, axis_name, skip, record_bad_steps, names)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"`MixedPrecision(mesh=...)` must be a `jax.sharding.Mesh` or None, got {mesh!r}.")
        self._shared = _SharedLossScale(options["initial_loss_scale"], mesh)
        wrapper = _UnscaledWrapper(**options, shared=self._shared, dtype=self._dtype)
        self.optimizer = LossScaledTransformation(wrapper.init, wrapper.update)

    def loss(self, fun: _Function, *arguments: Never, **keywords: Never) -> _Function:
        """Return a function that computes the values and gradients of ``fun`` in half precision.

        Args:
          fun: the loss function of the trainer, or any other function that the trainer differentiates. The loss
            function can have auxiliary outputs. The supported arguments are described in `autocast` and
            `scaled_backward`.
          arguments: further arguments are not supported. If a trainer gets ``mp.loss`` instead of ``mp.loss(loss_fn)``,
            it calls `loss` with the arguments of a loss function. The error message then shows the fix.
          keywords: keyword arguments are not supported either.

        Returns:
          A function with the signature of ``fun``. The returned function evaluates ``fun`` under `autocast`. Its
          backward pass runs at the current loss scale, and its gradients are unscaled.

        Raises:
          TypeError: if `loss` is called with more than one argument.
          ValueError: if ``fun`` is not callable. The returned function raises a `ValueError` if it is called in
            `jax.pmap` or `jax.shard_map` and the training step is not wrapped in `step`.

        Warns:
          UserWarning: if the returned function is differentiated and ``mp.optimizer.init`` has not been called, or if
            the dtype of the loss cannot represent the largest value that the loss scale can reach.
        """
        fix = "Pass `mp.loss(loss_fn)` to the trainer instead of `mp.loss`."
        if arguments or keywords:
            raise TypeError(f"`MixedPrecision.loss` takes one argument, the loss function. {fix}")
        check_function(fun, "MixedPrecision.loss(fun=...)", fix)
        half = autocast(fun, self._dtype, policy=self._policy)

        @wraps(fun)
        def loss(*args: Any, **kwargs: Any) -> Any:
            self._shared.is_read = True
            loss_scale = self._shared.source("loss", (args, kwargs)).read()
            result = scaled_backward(half, loss_scale)(*args, **kwargs)
            warn_if_half(result, self._shared.initial)  # The reference contains only the current scale.
            return result if self._shared.is_initialized else self._with_warning(result)

        return loss  # type: ignore[return-value]

    def _with_warning(self, result: Any) -> Any:
        """Return ``result``, and emit a warning if it is differentiated before ``mp.optimizer.init`` is called."""
        if not self._shared.initial.skip_nonfinite:
            return result

        def warn(tangent: jax.Array, *_: jax.Array) -> jax.Array:
            if not self._shared.is_initialized:
                warn_user(
                    "A function returned by `MixedPrecision.loss` is differentiated, but `MixedPrecision.optimizer` "
                    "has not been initialized. Pass `mp.optimizer` from the same `MixedPrecision` object to the "
                    "trainer, because a plain optimizer does not skip steps whose gradients overflow. If the state of "
                    "`mp.optimizer` was restored without `mp.optimizer.init`, ignore this warning."
                )
            return tangent

        identity = jax.custom_jvp(lambda leaf: leaf)
        identity.defjvps(warn)
        return _tree.map_inexact(lambda leaves: list(map(identity, leaves)), result)

    def step(self, train_step: _Function, path: str | None = None) -> _Function:
        """Return a training step that finds the loss scale in its arguments and passes it to the loss function.

        Wrapping the training step is necessary only inside `jax.pmap`, `jax.shard_map` and `jax.vmap`, and for
        `jax.export`. Wrap the function before it is compiled. The function must perform only one update, because `loss`
        uses the same loss scale during the whole call. If the trainer compiles a loop over several steps, such as
        `jax.lax.scan`, wrap the body of the loop. Inside `jax.vmap`, also use `jax.jit`. Otherwise, JAX compiles every
        operation again on every call.

        Args:
          train_step: a function that computes the gradients and calls ``mp.optimizer.update``. The arguments of
            ``train_step`` must contain the optimizer state.
          path: the path of the optimizer state, for arguments that contain the states of several optimizers. The path
            refers to the tuple ``(args, kwargs)`` and has the format described in `get_loss_scale`.

        Returns:
          A function with the arguments and results of ``train_step``.

        Raises:
          ValueError: if ``train_step`` is not callable. The returned function raises a `ValueError` if its arguments
            contain no loss scale, if they contain several loss scales and ``path`` does not select one, or if
            ``train_step`` is already compiled.
        """
        check_function(train_step, "MixedPrecision.step(train_step=...)")
        name = "MixedPrecision.step(train_step)(...)"

        @wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._shared.set_to(find_loss_scale((args, kwargs), name, path)):
                return train_step(*args, **kwargs)

        return step  # type: ignore[return-value]

    # A type checker that sees this method would not report misspelled attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """If the object is used as an optimizer, raise an `AttributeError` that suggests `mp.optimizer`."""
            hint = ". Pass `mp.optimizer` instead of `mp` as the optimizer." if name in ("init", "update") else ""
            raise AttributeError(f"'MixedPrecision' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"MixedPrecision({self.optimizer!r}, dtype={self._dtype.name})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a `TypeError`, because a copy would not share the loss scale."""
        raise TypeError(
            "`MixedPrecision` cannot be copied or pickled, because its loss function and its optimizer share one loss "
            "scale. Create a new object, and restore the state of the optimizer from a checkpoint."
        )


class _Value:
    """A loss scale that is known when the step is traced. Therefore, no `_Reference` is needed.

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


class _Reference:
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


class _SharedLossScale:
    """The loss scale that the loss function and the optimizer of a `MixedPrecision` share.

    The method `source` returns the object that contains the current loss scale:

    - a `_Value`, if the loss scale contains no arrays, or inside a function returned by `MixedPrecision.step`;
    - otherwise, the only `_Reference`, which is created when it is needed for the first time.

    Attributes:
      initial: the loss scale of the first step.
      is_read: whether a function returned by `MixedPrecision.loss` was called or traced.
      is_initialized: whether ``init`` of the optimizer was called or traced.
    """

    def __init__(self, initial: LossScale, mesh: Mesh | None) -> None:
        self.initial = initial
        self.is_read = False
        self.is_initialized = False
        constant = None if jax.tree.leaves(jax.eval_shape(lambda: initial)) else _Value(initial)
        self._value: contextvars.ContextVar[_Value | None] = contextvars.ContextVar("value", default=constant)
        self._reference: _Reference | None = None
        self._placement: Any = mesh  # the mesh or the device for a new reference, or `None` if it is not known

    def source(self, method: str, arguments: Any) -> _Value | _Reference:
        """Return the object that contains the current loss scale.

        Args:
          method: the calling method of `MixedPrecision`, for error messages.
          arguments: the arguments of the method, whose mesh is used for the reference.

        Raises:
          RuntimeError: if JAX is older than 0.7.2.
          ValueError: if the method is called inside `jax.pmap` or `jax.shard_map`, if the number of devices differs
            from that of the reference, or if the devices of the step cannot be determined.
        """
        value = self._value.get()
        if value is not None:
            return value
        context = jax.sharding.get_abstract_mesh()
        if context.manual_axes:
            raise ValueError(
                f"`MixedPrecision.{method}` was called inside `jax.pmap` or `jax.shard_map` (axes "
                f"{', '.join(map(repr, context.manual_axes))}), where JAX does not support references. {_USE_STEP}"
            )
        mesh = _mesh_of(arguments) if context.empty else context
        if self._reference is None:
            self._reference = self._new_reference(mesh, is_context=not context.empty)
        elif mesh is not None and mesh.size != self._reference.num_devices:
            raise ValueError(
                f"`MixedPrecision.{method}` was called with a mesh of {mesh.size} devices, but the loss "
                f"scale is stored on {self._reference.num_devices}. {_PASS_MESH}"
            )
        return self._reference

    @contextlib.contextmanager
    def set_to(self, loss_scale: LossScale) -> Iterator[None]:
        """Make `source` return a `_Value` that contains ``loss_scale`` within the ``with`` block."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(loss_scale))
        token = self._value.set(_Value(loss_scale))
        try:
            # JAX must not reuse a function that was traced in another step, because it contains the tracers of that
            # step. Each step with tracers therefore enters the context with a new object. Without tracers, all steps
            # use the same compiled functions.
            with _in_step(object() if is_traced else self):
                yield
        finally:
            self._value.reset(token)

    def place_like(self, params: Any) -> None:
        """If the parameters are committed to devices, select their mesh or the device of the first committed leaf.

        This has no effect after the reference has been created. A single device is ignored if it does not belong to the
        default backend. For example, parameters that were created on the CPU are usually moved to the accelerator
        before the first step.
        """
        if isinstance(self._placement, Mesh):
            return
        arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and is_concrete_array(leaf)]
        committed = [array for array in arrays if array.committed]
        mesh = _mesh_of(committed)
        if mesh is not None:
            self._placement = mesh
        elif committed and len(committed[0].devices()) == 1:
            (device,) = committed[0].devices()
            self._placement = device if device.platform == jax.default_backend() else None

    def _new_reference(self, mesh: Any, is_context: bool) -> _Reference:
        """Create the reference outside of all transformations.

        Args:
          mesh: the mesh of the arguments or of the context, or ``None`` if there is none.
          is_context: whether the mesh was set with `jax.set_mesh`.
        """
        if not hasattr(jax, "new_ref"):
            raise RuntimeError(f"`MixedPrecision` requires jax 0.7.2 or newer, got {jax.__version__}. {_USE_STEP}")
        with jax.core.eval_context(), jax.transfer_guard("allow"):
            # Under `jax.set_mesh`, the results of a compiled function are placed on all devices of the mesh.
            scale = jax.jit(lambda: jnp.asarray(self.initial(), jnp.float32))()
            return _Reference(scale if is_context else jax.device_put(scale, self._device_or_sharding(mesh)))

    def _device_or_sharding(self, mesh: Any) -> Any:
        """Return the device or the sharding of the reference, or ``None`` for the default device.

        The mesh of the arguments may be an abstract mesh, which determines only the number of devices. A mesh of the
        same size that is known from the argument ``mesh`` of `MixedPrecision` or from the parameters takes precedence
        over any mesh of the arguments. Without a known mesh, an abstract mesh must contain all devices.
        """
        known = self._placement
        if mesh is None or (isinstance(known, Mesh) and known.size == mesh.size):
            mesh = known
        elif not isinstance(mesh, Mesh):  # Traced arrays have an abstract mesh without devices.
            if mesh.size != jax.device_count():
                raise ValueError(
                    f"`MixedPrecision` cannot determine the {mesh.size} devices of the training step. {_PASS_MESH}"
                )
            mesh = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
        return NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else mesh


def _mesh_of(arguments: Any) -> Any:
    """Return the mesh of the first array that is on several devices, or ``None`` if there is no such array."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    shardings = [array.sharding if is_concrete_array(array) else jax.typeof(array).sharding for array in arrays]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return next((mesh for mesh in meshes if mesh.size > 1), None)


@dataclasses.dataclass(frozen=True, eq=False)
class _UnscaledWrapper(Wrapper):
    """An optimizer that takes unscaled gradients and shares its loss scale with the loss function."""

    takes_scaled_gradients: ClassVar[bool] = False

    shared: _SharedLossScale
    dtype: np.dtype[Any]

    def __repr__(self) -> str:
        return f"MixedPrecision.optimizer({self.initial_loss_scale!r})"

    def init(self, params: optax.Params) -> LossScaledState:
        """Return the state before the first step and record the devices for the shared loss scale."""
        self.shared.is_initialized = True
        self.shared.place_like(params)
        return super().init(params)

    def _warn(self, params: optax.Params, rounds_params: bool) -> None:
        """Warn about float16 parameters, and about models with only bfloat16 parameters.

        `autocast` converts only float32 values. There is no warning if only some of the parameters (such as a frozen
        base with float32 adapters) are bfloat16, or if the optimizer contains a wrapper that trains 16-bit parameters.
        """
        super()._warn(params, rounds_params)
        with_paths = jax.tree_util.tree_leaves_with_path(params)
        arrays = [(path, leaf) for path, leaf in with_paths if _tree.is_array(leaf) and _tree.is_inexact(leaf)]
        in_bfloat16 = bool(arrays) and all(leaf.dtype == jnp.bfloat16 for _, leaf in arrays)
        if self.dtype == jnp.float16 and in_bfloat16 and not rounds_params:
            warn_user(
                f"`init(params)` got only bfloat16 parameters ({len(arrays)}, the first at "
                f"{jax.tree_util.keystr(arrays[0][0])!r}). `MixedPrecision` converts only float32 values, so "
                "matrix multiplications with bfloat16 parameters are computed in float16 only if the model casts "
                "these parameters to float32. Updates that are smaller than 1/512 of a bfloat16 parameter are lost. "
                "Load the parameters in float32, or cast them with `params = jls.cast_floating(params, jnp.float32)`. "
                "To train bfloat16 parameters without losing updates, use "
                "`MixedPrecision(jls.master_weights(optimizer), None, dtype=jnp.bfloat16)` instead."
            )

    def _step(
        self, applies: bool, extra_args: Any, grads: Any, state: LossScaledState, params: Any, inputs: Any
    ) -> Any:
        if not self.shared.is_read:
            warn_user(
                "`MixedPrecision.optimizer` is used, but no function returned by `MixedPrecision.loss` has been called "
                "so far. Pass `mp.loss(loss_fn)` from the same `MixedPrecision` object to the trainer. Otherwise, the "
                "gradients are computed without a loss scale."
            )
        result, state = super()._step(applies, extra_args, grads, state, params, inputs)
        self.shared.source("optimizer.update", grads).write(state.loss_scale)
        return result, state

    def _gradient_scale(self, grads: optax.Updates, loss_scale: LossScale) -> jax.Array | None:
        return self.shared.source("optimizer.update", grads).gradient_scale(loss_scale)
