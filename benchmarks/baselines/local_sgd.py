"""Local SGD (Stich, ICLR 2019): ranks train by themselves, and average their models every so many steps."""

from __future__ import annotations

import torch

from baselines.baseline import Baseline


class LocalSGD(Baseline):
    """Waits for all ranks in every `period`-th step, and for nobody else.

    All ranks take the same number of steps.

    Args:
        optimizer: as in `Baseline`.
        period: steps from one average to the next.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, period: int) -> None:
        super().__init__(optimizer)
        self._period = period
        self._steps = 0

    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        self.was_full = self._steps % self._period == 0
        if self.was_full:
            self.flush()

    def flush(self) -> None:
        self._write_mean(self._read())
