"""What all recipes train on: this rank's share of scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits

import horovod_partial.torch as hvd

Batch = tuple[torch.Tensor, torch.Tensor]


def digits() -> Batch:
    """All images and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def batches(number: int, size: int = 16) -> Iterator[Batch]:
    """So many batches of this rank's share, in an order of its own."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in digits())
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(number):
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen], labels[chosen]


def network() -> torch.nn.Sequential:
    """A small one, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
