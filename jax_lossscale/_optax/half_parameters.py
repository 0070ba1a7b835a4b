"""Optimizer wrappers that store parameters and optimizer states in 16 bits.

- `master_weights` and `stochastic_rounding` train 16-bit parameters. An optimizer uses one of the two wrappers.
- `half_precision_state` stores the optimizer state in bfloat16, and can be combined with either of them.
- `float32_params` returns the float32 weights from the state of `master_weights`.

The conversions between float32 and 16-bit numbers are in `rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, check_function, count, shown
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._optax.partition import combine, only_trained, updates_of_untrained
from jax_lossscale._optax.rounding import as_float32, is_half, join, key_of, round_stochastically, split, update_between
from jax_lossscale._optax.state import with_dtypes_of


class MasterWeightsState(NamedTuple):
    """The state of a `master_weights` optimizer.

    Attributes:
      remainders: a pytree with the structure of the parameters. It contains a uint16 array for each 16-bit parameter,
        and ``None`` for every other parameter.
      inner_state: the state of the inner optimizer.
    """

    remainders: chex.ArrayTree
    inner_state: optax.OptState


class StochasticRoundingState(NamedTuple):
    """The state of a `stochastic_rounding` optimizer.

    Attributes:
      counter: ``int32[]``, the number of steps, from which the random bits of the next step are computed.
      inner_state: the state of the inner optimizer.
    """

    counter: jax.Array  # shape=(), dtype=jnp.int32
    inner_state: optax.OptState


class HalfPrecisionState(NamedTuple):
    """The state of a `half_precision_state` optimizer.

    Attributes:
      counter: ``int32[]``, the number of steps, from which the random bits of the next step are computed.
      inner_state: the state of the inner optimizer, in which most float32 arrays are replaced by bfloat16 arrays.
    """

    counter: jax.Array  # shape=(), dtype=jnp.int32
    inner_state: optax.OptState


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that it trains 16-bit parameters with float32 master weights.

    The inner optimizer updates float32 weights, so small updates are not lost. The 16-bit parameters are the weights
    rounded to the nearest 16-bit number. The state contains only a 16-bit remainder of each weight, so a parameter and
    its remainder together take 4 bytes, like a float32 weight:

    - For bfloat16 parameters, the remainder consists of the lower 16 bits of the weight, and the reconstructed weights
      are exact.
    - For float16 parameters, the reconstructed weights are exact if the parameters are normal float16 numbers. For
      smaller parameters, the error is at most 2^-40.

    Use this wrapper if the optimizer must update float32 weights, just as it would update float32 parameters.
    `stochastic_rounding` needs less memory.

    Args:
      inner: the complete optimizer, including gradient clipping, weight decay and learning-rate schedules. It can be
        any optax transformation or an `optax.MultiSteps`, but must not contain a `loss_scaled`, a `master_weights` or a
        `stochastic_rounding`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. In `optax.chain`, it must be the last transformation. With a loss
      scale, use ``loss_scaled(master_weights(inner))``.

      - ``init(params)`` returns a state with the fields ``remainders`` and ``inner_state``. ``remainders`` has the
        structure of the parameters, and contains a ``uint16`` array for each 16-bit parameter and ``None`` for each
        other leaf.
      - ``update(updates, state, params, **extra_args)`` returns ``(updates, state)``. The gradients can have any
        floating dtype; the inner optimizer receives them in float32. The returned updates of 16-bit parameters are
        float32 arrays. `optax.apply_updates` adds them to the parameters, which gives the new 16-bit parameters.
        (``equinox.apply_updates`` would return float32 parameters, because it does not cast the sum to the dtype of the
        parameter.)

      For float32 parameters, the updates of the inner optimizer are returned unchanged. The updates of integer arrays
      are zero. If the gradient of a parameter is ``None``, its update is ``None``. Most optimizers with a state require
      that this parameter is also ``None`` in ``init``.

    Raises:
      ValueError: if ``inner`` is not an optax transformation. ``init`` raises a `ValueError` if ``inner`` contains one
        of the wrappers listed above, or if a parameter has a floating dtype other than bfloat16, float16 and float32.
        ``update`` also raises a `ValueError` if ``params`` is ``None``, if the gradients do not have the structure of
        the parameters, if the gradient of a floating-point parameter is neither ``None`` nor floating-point, if
        ``state`` is not the state of this wrapper, or if its remainders do not have the structure and the shapes of the
        parameters. The dtypes are not compared: do not use a state of bfloat16 parameters for float16 parameters.

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
        remainders = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.uint16) if is_half(leaf) else None, params)
        return MasterWeightsState(remainders, _initial_state(name, inner, params))

    def update(
        updates: optax.Updates, state: MasterWeightsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        _check_state(name, state, MasterWeightsState)

        def rounded(index: int, weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
            return split(weights, dtype)

        updates, *new_state = _step(name, inner, rounded, updates, *state, params, extra_args)
        return updates, MasterWeightsState(*new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def stochastic_rounding(inner: optax.GradientTransformation, seed: int = 0) -> optax.GradientTransformationExtraArgs:
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
        _check_state(name, state, StochasticRoundingState)

        def rounded(index: int, weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, None]:
            return round_stochastically(weights, dtype, key_of(bits_seed, index), state.counter), None

        updates, _, inner_state = _step(name, inner, rounded, updates, None, state.inner_state, params, extra_args)
        return updates, StochasticRoundingState(jnp.asarray(state.counter) + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def half_precision_state(
    inner: optax.GradientTransformation, seed: int = 0, exclude: Callable[[str], bool] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that the arrays in its state are stored in bfloat16.

    All float32 arrays in the state of the inner optimizer, such as the moments of Adam, are stored in bfloat16. They
    are cast to float32 before each step, and rounded stochastically to bfloat16 after each step. Rounding to the
    nearest number would lose the small changes of slow moving averages, such as the second moment of Adam. Scalars and
    arrays with other dtypes, such as integers and random keys, do not change. This wrapper alone does not round
    parameters, so 16-bit parameters also need one of the other wrappers.

    Args:
      inner: any optax transformation or an `optax.MultiSteps`. It must not contain a `loss_scaled`. A step must not
        change the structure of the optimizer state (`optax.monitor` does this).
      seed: a nonnegative integer that determines the random bits.
      exclude: a function ``exclude(path) -> bool`` that is called for each float32 or bfloat16 array in the state of
        the inner optimizer, in ``init`` and ``update``. ``path`` is the string that `jax.tree_util.keystr` returns for
        the path of the array in this state, such as ``"[0].nu['kernel']"``. The dtypes of the arrays for which
        ``exclude`` returns True do not change.

    Returns:
      An `optax.GradientTransformationExtraArgs`. It can be combined with the other wrappers:
      ``loss_scaled(master_weights(half_precision_state(inner)))``.

      - ``init(params)`` returns a state with the fields ``counter``, an ``int32[]``, and ``inner_state``, which has the
        structure of the state of the inner optimizer.
      - ``update(updates, state, params=None, **extra_args)`` returns the updates of the inner optimizer and the new
        state.

    Raises:
      ValueError: if ``inner`` is not an optax transformation, if ``seed`` is not a nonnegative integer that fits in
        int32, or if ``exclude`` is not a function of the kind described above. ``init`` raises a `ValueError` if
        ``inner`` contains a `loss_scaled`. ``update`` raises a `ValueError` if the gradients do not have the
        structure of the parameters, if the gradient of a floating-point parameter is neither ``None`` nor
        floating-point, or if ``state`` is not the state of this wrapper.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(3)}
      >>> tx = jls.half_precision_state(optax.adam(0.1), exclude=lambda path: ".nu" in path)
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones(3)}, state, params)
      >>> adam = state.inner_state[0]
      >>> adam.mu["w"].dtype, adam.nu["w"].dtype, adam.count.dtype
      (dtype(bfloat16), dtype('float32'), dtype('int32'))

    **Details.** Some optimizers store a copy of the parameters or gradients, and subtract it from later parameters or
    gradients. Exclude this copy, because its rounding error can be larger than the difference. For example, L-BFGS can
    diverge without ``exclude=lambda path: ".params" in path or ".updates" in path``. The page about 16-bit parameters
    lists these optimizers.

    ``init`` also rounds the initial state stochastically. In most optimizers, the initial arrays are
    zeros, which do not change. Rounding never makes a finite number infinite. The random bits are computed as in
    `stochastic_rounding`, but with a different hash, so the same seed can be used for both wrappers.

    Arrays that the inner optimizer itself stores in bfloat16, for example with ``mu_dtype=jnp.bfloat16``, are also cast
    to float32 before each step, unless they are excluded. Exclude them if the inner optimizer requires their dtype, as
    `optax.apply_if_finite` does. If you insert an old float32 state of the inner optimizer with
    ``state._replace(inner_state=old_state)``, first cast its arrays to the dtypes of ``state.inner_state``. Without
    this cast, the arrays are rounded in the first step, but `loss_scaled` stores the rounded numbers in float32. No
    other step changes the dtype of an array in the state.

    References:
      The optimizers of Transformer Engine, torchtitan and DeepSeek-V3 store the moments in bfloat16, rounded to
      nearest.
    """
    name = "half_precision_state"
    inner = checked_optimizer(inner, f"{name}(inner=...)")
    bits_seed = np.uint32(2 * count(seed, f"{name}(seed=...)") + 1)
    if exclude is not None:
        check_function(exclude, f"{name}(exclude=...)")

    def are_in_half(inner_state: optax.OptState) -> list[bool]:
        with_paths = jax.tree_util.tree_leaves_with_path(inner_state, is_leaf=_is_empty)
        return [is_in_half(jax.tree_util.keystr(path), leaf) for path, leaf in with_paths]

    def is_in_half(path: str, leaf: Any) -> bool:
        if not _tree.is_array(leaf) or leaf.dtype not in (jnp.float32, jnp.bfloat16) or len(leaf.shape) == 0:
            return False
        is_excluded = exclude is not None and exclude(path)
        check_flag(is_excluded, f"{name}(exclude=...)(path)")
        return not is_excluded

    def rounded(inner_state: optax.OptState, counter: jax.Array) -> optax.OptState:
        leaves, structure = jax.tree.flatten(inner_state, is_leaf=_is_empty)
        for index, is_rounded in enumerate(are_in_half(inner_state)):
            leaf = leaves[index]
            if is_rounded and isinstance(leaf, jax.ShapeDtypeStruct):
                leaves[index] = leaf.update(dtype=jnp.bfloat16)
            elif is_rounded and leaf.dtype == jnp.float32:
                leaves[index] = round_stochastically(leaf, jnp.dtype("bfloat16"), key_of(bits_seed, index), counter)
        return jax.tree.unflatten(structure, leaves)

    def init(params: optax.Params) -> HalfPrecisionState:
        inner_state = inner.init(_tree.inexact_only(params))
        _check_no_loss_scale(name, inner_state)
        counter = jnp.zeros([], jnp.int32)
        return HalfPrecisionState(counter, rounded(inner_state, counter))

    def update(
        updates: optax.Updates, state: HalfPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, HalfPrecisionState]:
        _check_state(name, state, HalfPrecisionState)
        grads, trained = _trained(name, updates, params)
        leaves, structure = jax.tree.flatten(state.inner_state, is_leaf=_is_empty)
        for index, is_rounded in enumerate(are_in_half(state.inner_state)):
            leaves[index] = jnp.asarray(leaves[index]).astype(jnp.float32) if is_rounded else leaves[index]
        old_inner = jax.tree.unflatten(structure, leaves)
        new_updates, inner_state = inner.update(grads, old_inner, trained, **extra_args)
        new_updates = combine(new_updates, lambda: updates_of_untrained(updates, params))
        counter = jnp.asarray(state.counter) + 1
        return new_updates, HalfPrecisionState(counter, rounded(with_dtypes_of(old_inner, inner_state), counter))

    return optax.GradientTransformationExtraArgs(init, update)


def float32_params(params: optax.Params, state: chex.ArrayTree) -> optax.Params:
    """Return the float32 weights of 16-bit parameters, as reconstructed by `master_weights`.

    Use the float32 weights for evaluation, moving averages and export.

    Args:
      params: the parameters, or any part of them with the same paths.
      state: any pytree that contains the state of a `master_weights` optimizer, such as the state of `loss_scaled`. If
        it contains several such states (as with `optax.partition`), each of them is used for its own parameters.

    Returns:
      A pytree with the structure of ``params``. Each bfloat16 or float16 array is replaced by its float32 weights. A
      16-bit array that `master_weights` does not update is cast to float32. All other leaves are returned as the same
      objects. The derivatives of the weights with respect to 16-bit parameters are zero, because the weights are
      computed with integer operations. To compute gradients at the float32 weights, differentiate with respect to the
      weights: ``jax.grad(loss_fn)(float32_params(params, state))``.

    Raises:
      ValueError: if ``state`` contains no state of `master_weights`, if several of them belong to the same path, or if
        they do not match the parameters.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
      >>> tx = jls.loss_scaled(jls.master_weights(optax.sgd(0.001)), 1.0)
      >>> state = tx.init(params)
      >>> params, state = tx.update_and_apply({"w": jnp.ones(3)}, state, params)
      >>> params["w"], jls.float32_params(params, state)["w"]
      (Array([1, 1, 1], dtype=bfloat16), Array([0.999, 0.999, 0.999], dtype=float32))
    """
    states = _tree.instances(state, MasterWeightsState)
    if not states:
        raise ValueError(
            f"`float32_params(state=...)` must contain the state of a `master_weights` optimizer, got {shown(state)}. "
            "The order is `float32_params(params, state)`."
        )
    remainders: dict[tuple[str, ...], Any] = {}
    for node in states:
        for path, remainder in jax.tree_util.tree_leaves_with_path(node.remainders):
            if _names(path) in remainders:
                raise ValueError(
                    "`float32_params(state=...)` contains several `master_weights` states with a parameter at "
                    f"{jax.tree_util.keystr(path)!r}. Pass the part of the state that belongs to `params`."
                )
            remainders[_names(path)] = remainder

    def weights(path: Any, leaf: Any) -> Any:
        remainder = remainders.pop(_names(path), None) if is_half(leaf) else None
        if remainder is not None and np.shape(remainder) != np.shape(leaf):
            raise ValueError(
                f"`float32_params(params=...)` contains an array of shape {np.shape(leaf)} at "
                f"{jax.tree_util.keystr(path)!r}, but its shape in `state` is {np.shape(remainder)}. Pass the state "
                "that belongs to `params`."
            )
        return _weights(leaf, remainder)

    num_remainders = len(remainders)
    result = jax.tree_util.tree_map_with_path(weights, params)
    if num_remainders and len(remainders) == num_remainders:
        raise ValueError(
            "`float32_params(params=...)` contains none of the 16-bit parameters of `state`, the first of which is at "
            f"{'/'.join(next(iter(remainders)))!r}. Pass parameters with the same structure as in `init`."
        )
    return result


def uses_half_parameters(state: optax.OptState) -> bool:
    """Return whether an optimizer state contains the state of a wrapper that trains 16-bit parameters."""
    return bool(_tree.instances(state, (MasterWeightsState, StochasticRoundingState)))


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


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names in a path, which do not depend on the types of the containers.

    If the last name is ``"value"``, which is the name of the array in an `nnx.Variable`, the name is omitted.
    """
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names[:-1] if names[-1:] == ("value",) else names


def _is_empty(node: Any) -> bool:
    """Return whether a node is ``None`` or an `optax.MaskedNode`.

    These nodes are counted as leaves, so that the index of a leaf does not depend on which other leaves the optimizer
    trains.
    """
    return node is None or isinstance(node, optax.MaskedNode)


def _trained(name: str, grads: optax.Updates, params: optax.Params | None) -> tuple[optax.Updates, Any]:
    """Return the gradients and the parameters with ``None`` in place of each leaf that is not trained."""
    trained = only_trained(params, grads)
    _check_gradients(f"{name}(...).update(updates=...)", grads, trained)
    return _tree.inexact_only(grads), trained


def _initial_state(name: str, inner: optax.GradientTransformationExtraArgs, params: optax.Params) -> optax.OptState:
    """Return the state of the inner optimizer for 16-bit parameters before the first step."""
    _check_params(f"{name}(...).init(params=...)", params)
    inner_state = inner.init(_tree.widen(_tree.inexact_only(params)))
    _check_no_loss_scale(name, inner_state)
    if uses_half_parameters(inner_state):
        raise ValueError(
            f"`{name}(inner=...)` already contains a `master_weights` or a `stochastic_rounding`. Use only one of "
            "them, because each of them rounds the parameters."
        )
    return inner_state


def _step(
    name: str,
    inner: optax.GradientTransformationExtraArgs,
    rounded: Callable[[int, jax.Array, jnp.dtype], tuple[jax.Array, Any]],
    grads: optax.Updates,
    remainders: chex.ArrayTree,
    inner_state: optax.OptState,
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
      remainders: the remainders of the parameters, or ``None`` if there are none.
      inner_state: the state of the inner optimizer.
      params: the parameters.
      extra_args: the other arguments of the inner optimizer.
    """
    if params is None:
        raise ValueError(
            f"`{name}(...).update(params=...)` must be the parameters, got None. Call `update(grads, state, params)`."
        )
    _check_params(f"{name}(...).update(params=...)", params)
    trained_grads, trained = _trained(name, grads, params)
    structure: Any
    leaves, structure = jax.tree.flatten(trained, is_leaf=_is_empty)
    rests = [None] * len(leaves) if remainders is None else _remainders_of(name, leaves, structure, remainders)

    weights = [_weights(leaf, rest) for leaf, rest in zip(leaves, rests, strict=True)]
    updates, inner_state = inner.update(
        _tree.cast_floating(trained_grads, jnp.float32), inner_state, structure.unflatten(weights), **extra_args
    )
    new_updates = structure.flatten_up_to(updates)
    for index, (leaf, weight) in enumerate(zip(leaves, weights, strict=True)):
        if is_half(leaf):
            new = weight + jnp.asarray(new_updates[index]).astype(jnp.float32)
            # The sum of a number and zero can differ from the number: -0.0 becomes 0.0, and XLA can flush subnormals.
            new = jnp.where(new == weight, weight, new)
            param, rests[index] = rounded(index, new, jnp.dtype(leaf.dtype))
            new_updates[index] = update_between(leaf, param)
    new_updates = combine(jax.tree.unflatten(structure, new_updates), lambda: updates_of_untrained(grads, params))
    return new_updates, jax.tree.unflatten(structure, rests), inner_state


def _weights(leaf: Any, remainder: jax.Array | None) -> Any:
    """Return the float32 weights of a 16-bit parameter, or any other leaf unchanged."""
    if not is_half(leaf):
        return leaf
    return as_float32(jnp.asarray(leaf)) if remainder is None else join(jnp.asarray(leaf), jnp.asarray(remainder))


def _remainders_of(name: str, leaves: list[Any], structure: Any, remainders: chex.ArrayTree) -> list[Any]:
    """Return the bits that each parameter lacks. Raise a `ValueError` if they do not match the parameters."""
    try:
        rests = structure.flatten_up_to(remainders)
    except ValueError as error:
        raise _error_of_other_parameters(name) from error
    for leaf, rest in zip(leaves, rests, strict=True):
        expected = np.shape(leaf) if is_half(leaf) else None
        if not _is_empty(leaf) and expected != (None if rest is None else np.shape(rest)):
            raise _error_of_other_parameters(name)
    return rests


def _error_of_other_parameters(name: str) -> ValueError:
    return ValueError(
        f"`{name}(...).update(state=...)` must belong to these parameters, got the state of parameters with a "
        "different structure or different shapes. Pass the state that `init` or the last `update` returned."
    )


def _check_state(name: str, state: Any, kind: type) -> None:
    """Raise a `ValueError` if a state was not returned by ``init`` of the same wrapper."""
    if not isinstance(state, kind):
        raise ValueError(
            f"`{name}(...).update(state=...)` must be the state of this optimizer, got {shown(state)}. Pass the state "
            "that its `init` returned. The order is `update(grads, state, params)`."
        )


def _check_params(name: str, params: optax.Params) -> None:
    """Raise a `ValueError` unless all floating-point parameters are in bfloat16, float16 or float32."""
    _tree.check_tree(params, name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _tree.is_floating(leaf) and not is_half(leaf) and leaf.dtype != jnp.float32:
            raise ValueError(
                f"`{name}` must contain parameters in bfloat16 or float16 (or float32, for parameters that are not "
                f"rounded), got {leaf.dtype} at {jax.tree_util.keystr(path)!r}. Cast the parameters with "
                "`params = jls.cast_floating(params, jnp.bfloat16)`."
            )


def _check_gradients(name: str, grads: optax.Updates, params: optax.Params) -> None:
    """Raise a `ValueError` if the gradient of a floating-point parameter is not a floating-point array."""
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    structure: Any
    with_paths, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_empty)
    try:
        leaves = structure.flatten_up_to(grads)
    except ValueError as error:
        raise ValueError(f"`{name}` must be gradients with the structure of the parameters. {error}") from error
    for (path, leaf), grad in zip(with_paths, leaves, strict=True):
        if not _is_empty(leaf) and not _tree.is_inexact(grad):
            raise ValueError(
                f"`{name}` must contain floating-point gradients of the parameters, got {shown(grad)} at "
                f"{jax.tree_util.keystr(path)!r}. Compute the gradients with `jax.grad`."
            )


def _check_no_loss_scale(name: str, inner_state: optax.OptState) -> None:
    """Raise a `ValueError` if the inner optimizer contains a loss scale."""
    if _tree.instances(inner_state, LossScale):
        raise ValueError(
            f"`{name}(inner=...)` contains a `loss_scaled`. It must be the outer wrapper, because it unscales the "
            f"gradients. Use the opposite order: `loss_scaled({name}(adamw))`."
        )
