"""`Wrapper`: the methods ``init``, ``update`` and ``update_and_apply`` of a `loss_scaled` optimizer.

The methods of `Wrapper` check their arguments, replace the parameters that are not trained with ``None``, and call a
common function that computes the step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_bool_scalar, did_you_mean, is_number, shown
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._measure import AxisName
from jax_lossscale._optax.decision import Skip, StepInputs, check, decide, run_or_skip
from jax_lossscale._optax.inner import check_rounding_is_last, paths_with_state, rounds_parameters, with_dtypes_of
from jax_lossscale._optax.partition import combine, only_trained, updates_of_untrained
from jax_lossscale._optax.state import LossScaledState, check_state, initial_state, next_state
from jax_lossscale._warn import warn_user

_Stepped = tuple[chex.ArrayTree, LossScaledState]


class StepArguments(NamedTuple):
    """The arguments of ``update`` or ``update_and_apply``."""

    extra_args: dict[str, Any]  # the arguments for the inner optimizer
    grads: optax.Updates
    state: LossScaledState
    params: optax.Params | None
    inputs: StepInputs  # the optional arguments on which the decision about the step depends


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper:
    """An inner optimizer with the options of `loss_scaled`, and the methods of the resulting transformation.

    A subclass can support unscaled gradients, or gradients that were computed at a different scale than the scale in
    the state. Such a subclass overrides the class attributes and the methods `_divisor`, `_gradient_scale` and `_note`.
    """

    function: ClassVar[str] = "loss_scaled"  # the function that creates the wrapper, for error messages
    argument: ClassVar[str] = "inner"  # the argument of this function that contains the inner optimizer

    inner: optax.GradientTransformationExtraArgs
    initial_loss_scale: LossScale  # the loss scale of the first step
    axis_name: AxisName  # the axes over which devices agree on whether to skip a step
    skip: Skip  # how a step is skipped, as in `loss_scaled`
    record_bad_steps: bool  # whether the state contains a `BadStep`

    def __repr__(self) -> str:
        return f"loss_scaled({self.initial_loss_scale!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        """Return the wrapper itself, so that a copy of a train state uses the step that is already compiled."""
        return self

    def init(self, params: optax.Params) -> LossScaledState:
        """Return the state before the first step. ``params`` contains arrays or `jax.ShapeDtypeStruct` objects."""
        _tree.check_tree(params, "init(params=...)")
        self._check_not_masked("init(params=...)", params, self.initial_loss_scale)
        trained = _tree.inexact_only(params)
        inner_state = self.inner.init(trained) if any(map(_tree.is_half, jax.tree.leaves(trained))) else None
        if not rounds_parameters(inner_state):
            inner_state = self.inner.init(_widened(trained, self.initial_loss_scale))
        if _tree.instances(inner_state, LossScale):
            raise ValueError(
                f"`{self.function}({self.argument}=...)` already contains a `loss_scaled`, so the gradients would be "
                "unscaled twice. Wrap the complete optimizer once."
            )
        check_rounding_is_last(inner_state, f"{self.function}({self.argument}=...)")
        self._warn(params, inner_state)
        return initial_state(self.initial_loss_scale, inner_state, self.record_bad_steps)

    def _warn(self, params: optax.Params, inner_state: optax.OptState) -> None:
        """Warn about 16-bit parameters whose updates or gradients would be lost.

        Such parameters may be unintentional, because some layers create their parameters in the dtype of their first
        input. Parameters for which the inner state contains no array, such as frozen parameters, are ignored.
        """
        with_paths = jax.tree_util.tree_leaves_with_path(params)
        half = [(path, leaf.dtype.name) for path, leaf in with_paths if _tree.is_half(leaf)]
        rounds_params = rounds_parameters(inner_state)
        trained = set() if rounds_params or not half else paths_with_state(inner_state)
        losing_updates = [(path, dtype) for path, dtype in half if tuple(map(str, path)) in trained]
        # The gradients of float16 parameters are float16 arrays. If they are unscaled, they may have underflowed.
        are_unscaled = self._divisor(self.initial_loss_scale) is None and self.initial_loss_scale.checks_gradients
        underflowing = [(path, dtype) for path, dtype in half if are_unscaled and dtype == "float16"]
        found = underflowing or losing_updates
        if not found:
            return
        path, dtype = found[0]
        problems, fix = [], "Use bfloat16 or float32 parameters"
        if not rounds_params:
            share = {"bfloat16": 512, "float16": 4096}[dtype]
            problems.append(f"updates that are smaller than 1/{share} of a parameter are lost")
            fix = (
                f"To train {'bfloat16' if underflowing else '16-bit'} parameters without losing updates, wrap the "
                "optimizer in `jls.master_weights` or `jls.stochastic_rounding`. Otherwise, cast the parameters to "
                "float32 with `params = jls.cast_floating(params, jnp.float32)`"
            )
        if underflowing:
            problems.append("unscaled gradients below 3e-8 are rounded to zero")
        number = sum(other == dtype for _, other in found)
        warn_user(
            f"`init(params)` got {number} {dtype} parameters, the first at {jax.tree_util.keystr(path)!r}, so "
            f"{', and '.join(problems)}. {fix}. {self._note(dtype)}If the parameters are in {dtype} by mistake, "
            "initialize the layers with a float32 input, because some layers create parameters in the dtype of their "
            "input."
        )

    def _note(self, dtype: str) -> str:
        """Return an additional sentence for the warning about 16-bit parameters, followed by a space, or ""."""
        return ""

    def update(
        self,
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        """Return the updates of the inner optimizer (zeros in a skipped step) and the new state; see `loss_scaled`."""
        arguments = StepArguments(extra_args, updates, state, params, StepInputs(value, skip_if, grads_finite))
        new_updates, state = self._checked_step("update", "updates", arguments)
        return combine(new_updates, lambda: updates_of_untrained(updates, params)), state

    def update_and_apply(self, arguments: StepArguments) -> tuple[optax.Params, LossScaledState]:
        """Return the updated parameters and the new state; see `LossScaledTransformation.update_and_apply`."""
        if arguments.params is None:
            raise ValueError(
                "`update_and_apply(params=...)` must be the parameters, got None. To compute updates without "
                "parameters, use `update`."
            )
        _tree.check_tree(arguments.params, "update_and_apply(params=...)")
        new_params, state = self._checked_step("update_and_apply", "scaled_grads", arguments)
        return combine(new_params, lambda: arguments.params), state

    def _check_gradients(
        self, name: str, grads: optax.Updates, params: optax.Params | None, loss_scale: LossScale
    ) -> None:
        """Raise a `ValueError` if ``grads`` is not a pytree, has a masked leaf, or is a pair ``(value, grads)``."""
        _tree.check_tree(grads, name)
        self._check_not_masked(name, grads, loss_scale)
        if params is None or not isinstance(grads, tuple) or len(grads) != 2:
            return
        loss = grads[0][0] if isinstance(grads[0], tuple) and len(grads[0]) == 2 else grads[0]
        if is_number(loss) and len({jax.tree.structure(tree) for tree in (grads[1], params)}) == 1:
            raise ValueError(
                f"`{name}` must be the gradients, got a tuple of the value and the gradients. If you compute "
                "`value, grads = value_and_scaled_grad(...)(params)`, pass only `grads`."
            )

    def _check_keyword_arguments(self, method: str, inputs: StepInputs, extra_args: dict[str, Any]) -> None:
        """Raise a `ValueError` that names the method and the argument if an optional or extra argument is not valid."""
        if inputs.value is not None and not is_number(inputs.value):
            raise ValueError(
                f"`{method}(value=...)` must be a real scalar, the unscaled loss, got {shown(inputs.value)}. If your "
                "loss function returns `(loss, aux)`, pass only `loss`."
            )
        for name, flag in (("skip_if", inputs.skip_if), ("grads_finite", inputs.grads_finite)):
            if flag is not None:
                check_bool_scalar(flag, f"{method}({name}=...)")
        # The inner optimizer ignores arguments that it does not use, so a misspelled name would have no effect.
        for argument in extra_args:
            hint = did_you_mean(argument, StepInputs._fields)
            if hint and argument not in inspect.signature(self.inner.update).parameters:
                raise ValueError(f"`{method}` has no argument `{argument}`.{hint}")
        # `restore_from` is an argument of `interop.flax.Optimizer.update`. Here, it would have no effect.
        if "restore_from" in extra_args:
            raise ValueError(
                f"`{method}(restore_from=...)` is supported only by `jax_lossscale.interop.flax.Optimizer`. To restore "
                "other values after a skipped step, use `select_tree(state.consecutive_skips == 0, new, old)`."
            )

    def _check_not_masked(self, name: str, tree: optax.Params, loss_scale: LossScale) -> None:
        """Raise a `ValueError` that names the argument if `optax.masked` was applied outside the wrapper."""
        if loss_scale.checks_gradients and _tree.instances(tree, optax.MaskedNode):
            raise ValueError(
                f"`{name}` contains an `optax.MaskedNode`, so `{self.function}` is inside `optax.masked` or "
                "`optax.partition`. Gradients outside the mask would not be unscaled or checked. Wrap the complete "
                f"optimizer instead, as in `{self.function}(optax.masked(inner, mask))` or "
                f"`{self.function}(optax.partition(...))`."
            )

    def _checked_step(self, method: str, argument: str, arguments: StepArguments) -> _Stepped:
        """Check the arguments and compute a step on the leaves that are trained.

        Outside `jax.jit`, the compiled step is used if possible. If ``extra_args`` contains anything but arrays, the
        step is not compiled. Functions cannot be arguments of a compiled function, and numbers and flags must not be
        converted to arrays, because the inner optimizer can use numbers and flags for Python control flow.

        Args:
          method: the name of the method that the user called.
          argument: the name of its argument that contains the gradients.
          arguments: the arguments of this method.
        """
        extra_args, grads, state, params, inputs = arguments
        check_state(state, method, f"{argument}, state, params")
        self._check_keyword_arguments(method, inputs, extra_args)
        self._check_gradients(f"{method}({argument}=...)", grads, params, state.loss_scale)
        arguments = arguments._replace(grads=_tree.inexact_only(grads), params=only_trained(params, grads))
        are_operands = all(map(_is_operand, jax.tree.leaves(arguments._replace(extra_args={}))))
        is_compiled = are_operands and all(map(is_concrete_array, jax.tree.leaves(extra_args)))
        return (self._compiled_step if is_compiled else self._step)(method == "update_and_apply", arguments)

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., _Stepped]:
        """Return the compiled step.

        The compiled step is stored in the wrapper, so that it is freed together with the inner optimizer.
        """
        return jax.jit(self._step, static_argnums=0)

    def _step(self, applies: bool, arguments: StepArguments) -> _Stepped:
        """Return the new parameters (if ``applies`` is true) or the updates (if it is false), and the new state."""
        extra_args, scaled_grads, state, params, inputs = arguments
        loss_scale = state.loss_scale
        divisor, gradient_scale = self._divisor(loss_scale), self._gradient_scale(scaled_grads, loss_scale)
        checks = check(scaled_grads, loss_scale, inputs, self.axis_name, divisor)
        decision = decide(loss_scale, checks, gradient_scale)
        if inputs.value is not None:
            extra_args = {**extra_args, "value": inputs.value}
        if applies:
            params = _tree.without_weak_types(params)

        def unscaled() -> optax.Updates:
            return scaled_grads if divisor is None else loss_scale.unscale(scaled_grads)

        def run() -> tuple[chex.ArrayTree, optax.OptState]:
            grads = _widened(unscaled(), loss_scale)
            # A wrapper for 16-bit parameters, such as `master_weights`, receives the parameters as they are. All other
            # optimizers receive a float32 copy of them.
            are_passed_on = params is None or rounds_parameters(state.inner_state)
            inner_params = params if are_passed_on else _widened(params, loss_scale)
            updates, inner_state = self.inner.update(grads, state.inner_state, inner_params, **extra_args)
            result = apply_updates(params, updates) if applies else updates
            return result, with_dtypes_of(state.inner_state, inner_state)

        def leave() -> tuple[chex.ArrayTree, optax.OptState]:
            return params if applies else _no_updates(jax.eval_shape(run)[0]), state.inner_state

        if isinstance(decision.should_apply, jax.core.Tracer):
            run = jax.jit(run)  # `run` is used several times below, but `jax.jit` traces it only once
        result, inner_state = run_or_skip(self.skip, decision.should_apply, run, leave)
        return result, next_state(state, decision, inner_state, unscaled, self.axis_name)

    def _divisor(self, loss_scale: LossScale) -> jax.Array | None:
        """Return the scale by which the gradients must be divided, or ``None`` if they are unscaled."""
        return loss_scale()

    def _gradient_scale(self, grads: optax.Updates, loss_scale: LossScale) -> jax.Array | None:
        """Return the scale at which the gradients were computed, or ``None`` if it is the scale in the state."""
        return None


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Return `optax.apply_updates(params, updates)`, computed with the standard rules of dtype promotion.

    With strict dtype promotion, adding float32 updates to half-precision parameters would raise an error.
    """
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def _no_updates(like: optax.Updates) -> optax.Updates:
    """Return updates that do not change any parameter.

    Floating-point updates are -0.0 because adding 0.0 would change a parameter of -0.0 to 0.0.
    """
    return jax.tree.map(lambda leaf: -jnp.zeros_like(leaf) if _tree.is_inexact(leaf) else jnp.zeros_like(leaf), like)


def _widened(tree: chex.ArrayTree, loss_scale: LossScale) -> chex.ArrayTree:
    """Return parameters or unscaled gradients, cast to at least float32 for the inner optimizer.

    With a `NoOpLossScale`, bfloat16 leaves are not cast, so that the step is the same as without the wrapper. Float16
    leaves are always cast. In float16, the square of a small gradient is zero, so Adam would divide zero by zero.
    """
    keep: tuple[DTypeLike, ...] = () if loss_scale.checks_gradients else (jnp.bfloat16,)
    return _tree.widen(tree, keep=keep)


def is_concrete_array(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array with a dtype that JAX supports, and is neither traced nor a NumPy scalar."""
    is_array = isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and _tree.is_array(leaf))
    return is_array and not isinstance(leaf, jax.core.Tracer)


def _is_operand(leaf: Any) -> bool:
    """Return whether ``leaf`` can be an argument of the compiled step."""
    return is_concrete_array(leaf) or isinstance(leaf, (np.generic, bool, int, float, complex))
