"""eager-SGD as published (Li et al., PPoPP 2020): gradients by partial allreduce, and models averaged now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import horovod_partial.torch as hvd
from baselines.baseline import Baseline

# The user's programs average models so, too.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "torch" / "work"))

from job import ModelSync

POLICIES = {"solo": "solo:missed=latest,grace_ms=0", "majority": "majority:random,missed=latest,grace_ms=0"}


class EagerSGD(Baseline):
    """Waits for the first rank (solo), or for one that is drawn for each round (majority).

    A rank that has missed results takes the newest only, as in section 5; so models part, and are averaged over all ranks
    every so many rounds. The paper synchronises them across all ranks every 10 epochs, and does not say how. The released
    code copies rank 0's checkpoint to the others; here it is the mean. Rounds have no grace. The paper assumes a bound on
    how many rounds in a row a rank misses, and gives none; here it is `max_staleness`, with its default.

    Args:
        optimizer: as in `Baseline`; it applies the gradients of rounds.
        named_parameters: `model.named_parameters()`.
        collective: `"solo"` or `"majority"`.
        sync_every: rounds from one average of the models to the next, which waits for all ranks: those of 10 epochs. Where
            ranks are late there are more rounds than steps, so that it comes somewhat oftener than every 10 epochs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        collective: str,
        sync_every: int,
    ) -> None:
        self._wrapped: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters,
            sync=POLICIES[collective],
        )
        self._sync = ModelSync(self._wrapped, sync_every)
        super().__init__(self._wrapped)

    def step(self) -> None:
        self._wrapped.step()
        self._sync.after_step()

    def flush(self) -> None:
        self._wrapped.flush()
        self._write_mean(self._read())
