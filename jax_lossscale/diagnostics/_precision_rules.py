"""Rules of a `PrecisionPolicy` for the matmuls that must not be in half precision.

A person can judge these rules, because each uses as few names as distinguish its matmuls from all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_lossscale._autocast import PrecisionRule
from jax_lossscale.diagnostics._precision_probes import MatmulSite

_PRECISIONS = ("half", "float32_result", "float32")  # by level


def rules_for(sites: Sequence[MatmulSite], levels: np.ndarray, reasons: Sequence[str] | None) -> list[PrecisionRule]:
    """Return a rule for each matmul, or group of similar matmuls, that is not in half precision.

    The first rule that matches decides, so the highest precision comes first. If names do not distinguish two matmuls,
    both have the higher precision.
    """
    rules: list[PrecisionRule] = []
    for number in sorted(map(int, np.flatnonzero(levels)), key=lambda number: -int(levels[number])):
        level = int(levels[number])
        if any(rule.matches(sites[number].operation, sites[number].location) for rule in rules):
            continue
        for names in _names(sites[number]):
            rule = PrecisionRule(_PRECISIONS[level], **names, reason=reasons[number] if reasons else "")
            matched = [other for other, site in enumerate(sites) if rule.matches(site.operation, site.location)]
            if all(levels[other] == level for other in matched):
                break
        rules.append(rule)
    return [rule for rule in rules if not any(_contains(other, rule) for other in rules)]


def _contains(one: PrecisionRule, other: PrecisionRule) -> bool:
    """Tell whether one rule matches all that the other matches, and decides it alike."""
    patterns, others = ({*rule.get_config().items()} - {("reason", rule.reason)} for rule in (one, other))
    return patterns < others


def _names(site: MatmulSite) -> list[dict[str, str]]:
    """List ways to name a product, the one that survives most edits first."""
    location, operation = site.location, {"operation": site.operation}
    layer = {"layer": location.layer} if location.layer else {}
    parameter = {"parameter": location.parameter}  # "" if it takes none
    function = {"function": location.functions[0]} if location.functions else {}
    ways = [layer, parameter if location.parameter else {}, function]
    ways += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in ways if names]
