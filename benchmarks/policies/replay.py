"""Every contender, and every classic rule, over a group of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.isolation import Progress
from benchmarks.policies.contenders import contenders
from benchmarks.policies.judge import Judgement, dominated, dynamic_family, judge
from benchmarks.policies.traces import Trace, of_one_length


class Group(NamedTuple):
    """Traces, and what every contender did on them.

    Attributes:
      title: what the traces are.
      traces: as they are, of any length.
      judgements: by the name of the contender.
      is_dominated: by the name of the contender: on which traces some `DynamicLossScale` is better in both.
    """

    title: str
    traces: Sequence[Trace]
    judgements: dict[str, Judgement]
    is_dominated: dict[str, np.ndarray]


def replay(title: str, traces: Sequence[Trace], progress: Progress) -> Group:
    """Let every contender, and every classic rule, go over the traces."""
    same_length = of_one_length(traces)
    makers, classic = contenders(), dynamic_family()
    judgements: dict[str, Judgement] = {}
    family = []
    number = len(makers) + len(classic)
    for name, make in makers.items():
        progress(len(judgements) / number, name)
        judgements[name] = judge([make(trace) for trace in traces], same_length)
    for name, loss_scale in classic.items():
        progress((len(makers) + len(family)) / number, name)
        family.append(judge(loss_scale, same_length))
    return Group(title, traces, judgements, {name: dominated(one, family) for name, one in judgements.items()})
