"""Behavior of loss scales on traces of gradient magnitudes: skipped steps, unused bits, and steps to arrive.

A scale has arrived when it is close to the largest scale that does not overflow. The modules, in reading order:

- `traces`: recorded and synthetic traces;
- `contenders`: the loss scales that are compared;
- `judge`: measurement of one loss scale;
- `replay`: measurement of all loss scales;
- `inside`: tables about values inside the backward pass that are much larger than the gradients;
- `tables`: the benchmark, ``python -m benchmarks policies``;
- `figure`: the plot of its results.
"""

from benchmarks.policies.tables import run

__all__ = ["run"]
