"""DeepSpeed's dynamic loss scales, by their state; DeepSpeed is not needed.

Read against DeepSpeed 0.19.8, where the rule is written down twice: ``FP16_Optimizer`` has no hysteresis and does not
save its floor, the ``DynamicLossScaler`` of ZeRO has both. With a ``loss_scale_window`` of N, either grows on the
finite step N + 1 after the start or an overflow, and N steps after a growth.

Examples:
  >>> from jax_lossscale.interop.deepspeed import from_deepspeed
  >>> state_dict = {
  ...     "dynamic_loss_scale": True,
  ...     "cur_scale": 65536.0,
  ...     "cur_iter": 400,
  ...     "last_overflow_iter": 99,
  ...     "scale_factor": 2.0,
  ...     "scale_window": 1000,
  ... }
  >>> import warnings
  >>> with warnings.catch_warnings(action="ignore"):
  ...     loss_scale = from_deepspeed(state_dict)
  >>> loss_scale.increment_period, int(loss_scale.num_good_steps)
  (1001, 300)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, FixedLossScale, LossScale
from jax_lossscale._loss_scale._arguments import positive_normal_number
from jax_lossscale.interop import _carry

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_SCALER = ("min_scale", "delayed_shift", "cur_hysteresis", "consecutive_hysteresis")
_DEFAULT_FLOOR = 1.0  # of DeepSpeed's configuration: "min_loss_scale"


def from_deepspeed(state: Mapping[str, Any], *, min_loss_scale: float | None = None) -> LossScale:
    """Carry on where DeepSpeed stopped.

    Args:
      state: what ``FP16_Optimizer.state_dict()`` returned; or that of a ZeRO optimizer, which holds its scaler under
        ``"loss_scaler"``; or ``vars(loss_scaler)``.
      min_loss_scale: the floor, if the state does not have it. By default 1, which is DeepSpeed's, with a warning.

    Returns:
      A `DynamicLossScale`; or a `FixedLossScale` that skips overflows, if the state is that of a static scale.

    Raises:
      ValueError: if an entry is missing or is not a number, if the scale is 0, infinite or NaN, or if hysteresis is 0,
        with which DeepSpeed never lowers the scale.
    """
    if isinstance(state, Mapping) and "loss_scaler" in state:
        state = vars(state["loss_scaler"])
    name = "from_deepspeed(state=...)"
    given_floor = None
    if min_loss_scale is not None:
        given_floor = positive_normal_number(min_loss_scale, "from_deepspeed(min_loss_scale=...)")
    (scale,) = _carry.entries(state, _STATE[:1], name)
    scale = _carry.number(scale, f"{name}['cur_scale']")
    if not state.get("dynamic_loss_scale", state.get("dynamic", True)):
        return FixedLossScale.from_config({"loss_scale_value": scale, "skip_nonfinite": True})

    _, current, last_overflow, factor, window = _carry.entries(state, _STATE, name)
    window = _carry.integer(window, f"{name}['scale_window']")
    last_overflow = _carry.integer(last_overflow, f"{name}['last_overflow_iter']")  # -1 where there was none
    num_finite = _carry.counter(current, f"{name}['cur_iter']") - last_overflow - 1
    lost = [
        f"DeepSpeed grows on the finite step {window} + 1 after the start or an overflow, and {window} after a growth; "
        f"here, with `increment_period={window + 1}`, always on step {window} + 1"
    ]
    hysteresis: dict[str, Any] = {}
    hysteresis_left = None
    if "delayed_shift" in state:
        floor, delay, hysteresis_left, is_consecutive = _carry.entries(state, _SCALER, name)
        hysteresis["hysteresis"] = _carry.integer(delay, f"{name}['delayed_shift']")
        hysteresis["hysteresis_refill"] = "finite" if is_consecutive else "growth"
        hysteresis_left = _carry.counter(hysteresis_left, f"{name}['cur_hysteresis']")
        floor = _carry.number(floor, f"{name}['min_scale']") if given_floor is None else given_floor
        if state.get("raise_error_at_min_scale", True):
            lost.append("DeepSpeed raises at the floor; here `jls.raise_if_stuck` does, where you call it")
    elif given_floor is None:
        floor = _DEFAULT_FLOOR
        lost.append("the state does not say what the floor was; `min_loss_scale` becomes 1, DeepSpeed's default")
    else:
        floor = given_floor
    loss_scale = DynamicLossScale(
        max(scale, floor),
        window + 1,
        _carry.number(factor, f"{name}['scale_factor']"),
        min_loss_scale=floor,
        **hysteresis,
    )
    _carry.warn("from_deepspeed", lost + _carry.below_floor(scale, floor))
    # From the last overflow on, DeepSpeed grows before steps N, 2 N, ...: what remains to the next is carried over.
    num_good_steps = (num_finite - 1) % window + 1 if num_finite > 0 else 0
    return _carry.with_state(loss_scale, scale, num_good_steps, hysteresis_left)


def to_deepspeed(loss_scale: LossScale) -> dict[str, Any]:
    """The entries that DeepSpeed's two dynamic scales restore.

    ::

        optimizer.load_state_dict({**optimizer.state_dict(), **to_deepspeed(loss_scale)})  # FP16_Optimizer
        vars(optimizer.loss_scaler).update(to_deepspeed(loss_scale))  # ZeRO

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      A dictionary of Python numbers and bools, with the floor and the hysteresis of ZeRO's scaler (``FP16_Optimizer``
      ignores these). DeepSpeed has no ceiling, and lowers the scale by the same factor by which it raises it. If
      ``loss_scale`` differs, a warning says so.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    loss_scale = _carry.check_dynamic(loss_scale, "to_deepspeed")
    window = max(1, loss_scale.increment_period - 1)
    lost = _carry.without_counterpart(loss_scale, takes_hysteresis=True)
    lost.append(
        f"DeepSpeed, with `scale_window={window}`, grows on the finite step {window + 1} after an overflow, and "
        f"{window} after a growth; `increment_period` is {loss_scale.increment_period}"
    )
    _carry.warn("to_deepspeed", lost)
    scale, num_good_steps = _carry.scale_and_counter(loss_scale)
    left = 1 if loss_scale.hysteresis_left is None else max(1, int(loss_scale.hysteresis_left))
    state = (scale, min(num_good_steps, window), -1, loss_scale.multiplier, window)
    scaler = (loss_scale.min_loss_scale, loss_scale.hysteresis, left, loss_scale.hysteresis_refill == "finite")
    return {
        "dynamic_loss_scale": True,
        **dict(zip(_STATE, state, strict=True)),
        **dict(zip(_SCALER, scaler, strict=True)),
    }
