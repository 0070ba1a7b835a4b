"""`master_weights` and `stochastic_rounding`: optimizer wrappers that train 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_lossscale import _tree
from jax_lossscale._check import count
from jax_lossscale._optax.inner import checked_optimizer, rounds_parameters
from jax_lossscale._optax.partition import combine, updates_of_untrained
from jax_lossscale._sixteen_bit import rounding
from jax_lossscale._sixteen_bit.arguments import (
    check_no_loss_scale,
    check_params,
    check_state,
    is_empty,
    trained_leaves,
)

# The dtypes of the remainders. They differ, so that the state of bfloat16 parameters is rejected if the parameters are
# in float16.
_REMAINDERS = {"bfloat16": "uint16", "float16": "int16"}


class MasterWeightsState(NamedTuple):
    """The state of a `master_weights` optimizer.

    Attributes:
      remainders: a pytree with the structure of the parameters. It contains a uint16 array for each bfloat16 parameter,
        an int16 array for each float16 parameter, and ``None`` for every other parameter.
      inner_state: the state of the inner optimizer.
    """

    remainders: chex.ArrayTree
    inner_state: optax.OptState

    @property
    def rounds_parameters(self) -> bool:
        """Always true. `loss_scaled` recognizes the wrapper by this attribute."""
        return True


class StochasticRoundingState(NamedTuple):
    """The state of a `stochastic_rounding` optimizer.

    Attributes:
      counter: ``int32[]``, the number of steps, from which the random bits of the next step are computed.
      inner_state: the state of the inner optimizer.
    """

    counter: jax.Array  # shape=(), dtype=jnp.int32
    inner_state: optax.OptState

    @property
    def rounds_parameters(self) -> bool:
        """Always true. `loss_scaled` recognizes the wrapper by this attribute."""
        return True


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that it trains 16-bit parameters with float32 master weights.

    The inner optimizer updates float32 weights, so small updates are not lost. The 16-bit parameters are the weights
    rounded to the nearest 16-bit number. The state contains only a 16-bit remainder of each weight, so a parameter and
    its remainder together take 4 bytes, like a float32 weight:

    - For bfloat16 parameters, the remainder consists of the lower 16 bits of the weight, and the reconstructed weights
      are exact.
    - For float16 parameters, the reconstructed weights are exact if the parameters are normal float16 numbers. For
      smaller parameters, the error is at most 2^-40.

    Use this wrapper if the optimizer must update the weights in float32, as if the parameters were in float32.
    `stochastic_rounding` needs less memory.

    Args:
      inner: the complete optimizer, including gradient clipping, weight decay and learning-rate schedules. It can be
        any optax transformation or an `optax.MultiSteps`, but must not contain a `loss_scaled`, a `master_weights` or a
        `stochastic_rounding`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. In `optax.chain`, it must be the last transformation. With a loss
      scale, use ``loss_scaled(master_weights(inner))``.

      - ``init(params)`` returns a state with the fields ``remainders`` and ``inner_state``. ``remainders`` has the
        structure of the parameters, and contains a ``uint16`` array for each bfloat16 parameter, an ``int16`` array for
        each float16 parameter, and ``None`` for each other leaf.
      - ``update(updates, state, params, **extra_args)`` returns ``(updates, state)``. The gradients can have any
        floating dtype; the inner optimizer receives them in float32. The returned updates of 16-bit parameters are
        float32 arrays. `optax.apply_updates` adds them to the parameters, which gives the new 16-bit parameters.
        (``equinox.apply_updates`` would return float32 parameters, because it does not cast the sum to the dtype of the
        parameter.)

      For float32 parameters, the updates of the inner optimizer are returned unchanged. The updates of integer arrays
      are zero. If the gradient of a parameter is ``None``, its update is ``None``. For most optimizers with a state,
      this parameter must also be ``None`` in ``init``.

    Raises:
      ValueError: if ``inner`` is not an optax transformation. ``init`` raises a `ValueError` if ``inner`` contains one
        of the wrappers listed above, or if a parameter has a floating dtype other than bfloat16, float16 and float32.
        ``update`` also raises a `ValueError` if ``params`` is ``None``, if the gradients do not have the structure of
        the parameters, if the gradient of a floating-point parameter is neither ``None`` nor floating-point, if
        ``state`` is not the state of this wrapper, or if its remainders do not belong to parameters with the same
        structure, shapes and dtypes.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
      >>> tx = jls.master_weights(optax.sgd(2.0**-10))
      >>> state = tx.init(params)
      >>> for _ in range(3):  # in bfloat16, 1 - 2**-10 is rounded to 1
      ...     updates, state = tx.update({"w": jnp.ones(3)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["w"]
      Array([0.996094, 0.996094, 0.996094], dtype=bfloat16)
      >>> jls.float32_params(params, state)["w"]
      Array([0.9970703, 0.9970703, 0.9970703], dtype=float32)

    **Details.** `float32_params` returns the float32 weights, for evaluation, moving averages and export. If you
    replace the parameters, for example with the parameters of another run, call ``init`` again, because the remainders
    belong to the old parameters.

    Weights are rounded to the nearest 16-bit number, and ties are rounded away from zero. Rounding never makes a
    parameter non-finite. Finite weights beyond the largest finite number of the dtype saturate at this number, and so
    does the reconstructed weight. Non-finite weights remain non-finite.

    `optax.apply_updates` computes the sum of a parameter and its update in float32. If one step changes a parameter by
    more than about 2^12 times its new value, this sum has a rounding error. The derivatives of the new parameters with
    respect to the gradients or the state are zero, because the parameters are computed with integer operations. XLA can
    flush numbers below 2^-126 to zero, so updates below 2^-126 can be lost.

    References:
      The optimizers of Apex (``contrib.optimizers.DistributedFusedAdam`` with ``store_param_remainders=True``) also
      store the lower 16 bits of bfloat16 parameters, and round ties away from zero. They do not support float16.
    """
    name = "master_weights"
    inner = checked_optimizer(inner, f"{name}(inner=...)")

    def init(params: optax.Params) -> MasterWeightsState:
        remainders = jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, _REMAINDERS[str(leaf.dtype)]) if _tree.is_half(leaf) else None, params
        )
        return MasterWeightsState(remainders, _initial_state(name, inner, params))

    def update(
        updates: optax.Updates, state: MasterWeightsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        check_state(name, state, MasterWeightsState)

        def rounded(index: int, weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
            return rounding.split(weights, dtype)

        updates, *new_state = _rounded_step(name, inner, rounded, updates, state, params, extra_args)
        return updates, MasterWeightsState(*new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def stochastic_rounding(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that it trains 16-bit parameters with stochastic rounding.

    The inner optimizer updates float32 copies of the parameters. After each step, each new parameter is randomly
    rounded to one of the two nearest 16-bit numbers. The expected value of the result is the unrounded number, so a
    small update changes the parameter with a small probability instead of being lost. The wrapper adds only a counter
    to the state of the inner optimizer.

    Args:
      inner: the complete optimizer, as in `master_weights`.
      seed: a nonnegative integer that determines the random bits.

    Returns:
      An `optax.GradientTransformationExtraArgs`. In `optax.chain`, it must be the last transformation. With a loss
      scale, use ``loss_scaled(stochastic_rounding(inner))``.

      - ``init(params)`` returns a state with the fields ``counter``, an ``int32[]``, and ``inner_state``.
      - ``update(updates, state, params, **extra_args)`` has the arguments and results of `master_weights`.

    Raises:
      ValueError: if ``seed`` is not a nonnegative integer that fits in int32, and in the cases listed in
        `master_weights`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(10_000, jnp.bfloat16)}
      >>> tx = jls.stochastic_rounding(optax.sgd(0.001))
      >>> state = tx.init(params)
      >>> for _ in range(4):  # in bfloat16, 1 - 0.001 is rounded to 1
      ...     updates, state = tx.update({"w": jnp.ones(10_000)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(jnp.mean(params["w"].astype(jnp.float32))), 4)
      0.996

    **Details.** The random bits are a hash of the seed, the counter, the index of the leaf and the index of the element
    in the array. They do not depend on the number of devices, on the mesh or on `jax.jit`, and a resumed run uses the
    same random bits as an uninterrupted run. In the following cases, the same random bits are used several times:

    - Inside `jax.pmap` and `jax.shard_map`, all devices use the same random bits, because the index of an element is
      its index in the local array. Replicas of a parameter therefore stay equal.
    - Inside `jax.vmap`, all parameters along the mapped axis use the same random bits, unless the field ``counter`` of
      their states differs.
    - Optimizers with the same seed use the same random bits. Use different seeds if their parameters are compared or
      averaged.

    The documentation of `master_weights` also describes saturation, non-finite weights, rounding errors of the sum, and
    derivatives. Updates that are smaller than 2^-25 times the parameter are lost in the float32 sum, as in float32
    training. Weights that become subnormal float16 parameters are rounded to multiples of 2^-40 before they are rounded
    stochastically.

    References:
      The optimizers of torchao (``bf16_stochastic_round=True``) and llm.c also round bfloat16 parameters
      stochastically. They take the random bits from the random number generator of the device or of the framework.
    """
    name = "stochastic_rounding"
    inner = checked_optimizer(inner, f"{name}(inner=...)")
    # `half_precision_state` uses odd numbers here, so the two wrappers never use the same random bits.
    bits_seed = np.uint32(2 * count(seed, f"{name}(seed=...)"))

    def init(params: optax.Params) -> StochasticRoundingState:
        return StochasticRoundingState(jnp.zeros([], jnp.int32), _initial_state(name, inner, params))

    def update(
        updates: optax.Updates, state: StochasticRoundingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        check_state(name, state, StochasticRoundingState)
        keys = rounding.keys_of_step(bits_seed, state.counter)

        def rounded(index: int, weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, None]:
            return rounding.round_stochastically(weights, dtype, keys(index)), None

        updates, _, inner_state = _rounded_step(name, inner, rounded, updates, state, params, extra_args)
        return updates, StochasticRoundingState(jnp.asarray(state.counter) + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _initial_state(name: str, inner: optax.GradientTransformationExtraArgs, params: optax.Params) -> optax.OptState:
    """Return the state of the inner optimizer for 16-bit parameters before the first step."""
    check_params(f"{name}(...).init(params=...)", params)
    inner_state = inner.init(_tree.widen(_tree.inexact_only(params)))
    check_no_loss_scale(name, inner_state)
    if rounds_parameters(inner_state):
        raise ValueError(
            f"`{name}(inner=...)` already contains a `master_weights` or a `stochastic_rounding`. Use only one of "
            "them, because each of them rounds the parameters."
        )
    return inner_state


def _rounded_step(
    name: str,
    inner: optax.GradientTransformationExtraArgs,
    rounded: Callable[[int, jax.Array, jnp.dtype], tuple[jax.Array, Any]],
    grads: optax.Updates,
    state: MasterWeightsState | StochasticRoundingState,
    params: optax.Params,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, chex.ArrayTree, optax.OptState]:
    """Return the updates of 16-bit parameters, their remainders, and the state of the inner optimizer.

    Args:
      name: the name of the wrapper, for error messages.
      inner: the inner optimizer.
      rounded: a function that takes the index of a leaf, its new float32 weights and the dtype of the parameter. It
        returns the new parameter and its remainder.
      grads: the gradients.
      state: the state of the wrapper.
      params: the parameters.
      extra_args: the other arguments of the inner optimizer.
    """
    if params is None:
        raise ValueError(
            f"`{name}(...).update(params=...)` must be the parameters, got None. Call `update(grads, state, params)`."
        )
    check_params(f"{name}(...).update(params=...)", params)
    trained_grads, trained = trained_leaves(name, grads, params)
    structure: Any
    leaves, structure = jax.tree.flatten(trained, is_leaf=is_empty)
    rests = [None] * len(leaves)
    if isinstance(state, MasterWeightsState):
        rests = _remainders_of(name, leaves, structure, state.remainders)
    weights = [weights_of(leaf, rest) for leaf, rest in zip(leaves, rests, strict=True)]
    updates, inner_state = inner.update(
        _tree.cast_floating(trained_grads, jnp.float32), state.inner_state, structure.unflatten(weights), **extra_args
    )
    new_updates = structure.flatten_up_to(updates)
    for index, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
        if _tree.is_half(leaf):
            new = weight + jnp.asarray(new_updates[index]).astype(jnp.float32)
            # The sum of a number and zero can differ from the number: -0.0 becomes 0.0, and XLA can flush subnormals.
            new = jnp.where(new == weight, weight, new)
            param, rests[index] = rounded(index, new, jnp.dtype(leaf.dtype))
            new_updates[index] = rounding.update_between(leaf, param)
    new_updates = combine(jax.tree.unflatten(structure, new_updates), lambda: updates_of_untrained(grads, params))
    return new_updates, jax.tree.unflatten(structure, rests), inner_state


def weights_of(leaf: Any, remainder: jax.Array | None) -> Any:
    """Return the float32 weights of a 16-bit parameter, or any other leaf unchanged."""
    if not _tree.is_half(leaf):
        return leaf
    leaf = jnp.asarray(leaf)
    return rounding.as_float32(leaf) if remainder is None else rounding.join(leaf, jnp.asarray(remainder))


def _remainders_of(name: str, leaves: list[Any], structure: Any, remainders: chex.ArrayTree) -> list[Any]:
    """Return the remainder of each parameter. Raise a `ValueError` if the remainders do not match the parameters."""
    try:
        rests = structure.flatten_up_to(remainders)
    except ValueError as error:
        raise _error_of_other_parameters(name, "a different structure") from error
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(structure.unflatten(leaves), is_leaf=is_empty)]
    for path, leaf, rest in zip(paths, leaves, rests, strict=True):
        if is_empty(leaf) or (rest is None and not _tree.is_half(leaf)):
            continue
        check_dtype(f"{name}(...).update(params=...)", path, getattr(leaf, "dtype", None), getattr(rest, "dtype", None))
        if np.shape(leaf) != np.shape(rest):
            raise _error_of_other_parameters(name, f"a different shape at {jax.tree_util.keystr(path)!r}")
    return rests


def check_dtype(name: str, path: Any, dtype: Any, of_remainder: Any) -> None:
    """Raise a `ValueError` if the dtype of a remainder shows that it belongs to a parameter of another dtype."""
    if _REMAINDERS.get(str(dtype)) != str(of_remainder):
        of_dtype = {remainder: half for half, remainder in _REMAINDERS.items()}.get(str(of_remainder), "float32")
        raise ValueError(
            f"`{name}` got a {dtype} array at {jax.tree_util.keystr(path)!r}, but the state belongs to a {of_dtype} "
            "parameter. Add updates with `optax.apply_updates`, which keeps the dtypes of the parameters, and restore "
            "a checkpoint into arrays of the same dtypes. (Version 0.7 stored the remainders of float16 parameters as "
            "uint16. This version cannot use them.)"
        )


def _error_of_other_parameters(name: str, difference: str) -> ValueError:
    return ValueError(
        f"`{name}(...).update(state=...)` must belong to these parameters, got the state of parameters with "
        f"{difference}. Pass the state that `init` or the last `update` returned."
    )
