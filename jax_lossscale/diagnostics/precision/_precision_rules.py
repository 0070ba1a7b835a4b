"""From what was found, to rules that a person can judge: as few names as tell the products apart, and why."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_lossscale._autocast import PrecisionRule
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import off, power_of_two
from jax_lossscale.diagnostics.precision._probes import LEFT, NUMBER_OF_ROLES, RESULT, RIGHT, Measured, ProductSite
from jax_lossscale.diagnostics.precision._search import is_too_small
from jax_lossscale.diagnostics.precision._trials import NARROW, WIDE, Trial, Trials

_PRECISIONS = ("narrow", "wide_result", "wide")
# Why `find_precision` widens a product: the reasons of its rules.

REASONS = {
    "overflow": "{what} reaches {largest:.2g}",
    "underflow": "{what} is at most {largest:.2g}, much of it too small for {dtype}",
    "small gradients": "its gradients are at most {largest:.2g}, too small for {dtype}, at a loss scale of {scale}, "
    "above which others overflow; to have it narrow, give its part a scale of its own: "
    "`jls.scale_gradient(result, 2.0**{log2})`, `jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`",
    "large gradients": "its gradients reach {largest:.2g} at a loss scale of {scale}, at which others are too small "
    "for {dtype}; to have it narrow, give the small ones a scale of their own, with `jls.scale_gradient` and "
    "`jls.unscale_gradient`",
    "error": "narrow, {where} is {off}",
    "unknown": "what is made of it is sensitive to rounding",
}


def rules_for(sites: Sequence[ProductSite], levels: np.ndarray, reasons: Sequence[str]) -> list[PrecisionRule]:
    """Make a rule for each product that is not narrow, or for several that are alike.

    The first that matches decides, so the widest come first: where names do not tell products apart, too much is wide.
    """
    rules: list[PrecisionRule] = []
    for number in sorted(map(int, np.flatnonzero(levels)), key=lambda number: -int(levels[number])):
        level = int(levels[number])
        if any(rule.matches(sites[number].operation, sites[number].place) for rule in rules):
            continue
        for names in _names(sites[number]):
            rule = PrecisionRule(_PRECISIONS[level], **names, reason=reasons[number])
            matched = [other for other, site in enumerate(sites) if rule.matches(site.operation, site.place)]
            if all(levels[other] == level for other in matched):
                break
        rules.append(rule)
    return [rule for rule in rules if not any(_contains(other, rule) for other in rules)]


def _contains(one: PrecisionRule, other: PrecisionRule) -> bool:
    """Tell whether one rule matches all that the other matches, and decides it alike."""
    patterns, others = ({*rule.get_config().items()} - {("reason", rule.reason)} for rule in (one, other))
    return patterns < others


def _names(site: ProductSite) -> list[dict[str, str]]:
    """List ways to name a product, the one that survives most edits first."""
    place, operation = site.place, {"operation": site.operation}
    layer = {"layer": glob.escape(place.layer)} if place.layer else {}
    parameter = {"parameter": place.parameter}  # "" if it takes none
    function = {"function": place.functions[0]} if place.functions else {}
    ways = [layer, parameter if place.parameter else {}, function]
    ways += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in ways if names]


def reasons_of(trials: Trials, trial: Trial, most: int) -> list[str]:
    """Say of each product that is not narrow what would be wrong if it were; until so many gradients are spent."""
    measured: dict[float, Measured] = {}
    reasons = [""] * len(trial.levels)
    for site in map(int, np.flatnonzero(trial.levels)):
        levels = trial.levels.copy()
        levels[site] = NARROW
        scale = trials.best_scale(levels)
        if scale not in measured and trials.spent < most:
            measured[scale] = trials.measured_at(scale)
        kind, numbers = "", dict[str, Any]()
        if scale in measured:
            kind, numbers = _out_of_range(measured[scale], site, levels, trials.dtype)
        if not kind and trials.spent < most:
            without = trials.trial(levels)
            kind, numbers = "error", {"where": without.where, "off": off(without.error)}
        named = {"dtype": trials.dtype.name, "scale": power_of_two(scale)}
        reasons[site] = REASONS[kind or "unknown"].format(**named, **numbers)
    return reasons


def _out_of_range(measured: Measured, site: int, levels: np.ndarray, dtype: jnp.dtype) -> tuple[str, dict[str, Any]]:
    """Find what leaves the range of a dtype if a product is narrow, at the best loss scale that there is then."""
    overflow, largest = limits_of(dtype).overflow, measured.largest
    too_small = is_too_small(measured, dtype)
    for kind, is_out in (("overflow", largest[site] >= overflow), ("underflow", too_small[site])):
        for role, what in ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result")):
            if is_out[role]:
                return kind, {"what": what, "largest": largest[site, role]}
    gradients = slice(NUMBER_OF_ROLES, None)
    top = largest[site, gradients].max()
    if too_small[site, gradients].any():
        log2 = math.floor(math.log2(overflow / max(top, 1e-30))) - 1
        role = NUMBER_OF_ROLES + int(measured.error[site, gradients].argmax())
        if log2 >= 1:
            return "small gradients", {"largest": largest[site, role], "log2": log2}
        return "large gradients", {"largest": top}  # and small ones where the same names stand
    starving = too_small[:, gradients].any(axis=1) & (levels < WIDE)
    if starving.any() and top == largest[levels < WIDE, gradients].max():
        return "large gradients", {"largest": top}
    return "", {}
