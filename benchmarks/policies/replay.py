"""Every contender, and every classic rule, over a group of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.harness.isolation import Progress
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

    @property
    def kinds(self) -> np.ndarray:
        """The kind of each trace."""
        return np.array([trace.kind for trace in self.traces])

    @property
    def steps(self) -> np.ndarray:
        """The length of each trace."""
        return np.array([len(trace.log2_largest) for trace in self.traces])

    def skipped_of_1000(self, name: str) -> np.ndarray:
        """Of each trace, how many of 1,000 steps a contender skipped."""
        return 1000 * self.judgements[name].skipped / self.steps


def replay(title: str, traces: Sequence[Trace], progress: Progress) -> Group:
    """Let every contender, and every classic rule, go over the traces."""
    same_length = of_one_length(traces)
    makers, classic = contenders(), dynamic_family()
    loss_scales = {name: [make(trace) for trace in traces] for name, make in makers.items()} | classic
    judgements: dict[str, Judgement] = {}
    for name, loss_scale in loss_scales.items():
        progress(len(judgements) / len(loss_scales), name)
        judgements[name] = judge(loss_scale, same_length)
    family = [judgements.pop(name) for name in classic]
    return Group(title, traces, judgements, {name: dominated(one, family) for name, one in judgements.items()})
