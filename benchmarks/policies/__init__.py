"""How loss scales do on traces of what gradients were: skipped steps, unused bits, steps to arrive.

Reading order: `traces` are what is replayed, `contenders` what is compared, among them the `comparators` of other
libraries; `judge` measures one, `replay` all; `tables` is ``python -m benchmarks policies``, `figure` its picture.
`inside` contains the tables about values inside the backward pass that are far larger than the gradients.
"""

from benchmarks.policies.tables import run

__all__ = ["run"]
