"""The one delay injector: every rank knows the delays of all ranks in a step, and sleeps through its own.

A delay is a sleep, never busy work, which would take the processor from the ranks that are not delayed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class Delays(ABC):
    """Who is delayed in which step, and for how long."""

    @abstractmethod
    def draw(self, step: int) -> Sequence[float]:
        """Seconds for each rank; the same list on every rank, whichever ranks have drawn before."""

    def serve(self, rank: int, step: int, part: float = 1.0) -> None:
        """Sleep if `rank` is delayed in `step`; for that part of the delay."""
        seconds = self.draw(step)[rank] * part
        if seconds > 0:
            time.sleep(seconds)


@dataclass(frozen=True)
class Floors:
    """Lower bounds of the time of a job, and an upper bound of its rate, if ranks only sleep: for compute and delays.

    Attributes:
        full: the time if all ranks wait for the slowest one in each step, in seconds.
        alone: the time of the slowest rank if no rank waits, in seconds.
        rate: steps per second of all ranks if no rank waits.
    """

    full: float
    alone: float
    rate: float

    @classmethod
    def of(cls, delays: Delays, ranks: int, steps: int, compute: float) -> Floors:
        """Return the bounds for this many steps, of `compute` seconds each, plus delays."""
        work = compute + np.array([delays.draw(step)[:ranks] for step in range(steps)])
        seconds = work.sum(axis=0)
        return cls(float(work.max(axis=1).sum()), float(seconds.max()), float((steps / seconds).sum()))


@dataclass(frozen=True)
class RandomVictims(Delays):
    """In each step `victims` of the ranks, drawn at random, are delayed by `seconds`."""

    ranks: int
    victims: int
    seconds: float
    seed: int = 0

    def draw(self, step: int) -> Sequence[float]:
        drawn = np.random.default_rng((self.seed, step)).choice(self.ranks, self.victims, replace=False)
        return [self.seconds if rank in drawn else 0.0 for rank in range(self.ranks)]


@dataclass(frozen=True)
class Rotating(Delays):
    """Rank r is delayed by a multiple of `mean_seconds`; from step to step the multiples move on by one rank."""

    multiples: Sequence[float]
    mean_seconds: float

    def draw(self, step: int) -> Sequence[float]:
        ranks = len(self.multiples)
        return [self.multiples[(rank + step) % ranks] * self.mean_seconds for rank in range(ranks)]


@dataclass(frozen=True)
class LinearSkew(Delays):
    """Rank r is delayed by r times `seconds` in every step."""

    ranks: int
    seconds: float

    def draw(self, step: int) -> Sequence[float]:
        return [rank * self.seconds for rank in range(self.ranks)]


@dataclass(frozen=True)
class SlowRank(Delays):
    """One rank is delayed by `seconds` in every step."""

    ranks: int
    rank: int
    seconds: float

    def draw(self, step: int) -> Sequence[float]:
        return [self.seconds if rank == self.rank else 0.0 for rank in range(self.ranks)]
