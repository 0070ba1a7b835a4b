"""Small real trainings that differ in kind, on data that comes inside packages.

`workload` says what a workload is, `training` trains one, whole, in one compiled program. The workloads are functions
without any argument that they need: sizes are given only to make them smaller.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.workloads import images, regressions, text
from benchmarks.workloads.workload import Workload

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "transformer": text.transformer,
    "convnet": images.convnet,
    "gru": text.gru,
    "pinn": regressions.pinn,
    "wgan_gp": images.wgan_gp,
    "diffusion": images.diffusion,
    "embeddings": regressions.embeddings,
    "many_outputs": regressions.many_outputs,
    "tiny_loss": regressions.tiny_loss,
    "two_branches": regressions.two_branches,
}

__all__ = ["WORKLOADS", "Workload"]
