"""The optax side: a transformation that unscales, checks, and runs a whole chain or leaves it untouched.

One function decides (`_verdict.decide`), one chooses between the step and its absence (`_branch.choose`), and
``update`` and ``update_and_apply`` differ only in what they make of the inner chain's updates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._branch import Skip, choose
from jax_lossscale._finite import AxisName, first_fault
from jax_lossscale._loss_scale import LossScale, get
from jax_lossscale._loss_scale.registry import find_one
from jax_lossscale._verdict import Verdict, as_checked, decide

# MindSpore's manager gives up after as many skipped steps in a row.
_SKIPS_THAT_NO_OVERFLOW_EXPLAINS = 1000


class BadStep(NamedTuple):
    """What ``loss_scaled(..., record_bad_steps=True)`` keeps of the last step that was skipped or not finite.

    Attributes:
      step: its number, from 0, counted over applied and skipped steps; -1 before there was one.
      leaf: the index of the first leaf of the gradients that was not finite, which `jls.diagnostics.leaf_path` makes a
        path of; -1 if all were finite.
      num_leaves: how many leaves the gradients had, ``None`` counted as one.
      has_nan: whether that leaf held a NaN. If not, it held infinities.
      grads_finite: whether the gradients were finite.
      value_finite: whether the loss was finite, as far as it was given as ``value``.
    """

    step: jax.Array  # shape=(), dtype=jnp.int32
    leaf: jax.Array  # shape=(), dtype=jnp.int32
    num_leaves: jax.Array  # shape=(), dtype=jnp.int32
    has_nan: jax.Array  # shape=(), dtype=jnp.bool_
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    value_finite: jax.Array  # shape=(), dtype=jnp.bool_


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    Attributes:
      loss_scale: the current loss scale.
      inner_state: the state of the inner chain, which a skipped step leaves bit for bit.
      grads_finite: whether the gradients of the last step, and all parts that they were made of, were finite; true
        before the first step, and always true under a `NoOpLossScale`, which does not look.
      applied_steps: steps that changed the parameters. Schedules in the inner chain count these.
      skipped_steps: steps that did not, for whatever reason.
      consecutive_skips: how many of those since the last applied step.
      last_bad_step: what is known of the last bad step, if ``record_bad_steps`` was asked for.
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    applied_steps: jax.Array  # shape=(), dtype=jnp.int32
    skipped_steps: jax.Array  # shape=(), dtype=jnp.int32
    consecutive_skips: jax.Array  # shape=(), dtype=jnp.int32
    last_bad_step: BadStep | None = None


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with one method more, ``update_and_apply``; see `loss_scaled`."""

    update_and_apply: Callable[..., tuple[optax.Params, LossScaledState]]

    def __new__(
        cls,
        init: optax.TransformInitFn,
        update: optax.TransformUpdateExtraArgsFn,
        update_and_apply: Callable[..., tuple[optax.Params, LossScaledState]],
    ) -> LossScaledTransformation:
        """The 2-tuple that every optax transformation is, and the method beside it."""
        self = super().__new__(cls, init, update)
        self.update_and_apply = update_and_apply
        return self


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: Any = "dynamic",
    *,
    axis_name: AxisName = None,
    skip: Skip = "auto",
    record_bad_steps: bool = False,
) -> LossScaledTransformation:
    """Wrap an optimizer chain so that it takes scaled gradients and skips the steps that overflowed.

    The chain, clipping and weight decay and schedules included, sees true gradients in float32. On a bad step it is
    not run, or its result is discarded whole: its state stays bit for bit, and the updates are zero. Wrap the whole
    chain, once.

    A step is skipped if the gradients are not finite (and the loss scale skips such steps), if ``value`` is not finite,
    or if ``skip_if`` is true. The loss scale reacts to the gradients alone:

    ================  ===============  ==================  =======================
    gradients         ``value``        ``skip_if``         the loss scale
    ================  ===============  ==================  =======================
    finite            finite           false               counts a good step
    finite            finite           true                stays as it is
    not finite        finite           either              backs off
    either            not finite       either              stays as it is
    ================  ===============  ==================  =======================

    A loss that is not finite comes from the forward pass, which no loss scale touches. An overflow counts also where
    ``skip_if`` is true, since conditions such as "the gradient norm is above a threshold" are true on every overflow,
    and the scale would never come down.

    Parameters narrower than float32 are shown to the chain in float32, when it is initialized and when it is run, so
    its moments are float32 and stay so. Leaves that are not inexact (integers, keys, float0) are not shown to it.

    With a `NoOpLossScale` all of this falls away, the check of ``value`` and float32 views of bfloat16 included; only
    ``skip_if``, if given, still skips.

    Args:
      inner: any optax transformation, or `optax.MultiSteps`.
      loss_scale: whatever `get` accepts.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the names over which the verdict is agreed (never the gradients;
        sum those yourself, before or after scaling). All devices then skip together. One all-reduce of one scalar.
      skip: how a bad step is skipped: ``"cond"``, a branch; ``"select"``, computing both and choosing; ``"auto"``,
        ``"cond"`` on a CPU, where it is faster, and ``"select"`` elsewhere: compiled for a GPU it moves half as many
        bytes, though no GPU has been timed. The results are the same.
      record_bad_steps: whether ``init`` makes a state that keeps a `BadStep`: which leaf was not finite, and how;
        ``update`` follows the state. On a good step that costs a branch; to compile, a reduction a leaf.

    Returns:
      A `LossScaledTransformation`. Its functions, beside ``init(params)``:

      ``update(scaled_grads, state, params=None, *, value=None, skip_if=None, parts_finite=None, **extra_args)``
        returns ``(updates, state)``. ``scaled_grads`` are the gradients of the scaled loss, as `value_and_scaled_grad`
        gives them for this state; ``value`` the true loss, a scalar, which is passed on to the chain; ``skip_if`` a
        ``bool[]``; ``parts_finite`` a ``bool[]`` that is false if a part of these gradients overflowed and was left
        out (`accumulate_gradients`): the scale then backs off, though the step is applied. Other extra arguments reach
        the chain as they are: gradients among them must be unscaled ones.

      ``update_and_apply(scaled_grads, state, params, *, value=None, skip_if=None, parts_finite=None, **extra_args)``
        returns ``(params, state)``: the same as ``update`` and `optax.apply_updates`, faster.

    Raises:
      ValueError: if ``inner`` is no transformation or contains a `loss_scaled` itself; if ``loss_scale``,
        ``axis_name`` or ``skip`` is not one of the above; if ``skip_if`` or ``parts_finite`` is no boolean scalar.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> tx = jls.loss_scaled(optax.sgd(0.5), 1024.0)
      >>> params = {"x": jnp.float32(3.0)}
      >>> state = tx.init(params)
      >>> loss, scaled_grads = jls.value_and_scaled_grad(lambda p: p["x"] ** 2, state)(params)
      >>> params, state = tx.update_and_apply(scaled_grads, state, params, value=loss)
      >>> params["x"], state.applied_steps
      (Array(0., dtype=float32), Array(1, dtype=int32))

    References:
      ``tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer``. That one decides nothing from the loss, and
      scales it itself.
    """
    inner = _checked_inner(inner)
    initial_loss_scale = get(loss_scale)
    _check_axis_name(axis_name)
    if skip not in ("auto", "cond", "select"):
        raise ValueError(f"`loss_scaled(skip=...)` must be 'auto', 'cond' or 'select', got {skip!r}.")

    def init(params: optax.Params) -> LossScaledState:
        inner_state = inner.init(_shown_to_inner(params, initial_loss_scale))
        if _holds_loss_scale(inner_state):
            raise ValueError(
                "`loss_scaled(inner=...)` already contains a `loss_scaled`: the gradients would be unscaled twice. "
                "Wrap the whole chain once."
            )
        return LossScaledState(
            # A copy: a state may be donated, and `initial_loss_scale` must serve again.
            loss_scale=_with_dtypes_of(initial_loss_scale, jax.tree.map(jnp.array, initial_loss_scale)),
            inner_state=_with_dtypes_of(inner_state, inner_state),
            grads_finite=jnp.array(True),
            applied_steps=jnp.zeros([], jnp.int32),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            last_bad_step=_no_bad_step() if record_bad_steps else None,
        )

    def step(
        scaled_grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None,
        finish: Callable[[optax.Updates], chex.ArrayTree],
        when_skipped: Callable[[Callable[[], Any]], chex.ArrayTree],
        value: ArrayLike | None,
        skip_if: ArrayLike | None,
        parts_finite: ArrayLike | None,
        extra_args: dict[str, Any],
    ) -> tuple[chex.ArrayTree, LossScaledState]:
        loss_scale = state.loss_scale
        verdict = decide(scaled_grads, loss_scale, value, skip_if, parts_finite, axis_name)
        if value is not None:
            extra_args = {**extra_args, "value": value}

        @jax.jit  # traced once, wherever it is used below
        def run_inner() -> tuple[chex.ArrayTree, optax.OptState]:
            updates, inner_state = inner.update(
                _shown_to_inner(loss_scale.unscale(scaled_grads), loss_scale),
                state.inner_state,
                None if params is None else _shown_to_inner(params, loss_scale),
                **extra_args,
            )
            return finish(updates), _with_dtypes_of(state.inner_state, inner_state)

        def leave_inner() -> tuple[chex.ArrayTree, optax.OptState]:
            return when_skipped(run_inner), state.inner_state

        if verdict.should_apply is None:
            result, inner_state = run_inner()
        else:
            result, inner_state = choose(skip, verdict.should_apply, run_inner, leave_inner)
        last_bad_step = _record(state, scaled_grads, verdict, axis_name)
        return result, _next_state(state, verdict, inner_state, last_bad_step)

    def update(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        parts_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        def with_untouched_leaves(inner_updates: optax.Updates) -> optax.Updates:
            return _fill(inner_updates, updates if params is None else _zero_updates(params))

        def zeros(run_inner: Callable[[], Any]) -> optax.Updates:
            inner_updates, _ = jax.eval_shape(run_inner)
            return jax.tree.map(jnp.zeros_like, inner_updates)

        return step(updates, state, params, with_untouched_leaves, zeros, value, skip_if, parts_finite, extra_args)

    def update_and_apply(
        scaled_grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        parts_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Params, LossScaledState]:
        if params is None:
            raise ValueError("`update_and_apply(params=...)` got None. To compute updates without them, use `update`.")

        def applied(inner_updates: optax.Updates) -> optax.Params:
            return _fill(optax.apply_updates(_tree.inexact_only(params), inner_updates), params)

        return step(scaled_grads, state, params, applied, lambda _: params, value, skip_if, parts_finite, extra_args)

    return LossScaledTransformation(init, _compiled(update), _compiled(update_and_apply))


def metrics(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
    """What to log about loss scaling, as device scalars: reading them is up to you, and so is when.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.

    Returns:
      A dictionary of ``loss_scale`` (``float32[]``), ``grads_finite`` (``bool[]``), ``applied_steps``,
      ``skipped_steps`` and ``consecutive_skips`` (``int32[]``); where bad steps are recorded, of ``last_bad_leaf``
      (``int32[]``) too.

    Raises:
      ValueError: if there is no such state, or more than one.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> {name: value.item() for name, value in jls.metrics(state).items()}["loss_scale"]
      32768.0
    """
    _, state = find_one(opt_state, LossScaledState, "metrics(opt_state=...)")
    recorded = {} if state.last_bad_step is None else {"last_bad_leaf": state.last_bad_step.leaf}
    return {
        "loss_scale": state.loss_scale(),
        "grads_finite": state.grads_finite,
        "applied_steps": state.applied_steps,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
        **recorded,
    }


def raise_if_stuck(opt_state: chex.ArrayTree, patience: int = 20) -> None:
    """Raise an error when steps keep being skipped and lowering the scale cannot help.

    Call it on the host, now and then: it waits for the device. A run is stuck when ``patience`` steps in a row were
    skipped, this one included, and further bad steps would not lower the scale, because it stands at its floor or
    never moves; or when 1,000 in a row were skipped whatever the scale, which no overflow explains: a loss that stays
    NaN does not lower the scale, and is told by this.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`; of a batch of runs, one stuck run suffices.
      patience: how many skipped steps in a row to bear at the floor, at least 1.

    Raises:
      RuntimeError: if the run is stuck; the message says what to look at.
      ValueError: if there is no such state, or more than one; if ``patience`` is less than 1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> jls.raise_if_stuck(state)

    References:
      fairseq and DeepSpeed raise at the floor at once; MindSpore after 1,000 skipped steps in a row.
    """
    if not patience >= 1:
        raise ValueError(f"`raise_if_stuck(patience=...)` must be at least 1, got {patience!r}.")
    _, state = find_one(opt_state, LossScaledState, "raise_if_stuck(opt_state=...)")
    loss_scale = state.loss_scale
    skips = np.asarray(state.consecutive_skips)
    if np.any((skips >= patience) & cannot_go_lower(loss_scale)):
        situation = "and the loss scale cannot go lower"
    elif np.any(skips >= max(patience, _SKIPS_THAT_NO_OVERFLOW_EXPLAINS)):
        situation = "more than any overflow explains"
    else:
        return
    raise RuntimeError(
        f"The last {skips.max()} steps were skipped, {situation} (it is {np.asarray(loss_scale())}). Look at the "
        "gradients for a NaN that is there at every scale (log of zero, division by zero, a mask of -1e9 in float16), "
        "at the loss (if it is not finite, the forward pass overflows), and at the condition given as `skip_if`, if "
        "any. If the gradients are infinite though the loss is finite, lower `min_loss_scale`. "
        "With `record_bad_steps=True`, `jls.diagnostics.explain(opt_state)` tells which it is."
    )


def cannot_go_lower(loss_scale: LossScale) -> np.ndarray:
    """Whether further bad steps would leave the scale where it is, at its floor or fixed: ``bool``, on the host."""
    return np.asarray(_as_low_as_it_goes(loss_scale)()) >= np.asarray(loss_scale())


@jax.jit
def _as_low_as_it_goes(loss_scale: LossScale) -> LossScale:
    # Not one bad step only: hysteresis lets some pass before the scale goes down.
    return jax.lax.fori_loop(0, _SKIPS_THAT_NO_OVERFLOW_EXPLAINS, lambda _, scale: scale.adjust(False), loss_scale)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    """``function``, compiled where it is called eagerly: a branch is otherwise compiled anew at every call."""
    jitted = jax.jit(function)
    own_names = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_state(args[1] if len(args) > 1 else kwargs.get("state"))
        # Extra arguments stay what they are: they may be functions, or numbers and flags that steer Python code.
        is_eager = kwargs.keys() <= own_names and all(map(_is_concrete_array, jax.tree.leaves((args, kwargs))))
        return (jitted if is_eager else function)(*args, **kwargs)

    return cast(_Function, call)


def _is_concrete_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, (jax.Array, bool, int, float, complex)) and not isinstance(leaf, jax.core.Tracer)


def _record(
    state: LossScaledState, scaled_grads: optax.Updates, verdict: Verdict, axis_name: AxisName
) -> BadStep | None:
    if state.last_bad_step is None:
        return None
    should_apply = jnp.array(True) if verdict.should_apply is None else verdict.should_apply
    is_bad = ~(verdict.grads_finite & should_apply)

    def look() -> BadStep:
        leaf, has_nan = first_fault(as_checked(scaled_grads, state.loss_scale), axis_name)
        return BadStep(
            step=_saturating_add(state.applied_steps, state.skipped_steps),
            leaf=leaf,
            num_leaves=jnp.array(len(_tree.leaves_and_nones(scaled_grads)), jnp.int32),
            has_nan=has_nan,
            grads_finite=verdict.grads_finite,
            value_finite=verdict.value_finite,
        )

    # A branch on every platform: bad steps are rare, and on a good one there is nothing to look for.
    return cast(BadStep, choose("cond", is_bad, look, lambda: cast(BadStep, state.last_bad_step)))


def _no_bad_step() -> BadStep:
    return BadStep(
        step=jnp.array(-1, jnp.int32),
        leaf=jnp.array(-1, jnp.int32),
        num_leaves=jnp.array(0, jnp.int32),
        has_nan=jnp.array(False),
        grads_finite=jnp.array(True),
        value_finite=jnp.array(True),
    )


def _next_state(
    state: LossScaledState, verdict: Verdict, inner_state: optax.OptState, last_bad_step: BadStep | None
) -> LossScaledState:
    if verdict.should_apply is None:
        applied = skipped = None
    else:
        applied = verdict.should_apply.astype(jnp.int32)
        skipped = 1 - applied
    return LossScaledState(
        loss_scale=verdict.loss_scale,
        inner_state=inner_state,
        grads_finite=verdict.parts_finite,
        applied_steps=_saturating_add(state.applied_steps, 1 if applied is None else applied),
        skipped_steps=(state.skipped_steps if skipped is None else _saturating_add(state.skipped_steps, skipped)),
        consecutive_skips=(
            jnp.zeros_like(state.consecutive_skips)
            if skipped is None
            else _saturating_add(state.consecutive_skips, 1) * skipped
        ),
        last_bad_step=last_bad_step,
    )


def _saturating_add(count: jax.Array, increment: ArrayLike) -> jax.Array:
    return jnp.where(count == jnp.iinfo(jnp.int32).max, count, count + increment)


def _shown_to_inner(tree: chex.ArrayTree, loss_scale: LossScale) -> chex.ArrayTree:
    """Parameters or unscaled gradients as the inner chain sees them: inexact leaves only, none of them narrow.

    Without a loss scale bfloat16 stays, as it would without this library. Float16 never does: the square of a small
    gradient would be zero, and Adam would divide zero by zero.
    """
    keep = () if loss_scale.checks_gradients else (jnp.bfloat16,)
    return _tree.widen(_tree.inexact_only(tree), keep=keep)


def _zero_updates(params: optax.Params) -> optax.Updates:
    def zero(leaf: Any) -> Any:
        is_addable = isinstance(leaf, (bool, int)) or (
            hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        )
        return None if _tree.is_inexact(leaf) or not is_addable else jnp.zeros_like(leaf)

    return jax.tree.map(zero, params)


def _fill(tree: chex.ArrayTree, otherwise: chex.ArrayTree) -> chex.ArrayTree:
    """``tree`` with the leaves of ``otherwise`` in the place of those that the inner chain was not shown."""
    if len(jax.tree.leaves(otherwise)) == len(_tree.inexact_leaves(otherwise)):
        return tree
    return jax.tree.map(
        lambda given, other: other if given is None else given,
        tree,
        otherwise,
        is_leaf=lambda leaf: leaf is None,
    )


def _with_dtypes_of(old: optax.OptState, new: optax.OptState) -> optax.OptState:
    """``new`` in the dtypes of ``old``, none of them weak: a state that crosses `jax.jit` twice is traced once."""

    def with_dtype(a: Any, b: Any) -> Any:
        if isinstance(a, (int, float, complex)) and not isinstance(a, bool):
            a = jnp.asarray(a)
        is_number = hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.number)
        return jnp.asarray(b).astype(a.dtype) if is_number else b

    return jax.tree.map(with_dtype, old, new)


def _holds_loss_scale(inner_state: optax.OptState) -> bool:
    def is_loss_scale(node: Any) -> bool:
        return isinstance(node, LossScale)

    return any(map(is_loss_scale, jax.tree.leaves(inner_state, is_leaf=is_loss_scale)))


def _checked_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)  # its own view drops extra arguments
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise ValueError(
            f"`loss_scaled(inner=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got {inner!r}."
        )
    return optax.with_extra_args_support(inner)


def _check_axis_name(axis_name: AxisName) -> None:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is not None and not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`loss_scaled(axis_name=...)` must be the name of a mesh axis, a tuple of names, or None, got "
            f"{axis_name!r}."
        )


def _check_state(state: Any) -> None:
    if not isinstance(state, LossScaledState):
        raise ValueError(
            "`update(state=...)` must be a `LossScaledState`, made by the `init` of the same transformation, got "
            f"{type(state).__name__}. The order is `update(scaled_grads, state, params)`."
        )
    if not isinstance(state.last_bad_step, (BadStep, type(None))):
        raise ValueError(
            f"`update(state=...)` has a {type(state.last_bad_step).__name__} for `last_bad_step`. Where it was "
            "restored from a run that recorded bad steps, `state._replace(last_bad_step=None)` ends that, and the same "
            "with that of `init` goes on with it."
        )
