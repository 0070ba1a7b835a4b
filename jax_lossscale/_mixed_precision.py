"""`MixedPrecision`: float16 training in trainers that compute the gradients and apply the optimizer themselves.

In a trainer that computes the gradients itself, the loss function and the optimizer have no argument in common, but
they must use the same loss scale. The loss scale is therefore stored in references (`jax.Ref`), which JAX adds to the
arguments of every compiled function that uses them. References cannot be used in `jax.pmap` or `jax.shard_map`. In
these transformations, `MixedPrecision.step` finds the loss scale in the arguments of the training step and makes it
available to the loss function while the step is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ClassVar, NoReturn, TypeVar

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
from jax_lossscale._gradients.warn import is_frozen
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.lookup import find_one, unwrapped
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
      mesh: the devices of the training step. The mesh is needed only if the step runs on several devices,
        `jax.set_mesh` is not used, and the parameters are not yet on these devices in ``mp.optimizer.init``, for
        example because ``init`` is called inside `jax.jit`. If the mesh is missing, JAX raises the error "Received
        incompatible devices for jitted computation".

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

    **Details.** The loss scale is stored twice: in the state of the optimizer, and in references that ``mp.loss``
    reads. Each update continues from the loss scale at which the gradients were computed, and writes the next loss
    scale to both places.

    - **Restart.** After a restart, ``mp.loss`` uses the initial scale until the first update, and the scale of the
      restored state afterwards. The gradients are unscaled, so they do not depend on the scale, unless they overflow or
      are rounded to zero at the initial scale. This can only affect the first step.
    - **Both lines.** A warning is emitted if ``mp.optimizer.update`` is called before any function returned by
      ``mp.loss``.
    - **One object per optimizer.** ``mp.optimizer.init`` can be called several times. However, all states of one object
      share one loss scale. Use one `MixedPrecision` for each optimizer whose loss function is different.
    - **Evaluation.** ``mp.loss(fun)`` can be called outside of a training step, on the same devices. While a step runs
      in one thread, do not call ``mp.loss(fun)`` in another thread, because the step replaces the references. Use
      `autocast` in the other thread. Also use `autocast` to export a function for inference, because `jax.export` does
      not support references.
    - **Other transformations.** After an overflow, the transformations around ``mp.optimizer`` receive non-finite
      gradients. `optax.MultiSteps` never recovers from them, and `optax.clip` replaces infinities with finite numbers,
      so that the overflow is not noticed. Pass such transformations as part of ``optimizer``, for example
      ``jls.MixedPrecision(optax.MultiSteps(optax.adamw(3e-4), 4))``.
    - **Float32 parameters.** Use float32 parameters. `autocast` casts them to float16 where possible. It does not
      change operations on bfloat16 values. The gradients of float16 parameters are float16 arrays, so small unscaled
      gradients are rounded to zero. ``mp.optimizer.init`` warns about float16 parameters. If ``dtype`` is float16, it
      also warns if all parameters are bfloat16.
    - **Compilation.** The results of a function that uses references are always committed to a device. If the arguments
      of the training step are not committed, JAX compiles the step in the first and in the second call. To avoid this,
      call ``params, opt_state = jax.device_put((params, opt_state), device)`` before the first step.
    - **Devices.** The references are created on the devices of ``mesh``, of the parameters in ``mp.optimizer.init``, or
      of the mesh of `jax.set_mesh`, whichever is known first. They cannot be moved, so use one object on one device or
      one mesh only.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        loss_scale: Any = "auto",
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

    def loss(self, fun: _Function) -> _Function:
        """Return a function that computes the values and gradients of ``fun`` in half precision.

        Args:
          fun: the loss function of the trainer, or any other function that the trainer differentiates. The loss
            function can have auxiliary outputs. The supported arguments are described in `autocast` and
            `scaled_backward`.

        Returns:
          A function with the signature of ``fun``. The returned function evaluates ``fun`` under `autocast`. Its
          backward pass runs at the current loss scale, and its gradients are unscaled.

        Raises:
          ValueError: if ``fun`` is not callable. The returned function raises a `ValueError` if it is called in
            `jax.pmap` or `jax.shard_map` and the training step is not wrapped in `step`.
        """
        check_function(fun, "MixedPrecision.loss(fun=...)")
        half = autocast(fun, self._dtype, policy=self._policy)

        @wraps(fun)
        def loss(*args: Any, **kwargs: Any) -> Any:
            return scaled_backward(half, self._shared.read())(*args, **kwargs)

        return loss  # type: ignore[return-value]

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
            found: LossScale = find_one((args, kwargs), LossScale, name, path)  # type: ignore[type-abstract]
            with self._shared.set_to(unwrapped(found)):
                return train_step(*args, **kwargs)

        return step  # type: ignore[return-value]

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an `AttributeError` that suggests `mp.optimizer` if the object is used as an optimizer."""
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


class _SharedLossScale:
    """The loss scale shared by the loss function and the optimizer of a `MixedPrecision`."""

    def __init__(self, initial: LossScale, mesh: Mesh | None) -> None:
        self._initial = initial
        self._of_step: contextvars.ContextVar[LossScale | None] = contextvars.ContextVar("of_step", default=None)
        self._references: list[Any] | None = None
        self._device: Any = None
        self.is_read = False  # whether a function returned by `MixedPrecision.loss` was called or traced
        if mesh is not None:
            self._create_references(mesh)

    def read(self) -> LossScale:
        """Return the loss scale for a backward pass."""
        self.is_read = True
        of_step = self._of_step.get()
        if of_step is None:
            return self._initial if not self._leaves() else self._loss_scale(self._refs("loss")[1:])
        if is_frozen(of_step):
            raise ValueError(
                "`MixedPrecision.step(train_step=...)` got a compiled function, in which the loss scale would be a "
                "constant. Wrap the function before it is compiled: `jax.jit(mp.step(train_step))`."
            )
        return of_step

    def of_gradients(self, of_state: LossScale) -> LossScale:
        """Return the loss scale that an update of the optimizer uses and then adjusts.

        After the first update, the shared loss scale, at which the gradients were computed, is returned. Before the
        first update, the loss scale in the optimizer state is returned, because the state may have been restored from a
        checkpoint.
        """
        if self._of_step.get() is not None or not self._leaves():
            return of_state
        if len({jax.tree.structure(loss_scale) for loss_scale in (of_state, self._initial)}) > 1:
            raise ValueError(
                f"`MixedPrecision(loss_scale={self._initial!r})` got a state with a different loss scale, "
                f"{of_state!r}. Pass this loss scale to `MixedPrecision`."
            )
        is_written, *references = self._refs("optimizer.update")
        shared = self._loss_scale(references)
        return jax.tree.map(lambda a, b: jnp.where(is_written[...], a, b), shared, of_state)

    def write(self, loss_scale: LossScale) -> None:
        """Store the loss scale for the next step."""
        if self._of_step.get() is not None or not self._leaves():
            return
        values = [True, *jax.tree.leaves(loss_scale)]
        for reference, value in zip(self._refs("optimizer.update"), values, strict=True):
            try:
                reference[...] = jnp.asarray(value, reference.dtype)
            except Exception as error:  # JAX raises a plain `Exception` inside `jax.vmap` and during differentiation.
                raise ValueError(
                    "Inside a JAX transformation such as `jax.vmap`, `MixedPrecision` cannot store the loss scale "
                    f"without `MixedPrecision.step`. {_USE_STEP}"
                ) from error

    def place_like(self, params: Any) -> None:
        """If the parameters are committed to devices, choose these devices for the references (`jax.Ref`).

        The CPU is ignored if there is an accelerator, because parameters that were created on the CPU are usually moved
        to the accelerator before the first step.
        """
        arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and is_concrete_array(leaf)]
        shardings = [array.sharding for array in arrays if array.committed]
        meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
        if self._references is not None or not shardings:
            return
        if meshes and meshes[0].size > 1:
            self._create_references(meshes[0])
        elif len(shardings[0].device_set) == 1:
            device: Any = next(iter(shardings[0].device_set))
            self._device = device if device.platform == jax.default_backend() else None

    @contextlib.contextmanager
    def set_to(self, loss_scale: LossScale) -> Iterator[None]:
        """Inside the ``with`` block, use ``loss_scale`` and ignore the loss scale that is stored in the references."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(loss_scale))
        token = self._of_step.set(loss_scale)
        try:
            # Each trace of a step has its own tracers. Without tracers, all steps use the same compiled functions.
            with _in_step(object() if is_traced else self):
                yield
        finally:
            self._of_step.reset(token)

    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self._initial)

    def _loss_scale(self, references: list[Any]) -> LossScale:
        loss_scale: LossScale = jax.tree.unflatten(
            jax.tree.structure(self._initial), [reference[...] for reference in references]
        )
        return loss_scale

    def _refs(self, method: str) -> list[Any]:
        """Return a reference to a flag (whether an update was performed), and the references to the loss scale."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes:
            raise ValueError(
                f"`MixedPrecision.{method}` was called inside `jax.pmap` or `jax.shard_map` (axes "
                f"{', '.join(map(repr, mesh.manual_axes))}), where JAX does not support references. {_USE_STEP}"
            )
        if self._references is None:
            return self._create_references(mesh)
        if not mesh.empty and mesh.shape_tuple != self._mesh.shape_tuple:
            raise ValueError(
                f"`MixedPrecision.{method}` was called under the mesh {mesh.shape_tuple}, but was first used under "
                f"{self._mesh.shape_tuple or 'no mesh'}. Create a new `MixedPrecision` for each mesh."
            )
        return self._references

    def _create_references(self, mesh: Any) -> list[Any]:
        """Create the references that store the loss scale on the devices of a mesh, outside of all transformations."""
        if not hasattr(jax, "new_ref"):
            raise RuntimeError(f"`MixedPrecision` requires jax 0.7.2 or newer, got {jax.__version__}. {_USE_STEP}")
        leaves = self._leaves()
        with jax.core.eval_context(), jax.transfer_guard("allow"):
            # Under `jax.set_mesh`, the results of a compiled function are placed on all devices of the mesh.
            initial = jax.jit(lambda: [jnp.array(leaf, jnp.result_type(leaf)) for leaf in (False, *leaves)])()
            if isinstance(mesh, Mesh):
                initial = jax.device_put(initial, NamedSharding(mesh, PartitionSpec()))
            elif mesh.empty:
                initial = jax.device_put(initial, self._device)
            self._references = list(map(_compat.new_ref, initial))
        self._mesh = mesh
        return self._references

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a `TypeError`, because a copy would not share the loss scale."""
        raise TypeError("The optimizer of a `MixedPrecision` cannot be pickled, because the two share a loss scale.")


@dataclasses.dataclass(frozen=True, eq=False)
class _UnscaledWrapper(Wrapper):
    """An optimizer that takes unscaled gradients and shares its loss scale with the loss function."""

    takes_scaled_gradients: ClassVar[bool] = False

    shared: _SharedLossScale
    dtype: np.dtype[Any]

    def __repr__(self) -> str:
        return f"MixedPrecision.optimizer({self.initial_loss_scale!r})"

    def init(self, params: optax.Params) -> LossScaledState:
        """Return the state before the first step and create the shared loss scale on the devices of the parameters."""
        if self.initial_loss_scale.skip_nonfinite:
            _warn_if_in_multi_steps()
        if self.dtype == jnp.float16:
            _warn_if_all_bfloat16(params)
        self.shared.place_like(params)
        return super().init(params)

    def _step(
        self, applies: bool, extra_args: Any, grads: Any, state: LossScaledState, params: Any, inputs: Any
    ) -> Any:
        state = state._replace(loss_scale=self.shared.of_gradients(state.loss_scale))
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(grads))
        if is_traced and not self.shared.is_read:
            warn_user(
                "`MixedPrecision.optimizer` is used, but no function returned by `MixedPrecision.loss` has been called "
                "so far. Pass `mp.loss(loss_fn)` from the same `MixedPrecision` object to the trainer. Otherwise, the "
                "gradients are computed without a loss scale."
            )
        result, state = super()._step(applies, extra_args, grads, state, params, inputs)
        self.shared.write(state.loss_scale)
        return result, state


def _warn_if_all_bfloat16(params: optax.Params) -> None:
    """Warn if all floating-point parameters are bfloat16, because `autocast` converts only float32 values.

    There is no warning if only some of the parameters are bfloat16, such as the frozen base of float32 adapters.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(params)
    arrays = [(path, leaf) for path, leaf in with_paths if _tree.is_array(leaf) and _tree.is_inexact(leaf)]
    if arrays and all(leaf.dtype == jnp.bfloat16 for _, leaf in arrays):
        warn_user(
            f"`init(params)` got only bfloat16 parameters ({len(arrays)}, the first at "
            f"{jax.tree_util.keystr(arrays[0][0])!r}). Their matrix multiplications are not computed in float16, "
            "unless the model casts the parameters to float32, because `MixedPrecision` converts only float32 values. "
            "Updates that are smaller than 1/512 of a bfloat16 parameter are lost. Load the parameters in float32, or "
            "cast them with `params = jls.cast_floating(params, jnp.float32)`. To train in bfloat16, use "
            "`MixedPrecision(optimizer, None, dtype=jnp.bfloat16)`."
        )


def _warn_if_in_multi_steps() -> None:
    """Warn if a method of `optax.MultiSteps` is on the call stack.

    The stack is searched because `optax.MultiSteps` calls ``init`` without any argument that identifies the caller.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            warn_user(
                "`MixedPrecision.optimizer` is inside `optax.MultiSteps`, which never recovers from an overflow: it "
                "multiplies the accumulated gradients by zero, and infinity times zero is NaN. Turn off the gradient "
                "accumulation of the trainer, and use `mp = MixedPrecision(optax.MultiSteps(optimizer, ...))`, so that "
                "`optax.MultiSteps` is inside `mp.optimizer`."
            )
            return
        frame = frame.f_back
