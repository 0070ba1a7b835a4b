"""From what was found, to rules that a person can judge: as few names as tell the products apart, and why."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_lossscale._autocast import PrecisionRule
from jax_lossscale.diagnostics._limits import limits_of
from jax_lossscale.diagnostics._report import percent, power_of_two
from jax_lossscale.diagnostics.programs._probes import LEFT, NUMBER_OF_ROLES, RESULT, RIGHT, ProductSite, Statistics
from jax_lossscale.diagnostics.programs._trials import NARROW, WIDE, Program, Trial

_PRECISIONS = ("narrow", "wide_result", "wide")
# What rounds by so much is out of range, below; in range, float16 rounds by 3e-4 and bfloat16 by 2e-3.
_OUT_OF_RANGE = 0.02


def rules_for(sites: Sequence[ProductSite], levels: np.ndarray, reasons: Sequence[str]) -> list[PrecisionRule]:
    """A rule for each product that is not narrow, or for several that are alike."""
    rules: list[PrecisionRule] = []
    for number, level in enumerate(levels):
        if level == NARROW or any(rule.matches(sites[number].operation, sites[number].place()) for rule in rules):
            continue
        for names in _names(sites[number]):
            rule = PrecisionRule(_PRECISIONS[level], **names, reason=reasons[number])
            matched = [other for other, site in enumerate(sites) if rule.matches(site.operation, site.place())]
            if all(levels[other] == level for other in matched):
                break
        rules.append(rule)
    return rules


def _names(site: ProductSite) -> list[dict[str, str]]:
    """Ways to name a product, the one that survives most edits first."""
    operation, source = {"operation": site.operation}, Path(site.source).name
    layer = {"layer": glob.escape(site.layer)} if site.layer else {}
    code = {"code": site.code} if site.code else {}
    found = [{**layer, **operation}] if layer else []
    if code:
        found += [{**operation, **code}, {**layer, **operation, **code}]
    return [*found, {**layer, **operation, **code, "source": glob.escape(source)}]


def reasons_of(program: Program, trial: Trial) -> list[str]:
    """For each product that is not narrow, what would be wrong if it were."""
    measured = program.measured_at(trial.scale)
    return [
        _reason(Statistics(*measured[site].T), trial.scale, program.dtype) if level != NARROW else ""
        for site, level in enumerate(trial.levels)
    ]


def _reason(of: Statistics, scale: float, dtype: jnp.dtype) -> str:
    limits = limits_of(dtype)
    cotangents = range(NUMBER_OF_ROLES, 2 * NUMBER_OF_ROLES)
    for role, name in ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result")):
        if of.largest[role] >= limits.overflow:
            return f"{name} reaches {of.largest[role]:.2g}"
    for role, name in ((LEFT, "an operand"), (RIGHT, "an operand"), (RESULT, "its result")):
        if of.error[role] > _OUT_OF_RANGE:
            return f"{name} is at most {of.largest[role]:.2g}, and much of it below the range of {dtype.name}"
    largest = max(of.largest[role] for role in cotangents)
    if largest >= limits.overflow:
        return f"its gradients reach {largest:.2g} at a loss scale of {power_of_two(scale)}"
    for role in cotangents:
        if of.error[role] > _OUT_OF_RANGE:
            return (
                f"its gradients are at most {of.largest[role]:.2g} at a loss scale of {power_of_two(scale)}, and much "
                f"of them below the range of {dtype.name}"
            )
    return f"what is made of it is sensitive to rounding, which is {percent(of.error[RESULT])} here"
