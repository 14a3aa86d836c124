"""What a rank is told of its rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundInfo:
    """What became of an arrival.

    Attributes:
        round: the round whose result the caller got; of several missed ones the newest. -1 under `Full`, which has none.
        late: the contribution was too late for that round, and travels with the next.
        fresh: ranks whose contribution was on time for that round (in the caller's group, if it has groups); -1 under
            `Full`: all of them.
        gradients: contributions in the sum that the caller got, earlier late ones included; -1 under `Full`.
        staleness: rounds whose results the caller had missed before it arrived.
        members: the ranks, within the process set, whose contributions are in that sum; empty under `Full`.
        work: what each member's weight followed from, if there were weights: steps, or an iteration.
    """

    round: int
    late: bool
    fresh: int
    gradients: int
    staleness: int
    members: tuple[int, ...] = ()
    work: tuple[int, ...] = ()
