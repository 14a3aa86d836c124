"""A regression on a noisy hyperplane, whose points each rank draws for itself."""

from __future__ import annotations

import torch
from torch import nn

_TEST_POINTS = 1024
_STEEPNESS = 10.0  # variance of the values before the noise


class Hyperplane:
    """One rank's points, and points that all ranks are tested with."""

    def __init__(
        self, dimensions: int, *, rank: int, seed: int, points: int = 2048, batch: int = 32, noise: float = 1.0
    ) -> None:
        self._dimensions = dimensions
        self._batch = batch
        self._noise = noise
        shared = torch.Generator().manual_seed(seed)
        plane = torch.randn(dimensions, 1, generator=shared) * (_STEEPNESS / dimensions) ** 0.5
        self._test_points = torch.randn(_TEST_POINTS, dimensions, generator=shared)
        self._test_values = self._test_points @ plane
        own = torch.Generator().manual_seed(1_000 * (seed + 1) + rank)
        self._points = torch.randn(points, dimensions, generator=own)
        self._values = self._points @ plane + noise * torch.randn(points, 1, generator=own)

    def model(self) -> nn.Linear:
        """The model that all ranks start from: zeros."""
        model = nn.Linear(self._dimensions, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """On the batch of a step."""
        begin = step * self._batch % len(self._points)
        batch = slice(begin, begin + self._batch)
        return nn.functional.mse_loss(model(self._points[batch]), self._values[batch])

    @torch.no_grad()
    def test_loss(self, model: nn.Module) -> float:
        """On the points for testing; the variance of the noise is what a perfect model has."""
        return nn.functional.mse_loss(model(self._test_points), self._test_values).item() + self._noise**2
