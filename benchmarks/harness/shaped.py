"""Parameters whose backward takes given times, without computing anything."""

from __future__ import annotations

import time
from typing import Any

import torch


class Shaped:
    """A chain of parameters: backward sleeps for each, from the last to the first, and makes its gradient.

    Args:
        shapes: of the parameters.
        seconds: that backward takes for each.
    """

    def __init__(self, shapes: list[tuple[int, ...]], seconds: list[float]) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self._seconds = seconds

    def backward(self) -> None:
        """Let every parameter have its gradient, in its time."""
        loss = torch.zeros(1)
        for parameter, seconds in zip(self.parameters, self._seconds, strict=True):
            loss = _Layer.apply(loss, parameter, seconds)
        loss.backward()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.gradient = torch.ones_like(parameter)
        ctx.seconds = seconds
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, ctx.gradient, None
