"""The interface by which flushes and waits let an optimizer apply its rounds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.runtime import healing


class _Token:
    """Each thread has one, which dies with the thread."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.token = _Token()


Thread: TypeAlias = weakref.ref[_Token]  # a reference to a thread; it returns None when the thread has ended
NO_THREAD: Thread = weakref.ref(_Token())  # counts as a thread that has ended
_of_thread = _OfThread()


def this_thread() -> Thread:
    """Return a reference to the calling thread. (An identifier is no use: a new thread may have that of an ended one.)"""
    return weakref.ref(_of_thread.token)


class Applier(Protocol):
    """An optimizer's exchange, seen by the runtime: it applies the results of a family (the optimizer's buckets).

    `family` is None before the optimizer has declared buckets. `is_under_way` is True while gradients wait for a step;
    a flush then applies no rounds of the optimizer. The thread `thread` took the last step. A flush compares `replica`
    with other ranks; None compares nothing. `shares_work` is True for a `Sharer`. `is_applying` is True while a round is
    applied or waited for, within a step or a flush.
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

    def declare(self) -> None:
        """Declare the buckets before the first step, if they are known by then. Other ranks may train in a join."""

    def apply_rounds(self) -> None:
        """Apply all rounds that this rank can take, oldest first."""


class AheadApplier(Applier, Protocol):
    """An optimizer's exchange, seen by waits: it can apply rounds to a copy of the model.

    `applies_ahead` says whether `apply_ahead` may be called now, and `is_ahead` whether it has applied rounds that are
    not in the model yet.
    """

    @property
    def applies_ahead(self) -> bool: ...

    @property
    def is_ahead(self) -> bool: ...

    def apply_ahead(self) -> None:
        """Apply the rounds that this rank can take to a copy of the model, while the program waits for something else.

        The model itself changes only in the next step or flush.
        """


class Sharer(Applier, Protocol):
    """An optimizer's exchange under `hvd.WorkSharing`, seen by the runtime. Flushes and joins interrupt its work.

    `begun` is the number of the micro-batch that has begun, within the update after `rounds` ones; None if there is none.
    """

    @property
    def begun(self) -> int | None: ...

    @property
    def rounds(self) -> int: ...

    def leave(self) -> None:
        """Let other ranks make the micro-batch that this rank has begun, before this rank flushes, joins or ends.

        Raises AssertionError if some gradients of the micro-batch exist already.
        """

    def come_back(self) -> None:
        """Begin a micro-batch again, after a flush or a join that began with `leave`."""


class Averager(Protocol):
    """An optimizer's exchange of models, seen by the runtime. Its averages may run beside the program's own work.

    The thread `thread` took the last step.
    """

    thread: Thread

    def settle(self) -> None:
        """Wait for the average that is under way, if any, and write it. Drop it if the program has changed a parameter."""


class Meanwhile:
    """Takes rounds of a thread's optimizers while the thread waits for something else.

    Rounds are taken when `replay_limit - 1` have been missed, because the core adds up what is beyond `replay_limit`, and
    when the thread has waited for a second, because other ranks may wait for this rank in a round hook. The thread has
    waited for `waited` seconds already.
    """

    def __init__(self, appliers: Iterable[AheadApplier], waited: float) -> None:
        there = [(applier, applier.family) for applier in appliers]
        self._appliers = [(applier, family.drain(waited)) for applier, family in there if family is not None]

    @property
    def drainings(self) -> list[_attach.Draining]:
        """The objects that tell the core that the thread waits; empty if it has no optimizer that can take rounds."""
        return [draining for _, draining in self._appliers]

    def apply(self) -> None:
        """Take rounds of each optimizer for which the core says that rounds are due."""
        for applier, draining in list(self._appliers):
            if draining.is_due:
                applier.apply_ahead()
                if not applier.applies_ahead:  # a step has failed
                    draining.end()
                    self._appliers.remove((applier, draining))

    def end(self) -> None:
        """Tell the core that the thread's wait is over."""
        for draining in self.drainings:
            draining.end()
