"""The interface by which flushes and waits let an optimizer apply its rounds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.runtime import healing


class _Token:
    """An object that exists once for each thread, and is freed when the thread ends."""


Thread: TypeAlias = weakref.ref[_Token]  # a reference to a thread; it returns None when the thread has ended
NO_THREAD: Thread = weakref.ref(_Token())  # counts as a thread that has ended
_of_thread = threading.local()


def this_thread() -> Thread:
    """Return a reference to the calling thread. (A thread's identifier may be that of a thread which has ended.)"""
    return weakref.ref(vars(_of_thread).setdefault("token", _Token()))


class Applier(Protocol):
    """What the runtime needs of the object that combines an optimizer's gradients over the ranks (its exchange).

    `family` is the optimizer's buckets, or None before they are named. `is_under_way` is True while gradients wait for
    a step; a flush then applies no rounds of the optimizer. The thread `thread` took the last step. After a flush ranks
    compare `replica`, unless it is None. `shares_work` is True for an `exchange.work_sharing.Sharer`. `is_applying` is
    True while a round is applied or waited for, within a step or a flush.
    """

    process_set: ProcessSet
    thread: Thread
    shares_work: bool

    @property
    def is_applying(self) -> bool: ...

    @property
    def family(self) -> _attach.Family | None: ...

    @property
    def replica(self) -> healing.Replica | None: ...

    @property
    def is_under_way(self) -> bool: ...

    def apply_rounds(self) -> None:
        """Apply all rounds that have ended and were not applied yet, oldest first."""


class AheadApplier(Applier, Protocol):
    """An `Applier` that can apply rounds to a copy of the model, while the program waits for something else.

    `applies_ahead` says whether `apply_ahead` may be called now. `is_ahead` says whether the copy contains rounds that
    the model lacks. `round_steps.hooks_wait` says whether the user's functions for each round may wait for other ranks.
    """

    round_steps: Any

    @property
    def applies_ahead(self) -> bool: ...

    @property
    def is_ahead(self) -> bool: ...

    def declare(self) -> None:
        """Declare the buckets before a join, if they are known, because other ranks may use them during the join."""

    def apply_ahead(self) -> None:
        """Apply all rounds that have ended to the copy. The model changes only in the next step or flush."""


class Averager(Protocol):
    """What the runtime needs of the object that averages an optimizer's model. The thread `thread` took the last step.

    An average may run while the program goes on.
    """

    thread: Thread

    def settle(self) -> None:
        """Wait for the average under way, if any. Write it to the model, unless the program has changed a parameter."""


class Meanwhile:
    """Lets those of a thread's optimizers that can do so apply missed rounds while the thread waits for something else.

    They do so when `replay_limit - 1` rounds were missed, because the core would add up rounds beyond `replay_limit`.
    Those with round hooks that may wait also do so when the thread has waited for a second, because other ranks may wait
    for this rank in such a hook. The thread has waited for `waited` seconds already.
    """

    def __init__(self, appliers: Iterable[AheadApplier], waited: float) -> None:
        self._appliers = [
            (applier, family.drain(waited, applier.round_steps.hooks_wait))
            for applier in appliers
            if (family := applier.family) is not None and applier.applies_ahead
        ]

    @property
    def drainings(self) -> list[_attach.Draining]:
        """The objects that tell the core that the thread waits, one for each optimizer that can apply rounds now."""
        return [draining for _, draining in self._appliers]

    def apply(self) -> None:
        """Let each optimizer apply its missed rounds, if the core says that this is due."""
        for applier, draining in list(self._appliers):
            if draining.is_due:
                applier.apply_ahead()
                if not applier.applies_ahead:  # the optimizer's step has failed
                    draining.end()
                    self._appliers.remove((applier, draining))

    def close(self) -> None:
        """Tell the core that the thread's wait is over."""
        for draining in self.drainings:
            draining.end()
