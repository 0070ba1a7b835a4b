"""Megatron-LM's ``DynamicGradScaler``, by its arguments and its state dictionary; Megatron is not needed.

Read against megatron-core 0.16.1. The rule is the same: hysteresis that only growth refills (and so counts bad steps
that do not follow one another, too). Megatron has no ceiling, and compares its counter with ``==``.

Examples:
  >>> from jax_lossscale.interop.megatron import MEGATRON_DEFAULTS, from_megatron
  >>> state_dict = {"scale": 65536.0, "growth_tracker": 12, "hysteresis_tracker": 1}
  >>> loss_scale = from_megatron({**MEGATRON_DEFAULTS, "growth_interval": 500}, state_dict)
  >>> float(loss_scale()), int(loss_scale.num_good_steps), int(loss_scale.hysteresis_left)
  (65536.0, 12, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale.interop import _carry

_CONFIG = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
_STATE = ("scale", "growth_tracker", "hysteresis_tracker")

MEGATRON_DEFAULTS: dict[str, Any] = dict(zip(_CONFIG, (2.0**32, 1.0, 2.0, 0.5, 1000, 2), strict=True))
"""What ``OptimizerConfig`` of megatron-core 0.16.1 makes its scaler with, where the command line does not say."""


def from_megatron(config: Mapping[str, Any], state_dict: Mapping[str, Any] | None = None) -> DynamicLossScale:
    """Carry on where a ``DynamicGradScaler`` stopped, or begin as it would.

    Args:
      config: the arguments that it was made with, which its checkpoint does not hold. On Megatron's command line they
        are ``--initial-loss-scale``, ``--min-loss-scale``, ``--loss-scale-window`` (``growth_interval``) and
        ``--hysteresis``; the factors are 2 and 0.5. `MEGATRON_DEFAULTS` has the arguments of a run that sets none of
        them.
      state_dict: what ``DynamicGradScaler.state_dict()`` returned; its ``scale`` is a tensor of one element, or a
        number. ``None`` for a fresh start.

    Returns:
      A `DynamicLossScale` with Megatron's configuration and state. A ``hysteresis_tracker`` below 0, as Megatron lets
      it fall, is carried as 0, which means the same.

    Raises:
      ValueError: if an entry is missing or is not a number, or if the configuration makes no sense.
    """
    name = "from_megatron(config=...)"
    values = dict(zip(_CONFIG, _carry.entries(config, _CONFIG, name), strict=True))
    numbers = {key: _carry.number(values[key], f"{name}[{key!r}]") for key in _CONFIG[:4]}
    period, hysteresis = (_carry.integer(values[key], f"{name}[{key!r}]") for key in _CONFIG[4:])
    loss_scale = DynamicLossScale(
        numbers["initial_scale"],
        period,
        numbers["growth_factor"],
        backoff_factor=numbers["backoff_factor"],
        min_loss_scale=numbers["min_scale"],
        hysteresis=hysteresis,
        hysteresis_refill="growth",
    )
    if state_dict is None:
        return loss_scale
    name = "from_megatron(state_dict=...)"
    scale, num_good_steps, hysteresis_left = _carry.entries(state_dict, _STATE, name)
    scale = _carry.number(scale, f"{name}['scale']")
    num_good_steps = _carry.counter(num_good_steps, f"{name}['growth_tracker']")
    hysteresis_left = max(0, _carry.integer(hysteresis_left, f"{name}['hysteresis_tracker']"))
    lost = _carry.past_period(num_good_steps, period) + _carry.below_floor(scale, loss_scale.min_loss_scale)
    if hysteresis_left > hysteresis:
        lost.append(
            f"{hysteresis_left} bad steps are left to forgive and `hysteresis` is {hysteresis}: the state is of a run "
            f"with another configuration, and at most {hysteresis} are carried over"
        )
    _carry.warn("from_megatron", lost)
    return _carry.with_state(loss_scale, scale, num_good_steps, min(hysteresis_left, hysteresis))


def to_megatron(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a ``DynamicGradScaler``, and its state dictionary.

    ::

        config, state_dict = to_megatron(loss_scale)
        scaler = DynamicGradScaler(**config)
        scaler.load_state_dict({**state_dict, "scale": torch.tensor([state_dict["scale"]])})

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      ``(config, state_dict)``, dictionaries of Python numbers. Megatron has no ceiling, and refills its hysteresis on
      growth. If ``loss_scale`` differs, a warning says so.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    loss_scale = _carry.check_dynamic(loss_scale, "to_megatron")
    lost = _carry.without_counterpart(loss_scale, takes_backoff=True, takes_hysteresis=True)
    if loss_scale.hysteresis > 1 and loss_scale.hysteresis_refill != "growth":
        lost.append(f"`hysteresis_refill` is {loss_scale.hysteresis_refill!r}, and the peer refills on growth only")
    _carry.warn("to_megatron", lost)
    values = (
        loss_scale.initial_loss_scale,
        loss_scale.min_loss_scale,
        loss_scale.multiplier,
        _carry.backoff_factor(loss_scale),
        loss_scale.increment_period,
        loss_scale.hysteresis,
    )
    left = 1 if loss_scale.hysteresis_left is None else int(loss_scale.hysteresis_left)
    state = (*_carry.scale_and_counter(loss_scale), left)
    return dict(zip(_CONFIG, values, strict=True)), dict(zip(_STATE, state, strict=True))
