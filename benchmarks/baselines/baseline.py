"""What all baselines have: an optimizer for a rank's own steps, and the model flat in one tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

import horovod_partial.torch as hvd
from horovod_partial.torch.model_operations import ModelBucket


class Baseline(ABC):
    """Trains a model in a published way. All ranks start from the same model.

    Args:
        optimizer: takes a rank's own steps. Its state, such as momentum, stays that rank's own.

    Attributes:
        was_full: the last step ended with an average over all ranks.
    """

    was_full = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._bucket = ModelBucket([parameter for group in optimizer.param_groups for parameter in group["params"]])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    @abstractmethod
    def step(self) -> None:
        """Train with the gradients that the parameters have."""

    @abstractmethod
    def flush(self) -> None:
        """Average the models over all ranks: on every rank, at the end and before an evaluation."""

    def _read(self) -> torch.Tensor:
        """The model, in a tensor of its own."""
        self._bucket.pack()
        return self._bucket.flat.clone()

    def _write(self, model: torch.Tensor) -> None:
        """Let the parameters be those of a flat model."""
        self._bucket.flat.copy_(model)
        self._bucket.unpack()

    def _change(self) -> torch.Tensor:
        """Take the optimizer's step. Returns by how much it has moved the model."""
        before = self._read()
        self._optimizer.step()
        return self._read().sub_(before)

    def _write_mean(self, model: torch.Tensor) -> None:
        """Let the parameters be the mean of all ranks' models."""
        self._write(hvd.allreduce(model, name="baseline.mean"))
