"""D-PSGD (Lian et al., NIPS 2017): every rank averages its model with both neighbours on a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import horovod_partial.torch as hvd
from baselines.baseline import Baseline
from baselines.pairs import ranks_of_sets, set_with, wait


class DPSGD(Baseline):
    """Waits for both neighbours in every step, and so for nobody else at once.

    In the order of the paper's Algorithm 1: the gradient is that of the model before the average, and is applied after it,

        x_i <- (x_{i-1} + x_i + x_{i+1}) / 3 - rate * gradient(x_i).

    So models travel while gradients are computed, as the paper has it: a rank waits for the models with which its
    neighbours have begun the step, and not until they end it. All ranks take the same number of steps.

    Args:
        optimizer: as in `Baseline`.
        process_sets: those of `process_sets_of`, initialised.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_sets: Sequence[hvd.ProcessSet]) -> None:
        super().__init__(optimizer)
        rank, size = hvd.rank(), hvd.size()
        # An edge of the ring has the number of the rank that it begins at.
        neighbours = {(rank - 1) % size: (rank - 1) % size, rank: (rank + 1) % size}
        self._edges = {edge: set_with(neighbour, process_sets) for edge, neighbour in neighbours.items()}
        self._model = torch.empty(0)  # that travels, if any does
        self._sums: list[Any] = []  # handles: this model and a neighbour's

    @staticmethod
    def process_sets_of(ranks: int) -> list[list[int]]:
        """The ranks of the process sets that this needs: two for each rank."""
        return ranks_of_sets([(rank, (rank + 1) % ranks) for rank in range(ranks)], ranks)

    def step(self) -> None:
        if not self._sums:
            self._begin()
        change = self._change()
        left, right = (wait(handle) for handle in self._sums)
        self._write((left + right - self._model) / 3 + change)
        self._begin()

    def flush(self) -> None:
        # What was begun for a step that does not come changes no mean.
        for handle in self._sums:
            wait(handle)
        self._sums = []
        self._write_mean(self._read())

    def _begin(self) -> None:
        self._model = self._read()
        self._sums = [
            hvd.allreduce_async(self._model, name=f"d_psgd.{edge}", op=hvd.Sum, process_set=process_set)
            for edge, process_set in self._edges.items()
        ]
