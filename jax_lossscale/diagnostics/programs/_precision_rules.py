"""From what was found, to rules that a person can judge: as few names as tell the products apart, and why."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jax_lossscale._autocast import PrecisionRule
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import percent, power_of_two
from jax_lossscale.diagnostics.programs._probes import LEFT, NUMBER_OF_ROLES, RESULT, RIGHT, ProductSite, Statistics
from jax_lossscale.diagnostics.programs._trials import NARROW, WIDE, Program, Trial

_PRECISIONS = ("narrow", "wide_result", "wide")


def rules_for(sites: Sequence[ProductSite], levels: np.ndarray, reasons: Sequence[str]) -> list[PrecisionRule]:
    """A rule for each product that is not narrow, or for several that are alike.

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
    """Whether a rule says all that another one says, and more."""
    patterns, others = ({*rule.get_config().items()} - {("reason", rule.reason)} for rule in (one, other))
    return patterns < others


def _names(site: ProductSite) -> list[dict[str, str]]:
    """Ways to name a product, the one that survives most edits first."""
    place, operation = site.place, {"operation": site.operation}
    layer = {"layer": glob.escape(place.layer)} if place.layer else {}
    parameter = {"parameter": place.parameter}  # "" if it takes none
    function = {"function": place.functions[0]} if place.functions else {}
    found = [layer, parameter if place.parameter else {}, function]
    found += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in found if names]


def deviation(error: float) -> str:
    """How far something is from float32's, as a part of a sentence."""
    if not math.isfinite(error):
        return "not finite"
    return f"off by {percent(error)}" if error < 1 else "wrong altogether"


def reasons_of(program: Program, trial: Trial, most: int) -> list[str]:
    """For each product that is not narrow, what would be wrong if it were; until so many gradients are spent."""
    measured: dict[float, np.ndarray] = {}
    reasons = [""] * len(trial.levels)
    for site in map(int, np.flatnonzero(trial.levels)):
        levels = trial.levels.copy()
        levels[site] = NARROW
        scale = program.best_scale(levels)
        if scale not in measured and program.spent < most:
            measured[scale] = program.measured_at(scale)
        if scale in measured:
            reasons[site] = _out_of_range(measured[scale], site, levels, scale, program.dtype)
        if not reasons[site] and program.spent < most:
            without = program.trial(levels)
            reasons[site] = f"narrow, {without.where} is {deviation(without.error)}"
        reasons[site] = reasons[site] or "what is made of it is sensitive to rounding"
    return reasons


def _out_of_range(measured: np.ndarray, site: int, levels: np.ndarray, scale: float, dtype: jnp.dtype) -> str:
    """What leaves the range of a dtype if a product is narrow, at the best loss scale that there is then."""
    limits, name = limits_of(dtype), dtype.name
    largest, error = Statistics(*np.moveaxis(measured, -1, 0))
    too_small = 2 * float(jnp.finfo(dtype).eps)  # in range, rounding makes errors of an eighth of that
    for role, what in ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result")):
        if largest[site, role] >= limits.overflow:
            return f"{what} reaches {largest[site, role]:.2g}"
    for role, what in ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result")):
        if error[site, role] > too_small:
            return f"{what} is at most {largest[site, role]:.2g}, much of it too small for {name}"
    cotangents = slice(NUMBER_OF_ROLES, None)
    if error[site, cotangents].max() > too_small:
        role = NUMBER_OF_ROLES + int(error[site, cotangents].argmax())
        fitting = limits.overflow / max(largest[site, cotangents].max(), 1e-30)
        log2 = math.floor(math.log2(fitting)) - 1
        if log2 < 1:
            return (
                f"its gradients reach {largest[site, cotangents].max():.2g} at a loss scale of {power_of_two(scale)}; "
                f"at another place, with the same names, they are too small for {name}; to have it narrow, give the "
                "part of the loss that they come from a scale of its own: `jls.scale_gradient(part, 2.0**n)`, "
                "`jls.unscale_gradient(parameters_and_inputs, 2.0**n)`"
            )
        return (
            f"its gradients are at most {largest[site, role]:.2g}, too small for {name}, at a loss scale of "
            f"{power_of_two(scale)}, above which others overflow; to have it narrow, give its part a scale of its own: "
            f"`jls.scale_gradient(result, 2.0**{log2})`, `jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`"
        )
    starving = (error[:, cotangents].max(axis=1) > too_small) & (levels < WIDE)
    if starving.any() and largest[site, cotangents].max() == largest[levels < WIDE, cotangents].max():
        return (
            f"its gradients reach {largest[site, cotangents].max():.2g} at a loss scale of {power_of_two(scale)}, at "
            f"which those of other parts are too small for {name}; to have it narrow, give those a scale of their own, "
            "with `jls.scale_gradient` and `jls.unscale_gradient`"
        )
    return ""
