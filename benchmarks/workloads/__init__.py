"""Small trainings of different kinds on real data that is included in installed packages.

`workload` defines a workload, and `training` runs a whole training in one compiled program. The workloads are functions
whose arguments are all optional. The arguments are used only to make a workload smaller.
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
