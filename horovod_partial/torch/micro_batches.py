"""Counts a rank's own micro-batches in a loop that steps after each of them, under policies that share no work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet

from horovod_partial.exchange.work_sharing import MicroBatches
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.operations import runtime


class OwnMicroBatches(MicroBatches):
    """Lets the loop of `hvd.WorkSharing` run under any other policy: `step` comes after each backward pass.

    An update has `passes` micro-batches of each rank, and each rank computes its own. The last call of `step` in an
    update takes the optimizer's step. The others only count.
    """

    def __init__(self, process_set: ProcessSet, passes: int) -> None:
        self.updated = 0
        self._process_set = process_set
        self._passes = passes
        self._tenure = Tenure(runtime)
        self._made = 0  # for how many micro-batches of the open update `step` has been called
        self._rounds = 0  # the number of updates since this `hvd.init()`
        self._is_stepping = False  # whether the optimizer's own step, which ends an update, is under way

    def _enter(self) -> None:
        if self._tenure.enter():  # in an elastic job, all ranks begin anew
            self.begun, self._made, self._rounds = None, 0, 0

    @property
    def rounds(self) -> int:
        return self._rounds if self._tenure.is_current else 0

    def rounds_of(self, generation: Tenure) -> int | None:
        """Return how many updates were made; None if this object is not from the same `hvd.init()` as `generation`."""
        return self._rounds if self._tenure.is_that_of(generation) else None

    @property
    def is_last(self) -> bool:
        made = self._made if self._tenure.is_current else 0
        return self._is_stepping or made + 1 >= self._passes

    @property
    def keeps_gradients(self) -> bool:
        return self._tenure.is_current and self._made > 0

    def step(self, closure: Callable[[], Any] | None, take: Callable[[None], Any]) -> Any:
        loss = evaluate(closure)  # before the pass counts, because a closure may clear gradients, or fail
        self._count()
        if self.updated:
            self._is_stepping = True
            try:
                take(None)
            finally:
                self._is_stepping = False
        return loss

    def skipped(self) -> None:
        self._count()

    def _count(self) -> None:
        self._enter()
        self.begun, self.updated = None, int(self.is_last)
        self._made = 0 if self.updated else self._made + 1
        self._rounds += self.updated

    def begin_before(self, rounds: float) -> int | None:
        self._enter()
        if self._rounds >= rounds:
            return None
        rank = self._process_set.rank() if self._process_set.included() else 0
        self.begun = rank * self._passes + self._made
        return self.begun

    def give_back(self) -> None:
        """Forget the begun micro-batch: no other rank computes it, so this rank begins it again."""
        self.begun = None

    def forget(self) -> None:
        self._made = 0

    def set_passes(self, passes: int) -> None:
        if passes != self._passes and (self.keeps_gradients or not self.begins_in_step):
            raise ValueError(
                "backward_passes_per_step cannot change within an update, or under a DynamicShardingLoader"
            )
        self._passes = passes


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Evaluate a closure that was passed to `step`. Returns its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def counting_passes(optimizer: Any) -> Any:
    """Let `step` of a wrapped optimizer come after each backward pass. Returns the optimizer.

    Raises ValueError if the optimizer's step needs its closure more than once.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates a closure several times in a step, so no step can come after each backward pass"
        )
    exchange = optimizer._exchange
    if type(exchange.work) is MicroBatches:
        exchange.work = OwnMicroBatches(optimizer.process_set, optimizer.backward_passes_per_step)
    return optimizer
