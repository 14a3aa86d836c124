"""What a rank learns about its arrival (its call of a partial collective), and about the round of its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundInfo:
    """What became of an arrival: which round gave its result, and whether the arrival was on time.

    Attributes:
        round: number of the round whose result the caller got; the newest of these rounds if the caller had missed
            several. -1 under `Full`, which has no rounds.
        late: whether the contribution was too late for that round, and so travels with the next round.
        fresh: number of ranks whose contribution was on time for that round (in the caller's group, if the policy has
            groups). -1 under `Full`.
        gradients: number of contributions in the sum that the caller got, including late ones; -1 under `Full`.
        staleness: number of rounds that the caller had missed when it arrived.
        members: ranks, numbered within the process set, whose contributions are in that sum; empty under `Full`.
        work: the steps, or the iteration, that gave each member its weight; empty if the policy has no weights.
    """

    round: int
    late: bool
    fresh: int
    gradients: int
    staleness: int
    members: tuple[int, ...] = ()
    work: tuple[int, ...] = ()
