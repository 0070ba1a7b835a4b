"""Generation of the `PrecisionPolicy` rules for the matmuls that must not be in half precision.

Each rule contains only as many patterns as necessary to distinguish its matmuls from all other matmuls, so that the
rules are easy to review.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_lossscale._autocast import PrecisionRule
from jax_lossscale.diagnostics._precision_probes import MatmulSite

# The names of the precision levels `HALF`, `FLOAT32_RESULT` and `FLOAT32`, in that order.
_PRECISIONS = ("half", "float32_result", "float32")


def rules_for(sites: Sequence[MatmulSite], levels: np.ndarray, reasons: Sequence[str] | None) -> list[PrecisionRule]:
    """Return a rule for each matmul, or group of similar matmuls, that is not in half precision.

    The first matching rule of a policy applies, so the rules that select ``"float32"`` precede the rules that select
    ``"float32_result"``. If no pattern distinguishes two matmuls, both matmuls get the higher precision.

    Args:
      sites: the sites of the matmuls.
      levels: the precision of each site, ``int[sites]``.
      reasons: for each site, the reason for its precision. If ``reasons`` is ``None``, the rules have no reasons.
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
    """Return whether ``one`` has the same precision as ``other`` and matches every operation that ``other`` matches."""
    patterns, others = ({*rule.get_config().items()} - {("reason", rule.reason)} for rule in (one, other))
    return patterns < others


def _names(site: MatmulSite) -> list[dict[str, str]]:
    """Return sets of patterns that match a matmul, starting with patterns that stay valid after most code changes."""
    location, operation = site.location, {"operation": site.operation}
    layer = {"layer": location.layer} if location.layer else {}
    parameter = {"parameter": location.parameter}  # An empty string matches only matmuls without a parameter.
    function = {"function": location.functions[0]} if location.functions else {}
    ways = [layer, parameter if location.parameter else {}, function]
    ways += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in ways if names]
