"""eager-SGD as published (Li et al., PPoPP 2020): gradients by partial allreduce, and models averaged now and then."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

import horovod_partial.torch as hvd
from baselines.baseline import Baseline
from horovod_partial.torch.model_buckets import ModelBucket

POLICIES = {"solo": "solo:missed=latest,grace_ms=0", "majority": "majority:random,missed=latest,grace_ms=0"}


class ModelSync:
    """Averages the models of all ranks after the first step, and each time so many rounds more have passed.

    Ranks that are out of training, as in a flush, are not waited for, and do not count.

    Args:
        optimizer: a `hvd.DistributedOptimizer` under a policy of gradients.
        every: rounds from one average to the next.
    """

    _numbers = itertools.count()  # all ranks make theirs in the same order

    def __init__(self, optimizer: Any, every: int) -> None:
        self._optimizer = optimizer
        self._every = every
        self._bucket = ModelBucket([parameter for group in optimizer.param_groups for parameter in group["params"]])
        self._name = f"model_sync.{next(self._numbers)}"
        self._last = -1

    def after_step(self) -> None:
        """Average the models if that is due."""
        due = self._optimizer.rounds // self._every
        if due <= self._last:
            return
        self._last = due
        self._bucket.pack()
        handle = hvd.weighted_average_async_(self._bucket.flat, 0, 1.0, self._name)
        hvd.synchronize(handle)
        # A late one is an average of older models, made while this rank was out of training.
        if not hvd.round_info(handle).late:
            self._bucket.unpack()


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
