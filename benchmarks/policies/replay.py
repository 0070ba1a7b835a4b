"""Replay of all contenders, and of all settings of `DynamicLossScale`, over a group of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.harness.isolation import Progress
from benchmarks.policies.contenders import contenders
from benchmarks.policies.judge import Judgement, dominated, dynamic_family, judge
from benchmarks.policies.traces import Trace, of_one_length


class Group(NamedTuple):
    """A group of traces, and the results of all contenders on them.

    Attributes:
      title: a description of the traces.
      traces: the traces, which may have different lengths.
      judgements: the results of each contender, by its name.
      is_dominated: ``bool[traces]`` for each contender, by its name: whether at least one `DynamicLossScale` has fewer
        skipped steps and also fewer unused bits on the trace.
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
        """The length of each trace in steps."""
        return np.array([len(trace.log2_largest) for trace in self.traces])

    def skipped_of_1000(self, name: str) -> np.ndarray:
        """Return, for each trace, the number of steps per 1,000 steps that a contender skipped."""
        return 1000 * self.judgements[name].skipped / self.steps


def replay(title: str, traces: Sequence[Trace], progress: Progress) -> Group:
    """Replay all contenders and all settings of `DynamicLossScale` over the traces."""
    same_length = of_one_length(traces)
    makers, classic = contenders(), dynamic_family()
    loss_scales = {name: [make(trace) for trace in traces] for name, make in makers.items()} | classic
    judgements: dict[str, Judgement] = {}
    for name, loss_scale in loss_scales.items():
        progress(len(judgements) / len(loss_scales), name)
        judgements[name] = judge(loss_scale, same_length)
    family = [judgements.pop(name) for name in classic]
    return Group(title, traces, judgements, {name: dominated(one, family) for name, one in judgements.items()})
