"""Messages from one rank to another over Horovod: broadcasts in a process set of the two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import horovod_partial.torch as hvd

# Seconds between two looks at a handle. Horovod's own wait never sleeps, and ranks outnumber cores here.
PAUSE = 0.0005
MOST_UNDER_WAY = 4  # messages from one rank to another


def ranks_of_sets(pairs: Iterable[tuple[int, int]], ranks: int) -> list[list[int]]:
    """What process sets these pairs need, each with its ranks.

    A rank negotiates in all of its process sets in every cycle of Horovod, in the order in which they were made. So pairs
    without a common rank follow each other: these negotiate at the same time, where a chain of pairs would wait link by
    link.

    Args:
        pairs: of ranks.
        ranks: how many there are. If there are two, they are Horovod's global process set already.
    """
    if ranks == 2:
        return []
    left = list(dict.fromkeys((min(pair), max(pair)) for pair in pairs))
    ordered = []
    while left:
        apart: list[tuple[int, int]] = []
        for pair in left:
            if all(set(pair).isdisjoint(other) for other in apart):
                apart.append(pair)
        ordered += apart
        left = [pair for pair in left if pair not in apart]
    return [list(pair) for pair in ordered]


def set_with(other: int, process_sets: Sequence[hvd.ProcessSet]) -> hvd.ProcessSet:
    """The process set of this rank and one other."""
    if hvd.size() == 2:
        return hvd.global_process_set
    return next(one for one in process_sets if set(one.ranks) == {hvd.rank(), other})


def wait(handle: Any) -> torch.Tensor:
    """Wait without taking a core. Returns the result."""
    while not hvd.poll(handle):
        time.sleep(PAUSE)
    return hvd.synchronize(handle)


class Outbox:
    """Messages to one other rank, which are not waited for unless too many of them are under way.

    Args:
        name: of the messages; the same on both ranks, and no other's.
        receiver: the other rank.
        process_set: of the two.
    """

    def __init__(self, name: str, receiver: int, process_set: hvd.ProcessSet) -> None:
        self._name = f"{name}.{hvd.rank()}.{receiver}"
        self._process_set = process_set
        self._under_way: deque[Any] = deque()
        self._sent = 0

    def send(self, message: torch.Tensor) -> None:
        """Send a tensor, which must not be changed any more. It is held until it has been received."""
        while self._under_way and (len(self._under_way) == MOST_UNDER_WAY or hvd.poll(self._under_way[0])):
            wait(self._under_way.popleft())
        name = f"{self._name}.{self._sent % MOST_UNDER_WAY}"  # of messages that are under way, each has another
        self._under_way.append(hvd.broadcast_async_(message, hvd.rank(), name, process_set=self._process_set))
        self._sent += 1

    def drain(self) -> None:
        """Wait until all messages have been received."""
        while self._under_way:
            wait(self._under_way.popleft())


class Inbox:
    """Messages from one other rank.

    Args:
        name: as in `Outbox`.
        sender: the other rank.
        message: a tensor of the messages' shape and type, which holds one after the other.
        process_set: of the two.
    """

    def __init__(self, name: str, sender: int, message: torch.Tensor, process_set: hvd.ProcessSet) -> None:
        self._name = f"{name}.{sender}.{hvd.rank()}"
        self._sender = sender
        self._message = message
        self._process_set = process_set
        self._awaited: Any = None
        self._taken = 0

    def listen(self) -> None:
        """Be ready for the next message, so that it travels as soon as it is sent."""
        name = f"{self._name}.{self._taken % MOST_UNDER_WAY}"
        self._awaited = hvd.broadcast_async_(self._message, self._sender, name, process_set=self._process_set)

    def has_message(self) -> bool:
        """Whether the message that was listened for is there."""
        return bool(hvd.poll(self._awaited))

    def take(self) -> torch.Tensor:
        """Wait for the message that was listened for. The tensor holds it until the next `listen`."""
        message = wait(self._awaited)
        self._taken += 1
        return message
