"""Counts a rank's own micro-batches in a loop that steps after each of them, under policies that share no work."""

from __future__ import annotations

import weakref
from typing import Any

from horovod_partial.runtime.tenure import Tenure


class OwnMicroBatches:
    """Lets the loop of `hvd.WorkSharing` run under any other policy: `step` comes after each backward pass.

    An update has `backward_passes_per_step` micro-batches of each rank, and each rank computes its own. The last call of
    `step` in an update takes the optimizer's step. The others only count. The interface is that of
    `horovod_partial.exchange.work_sharing.SharedWork`, as far as a `DynamicShardingLoader` needs it.

    `begun` is the number, within its update, of the micro-batch that a loader has begun, and None if there is none.
    `rounds` is the number of updates, and `updated` how many of them the last call of `step` made: 0 or 1.
    """

    begins_in_step = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.begun: int | None = None
        self.rounds = 0
        self.updated = 0
        self.made = 0  # the number of micro-batches of the open update for which `step` has been called

    def complete(self) -> bool:
        """Record that `step` was called. Returns whether this call ends the update."""
        self.begun, self.updated = None, int(self.is_last)
        self.made = 0 if self.is_last else self.made + 1
        self.rounds += self.updated
        return self.made == 0

    @property
    def is_last(self) -> bool:
        """Whether the next call of `step` ends the update."""
        optimizer: Any = self._optimizer()
        return bool(self.made + 1 >= optimizer.backward_passes_per_step)

    def begin(self) -> int:
        """Return the number of the micro-batch that comes next. The numbers of rank 0 come first, then those of rank 1."""
        optimizer: Any = self._optimizer()
        self.begun = (optimizer.process_set.rank() or 0) * optimizer.backward_passes_per_step + self.made
        return self.begun

    def begin_before(self, rounds: float) -> int | None:
        """Begin a micro-batch. Returns its number, or None after `rounds` updates."""
        return self.begin() if self.rounds < rounds else None

    def give_back(self) -> None:
        """Forget the begun micro-batch: no other rank computes it, so this rank begins it again."""
        self.begun = None

    def rounds_of(self, generation: Tenure) -> int:
        """Return the number of updates: these counts go on when Horovod begins anew."""
        return self.rounds


def counting_passes(optimizer: Any) -> Any:
    """Let `step` of a wrapped optimizer come after each backward pass. Returns the optimizer."""
    if optimizer._exchange.work is None and optimizer.micro_batches is None:
        optimizer.micro_batches = OwnMicroBatches(optimizer)
    return optimizer
