"""PyTorch's fused Adam, alone and under its `GradScaler`; imported only on a GPU, and only where PyTorch is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]


def steps(shapes: Sequence[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """Steps over parameters of these shapes; each waits for the device itself.

    PyTorch wants gradients of the dtype of the parameters, so float32 is all that can be measured.
    """
    return {
        "torch Adam(fused=True)": _step(shapes, scaled=False),
        "torch GradScaler + Adam": _step(shapes, scaled=True),
    }


def _step(shapes: Sequence[tuple[int, ...]], *, scaled: bool) -> Callable[[], Any]:
    params = [torch.full(shape, 1e-2, device="cuda", requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 1e-2)
    adam = torch.optim.Adam(params, lr=1e-4, fused=True)
    # The fused kernel unscales the gradients in place. With a scale of 1 they stay what they are from step to step.
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.ones((), device="cuda"))

    def step() -> None:
        scaler.step(adam)
        scaler.update()
        torch.cuda.synchronize()

    return step
