"""Counts a rank's own micro-batches in a loop that steps after each of them, under policies that share no work."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.operations import runtime


class OwnMicroBatches:
    """Lets the loop of `hvd.WorkSharing` run under any other policy: `step` comes after each backward pass.

    An update has `backward_passes_per_step` micro-batches of each rank, and each rank computes its own. The last call of
    `step` in an update takes the optimizer's step. The others only count. The interface is that of
    `horovod_partial.exchange.work_sharing.SharedWork`, as far as a `DynamicShardingLoader` needs it.

    `begun` is the number, within its update, of the micro-batch that a loader has begun, and None if there is none.
    `rounds` is the number of updates since the last `hvd.init()`. `updated` tells how many of them the last call of `step`
    made: 0 or 1. If `begins_in_step` is False, a `DynamicShardingLoader` begins the micro-batches.
    """

    begins_in_step = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._tenure = Tenure(runtime)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with the first micro-batch of the first update."""
        self.begun: int | None = None
        self.updated = 0
        self.is_stepping = False  # whether the optimizer's own step, which ends an update, is under way
        self._made = self._rounds = 0

    def _enter(self) -> None:
        if self._tenure.enter():  # in an elastic job, all ranks begin anew
            self.begin_anew()

    @property
    def made(self) -> int:
        """The number of micro-batches of the open update for which `step` has been called."""
        return self._made if self._tenure.is_current else 0

    @property
    def rounds(self) -> int:
        return self._rounds if self._tenure.is_current else 0

    def forget(self) -> None:
        """Begin the open update anew."""
        self._made = 0

    def complete(self) -> bool:
        """Record that `step` was called. Returns whether this call ends the update."""
        self._enter()
        self.begun, self.updated = None, int(self.is_last)
        self._made = 0 if self.updated else self._made + 1
        self._rounds += self.updated
        return bool(self.updated)

    @property
    def is_last(self) -> bool:
        """Whether the next call of `step` ends the update."""
        optimizer: Any = self._optimizer()
        return bool(self.made + 1 >= optimizer.backward_passes_per_step)

    def begin(self) -> int:
        """Return the number of the micro-batch that comes next. The numbers of rank 0 come first, then those of rank 1."""
        self._enter()
        optimizer: Any = self._optimizer()
        rank = optimizer.process_set.rank() if optimizer.process_set.included() else 0
        self.begun = rank * optimizer.backward_passes_per_step + self.made
        return self.begun

    def begin_before(self, rounds: float) -> int | None:
        """Begin a micro-batch. Returns its number, or None after `rounds` updates."""
        return self.begin() if self.rounds < rounds else None

    def give_back(self) -> None:
        """Forget the begun micro-batch: no other rank computes it, so this rank begins it again."""
        self.begun = None

    def rounds_of(self, generation: Tenure) -> int | None:
        """Return how many updates were made after the `init` that `generation` stands for, or None after another one."""
        return self._rounds if self._tenure.is_that_of(generation) else None

    def require_last(self) -> None:
        """Raise RuntimeError within an update, whose gradients are not complete."""
        if not (self.is_last or self.is_stepping):
            raise RuntimeError(
                "synchronize() came within an update: its gradients are complete after its last backward pass"
            )

    def check(self, passes: int) -> None:
        """Raise ValueError if the number of micro-batches in an update must not change to `passes`."""
        optimizer: Any = self._optimizer()
        if passes != optimizer.backward_passes_per_step and (self.made or not self.begins_in_step):
            raise ValueError(
                "backward_passes_per_step cannot change within an update, or under a DynamicShardingLoader"
            )


def counting_passes(optimizer: Any) -> Any:
    """Let `step` of a wrapped optimizer come after each backward pass. Returns the optimizer.

    Raises ValueError if the optimizer's step needs its closure more than once.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates a closure several times in a step, so no step can come after each backward pass"
        )
    if optimizer._exchange.work is None and optimizer.micro_batches is None:
        optimizer.micro_batches = OwnMicroBatches(optimizer)
    return optimizer
