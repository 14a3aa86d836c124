"""Decides which micro-batch this rank makes under `hvd.WorkSharing`, for all frameworks (docs/protocol.md, rule 17)."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.runtime.appliers import Thread
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class MicroBatchSharer(ABC):
    """An optimizer's exchange under `hvd.WorkSharing`. Implements `horovod_partial.runtime.appliers.Sharer`.

    Only the thread that trains uses it. A subclass has the buckets, and applies updates.
    """

    shares_work = True
    is_ahead = False
    applies_ahead = False  # work sharing's updates wait for this rank's micro-batch, so no round can be applied ahead
    process_set: ProcessSet
    thread: Thread
    _runtime: Runtime
    _tenure: Tenure  # the generation of Horovod in which the optimizer's buckets were declared
    is_applying = False  # whether an update of work sharing is being applied now
    _is_alone: bool  # true if there are no other ranks, so that this rank computes all micro-batches
    _active: ClassVar[weakref.ref[MicroBatchSharer] | None] = None  # the exchange of the optimizer that shares work now

    def __init__(self) -> None:
        self._updates = 0  # the number of updates of work sharing in this generation of Horovod
        self._number: int | None = None  # number within its update of the micro-batch that has begun; None if none has
        self._micro_batches = 0  # how many micro-batches the unfinished update has; used only if there is one rank

    @property
    @abstractmethod
    def family(self) -> _attach.Family | None:
        """The buckets of the gradients. The first one keeps the grants. None before they are declared, and without ranks."""

    @abstractmethod
    def _next_micro_batch(self, *, waits: bool) -> tuple[int, int] | None:
        """Begin a micro-batch, same as `runtime.runtime.Runtime.next_micro_batch` with `begins=True`."""

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """Whether gradients of a micro-batch exist, and wait for a step of the optimizer."""

    @abstractmethod
    def _apply_updates(self) -> None:
        """Apply all updates that are complete, oldest first."""

    @property
    def begun(self) -> int | None:
        """The number of the micro-batch that this rank has begun and made no step for yet; None if there is none."""
        return self._number

    def begin_before(self, rounds: float) -> int | None:
        """Begin a micro-batch, unless one has begun. First apply updates, which changes the weights.

        Returns the number of the micro-batch within its update. The share of rank 0 has the first numbers, that of
        rank 1 the next. This rank may get a number of any share. Returns None after `rounds` applied updates.
        """
        while self._number is None and self.rounds < rounds:
            if not self._begin(waits=True):
                self._apply_updates()
        return self._number if self.rounds < rounds else None

    def _begin(self, *, waits: bool) -> bool:
        """Begin a micro-batch. Returns False if an update must be applied first, or a wait is needed."""
        if self._is_alone:
            self._number = self._micro_batches
            return True
        return self._note(self._next_micro_batch(waits=waits))

    def _note(self, begun: tuple[int, int] | None) -> bool:
        """Note the numbers of a micro-batch that has begun. Returns False for None."""
        if begun is not None:
            self._number, self._updates = begun
        return begun is not None

    def _become_active(self) -> None:
        """Make this the optimizer that gets micro-batches. Raises ValueError if a later one has taken over from it."""
        active = None if MicroBatchSharer._active is None else MicroBatchSharer._active()
        if active is self:
            return
        if active is not None and self._tenure.is_current:
            raise ValueError(
                "two optimizers cannot share work in turns: an update of one might be made while this rank uses the other, under "
                "weights that are gone. Pass the parameters of both to one optimizer, or use another policy"
            )
        if active is not None:
            active.leave()
        MicroBatchSharer._active = weakref.ref(self)

    @property
    def _is_active(self) -> bool:
        return MicroBatchSharer._active is not None and MicroBatchSharer._active() is self

    def declare(self) -> None:  # noqa: B027 - the first micro-batch declares the buckets
        """Do nothing: a rank that has begun no micro-batch yet has no part in the job until then."""

    def leave(self) -> None:
        """Same as `runtime.appliers.Sharer.leave`. Raises AssertionError if the micro-batch has gradients already."""
        if self.is_under_way or self.is_applying:
            raise AssertionError(
                "a flush, a join or the end came after loss.backward() but before optimizer.step() of this or another thread, or "
                "within a round hook: call it between two steps."
            )
        self.give_back()

    def give_back(self) -> None:
        """Let other ranks make the micro-batch that this rank has begun, unless some of its gradients exist already."""
        if self.is_under_way:
            return
        family = self.family
        if self._number is not None and family is not None:
            family.return_micro_batch()
        self._number = None

    @property
    def rounds(self) -> int:
        """How many updates have been made. Rounds of a flush without any gradient do not count.

        Updates that other ranks made while this rank had joined are counted when its next micro-batch begins.
        """
        return self._updates if self._is_alone or self._tenure.is_current else 0

    def rounds_of(self, generation: Tenure) -> int | None:
        """Return how many updates were made in a generation of Horovod; None if this object belongs to a later one."""
        return self._updates if self._is_alone or self._tenure.is_that_of(generation) else None


@dataclass(eq=False)
class Updater:
    """Applies updates under `hvd.WorkSharing`, in eager code. `take` returns None for an update without gradients."""

    take: Callable[[], list[Any] | None]
    must_apply: Callable[[], bool]
    variables: Sequence[Any]
    apply: Callable[[list[Any]], None]

    def train(self, must_apply: bool) -> None:
        """Apply updates until there is none left, at the end of a step. `must_apply` says whether there is one now."""
        while must_apply:
            results = self.take()
            if results is not None:
                self.apply(results)
            must_apply = self.must_apply()

    def flush(self) -> None:
        """Apply updates until there is none left. To be called between two steps."""
        self.train(self.must_apply())
