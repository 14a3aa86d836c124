"""Finds out how slow each rank of a recorded job was, by the detector in C++ that also watches running jobs.

A rank's *score* is the fastest rank's mean compute time divided by its own. It uses the mean, because a rank that is
slow in one step of five has the same median as the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_partial import _core
from horovod_partial.insight.recording import Recording

Floats = NDArray[np.float64]

LEAST_STEPS = 30  # with fewer steps than this, a report does not say that no rank is slow
LEAST_SLOWNESS = 1.05  # in `follows_data`, a rank whose mean is this many times the mean of all ranks is slow
# A slow rank is starved if it waits for a processor for more than this share of the time of its steps, and for more
# than this many times as long as the rank that waits least. If each rank waits for longer than the third number says,
# no compute time is trusted.
_STARVED, _TIMES_LEAST = 0.25, 2.0
_MOST_STARVED = 0.5
_NEARLY_ALL = 0.8  # a rank that is slow in at least this share of the steps counts as always slow
_MOST_STEPS = 4096  # the part that explains slowness is sought in so many steps at most, the last ones
_SURE = 4.0  # two values count as different if they lie at least this many standard errors apart
_MUCH, _FEW = 0.1, 0.1  # steps cost much if others waited for this share of the time; few are this share of the steps
_LEAST_IMBALANCE = 1.1  # ranks wait for each other if a step's slowest rank takes this many times the ranks' mean
_ALIKE = 1.5  # standard deviations of ranks' times are alike if they differ by at most this factor
# If outliers make a rank's standard deviation more than this many times as large, hiccups are the cause, not samples.
_HICCUPS = 2.0


@dataclass(frozen=True)
class Slowness:
    """How slow a rank was.

    `compute` is the mean compute time of a step, in seconds. `score` is the fastest rank's `compute` divided by this
    rank's; 1 for the fastest. `steps` is how many steps were looked at. `times` has all periods in which the rank was
    slow, oldest first. Steps are counted from the first step that all ranks have recorded. A period with an `end` of -1
    lasts until the recording's end. `cause` is the part of a step that explains `worst`, or `"none"`, and the end of
    a sentence that says so.
    """

    rank: int
    compute: float
    score: float
    steps: int
    times: tuple[_core.Slowness, ...] = ()
    cause: tuple[str, str] = ("none", "")

    @property
    def worst(self) -> _core.Slowness | None:
        """The period of `times` that cost the job most time; None if the rank was not slow."""
        return max(self.times, key=lambda time: time.lost, default=None)

    @property
    def kind(self) -> str:
        """In what way the rank was slow in `worst`: a name such as "bursts", or "none"."""
        return str(self.worst.kind) if self.worst else "none"

    @property
    def factor(self) -> float:
        """The duration of the slow steps in `worst`, divided by that on the median rank; 1 if the rank was not slow.

        For pauses it is the time of the job divided by what that would be without them.
        """
        return self.worst.factor if self.worst else 1.0

    @property
    def always(self) -> bool:
        """Whether the rank was slow in nearly all steps."""
        return self.worst is not None and self.worst.steps >= _NEARLY_ALL * self.steps

    def __str__(self) -> str:
        """Say how slow the rank was: the rest of a sentence that begins with the rank's name."""
        more = f" (the worst of {len(self.times)} times)" if len(self.times) > 1 else ""
        return self.worst.describe() + self.cause[1] + more if self.worst else "is not slow"


def of_job(ranks: list[int], compute: Floats, parts: Floats | None = None) -> list[Slowness]:
    """Find out how slow each rank of a job was, and in what way.

    `compute` has seconds, of the shape (steps, ranks), with the same steps of all ranks. `parts` is `JobSteps.parts`.
    """
    detector = _core.SlowRanks(len(ranks))
    for step in compute:
        detector.step(step)
    means = np.maximum(compute.mean(axis=0), 1e-6)
    scores = means.min() / means
    slow = []
    for column, (rank, mean, score) in enumerate(zip(ranks, means, scores, strict=True)):
        times = tuple(found.replace(rank=rank) for found in detector.found(column))
        of_rank = Slowness(rank, float(mean), float(score), len(compute), times)
        if of_rank.worst and parts is not None:
            slow_parts = _core.SlowParts(len(ranks))
            end = of_rank.worst.end if of_rank.worst.end >= 0 else len(compute)
            for step in range(max(of_rank.worst.begin, end - _MOST_STEPS), end):
                slow_parts.step(parts[step])
            of_rank = replace(of_rank, cause=slow_parts.cause(column))
        slow.append(of_rank)
    return slow


def too_loaded(recording: Recording) -> bool:
    """Return whether each rank waited for a processor for so long that no compute time can be trusted."""
    return min(rank.starved for rank in recording.ranks.values()) > _MOST_STARVED


def of_load(recording: Recording, slow: Collection[int]) -> str:
    """Return sentences about the slow ranks that are starved, or about all ranks. Empty if no rank waited for long.

    On a busy host, a rank that waits for others waits for processors, too. So only slow ranks count as starved.
    """
    shares = {rank.rank: rank.starved for rank in recording.ranks.values()}
    least = min(shares.values())
    starved = {rank: shares[rank] for rank in slow if shares[rank] > max(_STARVED, _TIMES_LEAST * least)}
    if starved:
        names, waits, one = ", ".join(map(str, starved)), "waits for a processor for", len(starved) == 1
        told = f"Rank {names} is starved: it {waits}" if one else f"Ranks {names} are starved: each {waits} at least"
        others = max(share for rank, share in shares.items() if rank not in starved)
        told += f" {min(starved.values()):.0%} of the time in its steps, and no other rank for more than {others:.0%}"
    elif too_loaded(recording):
        told = (
            f"Each rank waited for a processor for {least:.0%} of the time in its steps or more, so compute times are uncertain: with "
            "processors of their own all ranks would be faster, and another one may be the slow one"
        )
    else:
        return ""
    return (
        f"{told}. Give such ranks processors of their own: pin each rank to other processors, set OMP_NUM_THREADS to a rank's share "
        "of its host, or end other programs there."
    )


def of_few_steps(compute: Floats, slow: list[Slowness], *, rounds: bool) -> str:
    """Return sentences about a rank that cost much time in few steps. Empty if there is none, or some rank is slow.

    `compute` is the argument of `of_job`, and `slow` is its result. If `rounds`, others need not have waited.
    """
    if any(rank.times for rank in slow):
        return ""
    ordered = np.sort(compute, axis=1)
    ahead = ordered[:, -1] - ordered[:, -2:][:, 0]  # how long the other ranks waited for the slowest one alone
    slowest = compute.argmax(axis=1)
    costs = np.bincount(slowest, ahead, minlength=len(slow))
    rank = int(costs.argmax())
    longest = np.sort(ahead[slowest == rank])[::-1]
    count = int(np.searchsorted(np.cumsum(longest), 0.9 * costs[rank])) + 1
    share = costs[rank] / ordered[:, -1].sum()
    if share < _MUCH or costs[rank] < costs.sum() / 2 or count > _FEW * len(compute):
        return ""
    others = "Under Full() the others would have waited" if rounds else "The others waited"
    return (
        f"{others} for rank {slow[rank].rank} for {share:.0%} of the compute time, mostly in {count} of {len(compute)} steps. "
        "These are too few to tell whether it goes on. Does this rank alone evaluate or save?"
    )


def follows_data(compute: Floats, slow: list[Slowness]) -> bool:
    """Return whether ranks wait for each other because samples differ, and not because machines differ.

    If each rank draws its samples at random, the times of all ranks have one distribution, and one step does not
    predict the next. A slow machine has a longer mean, and a busy machine is busy for several steps in a row. Another
    cause that makes the steps of all ranks vary at random cannot be told from samples, so the result is True then, too.
    `compute` is the argument of `of_job`, and `slow` is its result.
    """
    steps = len(compute)
    if steps < LEAST_STEPS or any(rank.times for rank in slow):
        return False
    if compute.max(axis=1).mean() < _LEAST_IMBALANCE * compute.mean():
        return False
    times = np.log(np.maximum(compute, 1e-6))
    times = times - times.mean(axis=1, keepdims=True)  # what all ranks have in common in a step
    deviations = times.std(axis=0)
    above = times - times.mean(axis=0)
    typical = 1.4826 * np.median(np.abs(above), axis=0)  # the standard deviation, if the times have no outliers
    if deviations.max() > _ALIKE * np.quantile(deviations, 0.25) or (deviations > _HICCUPS * typical).any():
        return False
    means = np.abs(times.mean(axis=0))
    if (means > np.maximum(np.log(LEAST_SLOWNESS), _SURE * deviations / np.sqrt(steps))).any():
        return False
    autocorrelation = (above[1:] * above[:-1]).mean(axis=0) / deviations**2
    return bool(np.abs(autocorrelation).max() < _SURE / np.sqrt(steps))
