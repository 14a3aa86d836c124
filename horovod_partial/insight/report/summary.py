"""Summarises a recording: which rank is slow, and what waiting has cost. Other modules show the summary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.recording import Clocks, JobSteps, RankSteps, Recording
from horovod_partial.insight.report import links, slowness
from horovod_partial.insight.report.slowness import Slowness

Floats = NDArray[np.float64]

_LIKE_DATA = (
    " But steps differ: all ranks have long and short ones, and one step does not predict the next. This happens if samples "
    "differ, such as sentences of all lengths; hvd.BalancedBatchSampler gives all ranks samples of like length in the same step."
)


def listed(ranks: list[int]) -> str:
    """Return the beginning of a sentence about ranks, such as "rank 3 is" or "ranks 3, 1, 5 and 2 more are"."""
    names = [*map(str, ranks[:3]), *([f"{len(ranks) - 3} more"] if len(ranks) > 3 else [])]
    return f"ranks {', '.join(names[:-1])} and {names[-1]} are" if len(names) > 1 else f"rank {names[0]} is"


@dataclass(frozen=True)
class RankSummary:
    """The summary of one rank, over `steps`, the steps that all ranks have recorded."""

    rank: int
    slowness: Slowness
    steps: RankSteps


@dataclass(frozen=True)
class Summary:
    """The summary of a recording.

    `steps` has the steps that all ranks have recorded, so the arrays of all ranks have the same shape. `ranks` is in
    order of rank. `follows_data` is the result of `slowness.follows_data`. The other fields are seconds, each a mean
    over the ranks. `waited`, of the shape (steps,), is how long a rank waited in each step. `waited_under_full`, of the
    same shape, is how long it would have waited under `Full()`, where each step waits for its slowest rank. This
    includes the time of reductions. `seconds` is the time from the begin of the first step to the last result.
    """

    recording: Recording
    clocks: Clocks
    steps: JobSteps
    ranks: tuple[RankSummary, ...]
    follows_data: bool
    waited: Floats
    waited_under_full: Floats
    seconds: float

    @classmethod
    def of(cls, recording: Recording) -> Summary:
        """Summarise a recording. Raises ValueError if the ranks have recorded no step in common."""
        clocks = Clocks.fit(recording)
        steps = JobSteps.of(recording, clocks).common()
        if not len(steps.ranks[0].step):
            raise ValueError(
                f"run {recording.run} has no step that all ranks have recorded: their oldest segments were dropped, or are "
                "not there, or under WorkSharing() some rank made no micro-batch in each of two steps. "
                "HOROVOD_PARTIAL_RECORD_MB says how much a rank keeps"
            )
        compute = steps.compute
        slow = slowness.of_job([rank.rank for rank in steps.ranks], compute, steps.parts)
        ranks = tuple(
            RankSummary(rank=rank.rank, slowness=of, steps=rank) for rank, of in zip(steps.ranks, slow, strict=True)
        )
        return cls(
            recording=recording,
            clocks=clocks,
            steps=steps,
            ranks=ranks,
            follows_data=slowness.follows_data(compute, slow),
            waited=np.mean([rank.wait for rank in steps.ranks], axis=0),
            waited_under_full=compute.max(axis=1) - compute.mean(axis=1),
            seconds=float(np.mean([rank.result[-1] - rank.begin[0] for rank in steps.ranks])),
        )

    @property
    def title(self) -> str:
        """A line that says which run this is, and under which policy."""
        ranks, steps = self.recording.size, len(self.waited)
        return f"Run {self.recording.run}: {ranks} ranks, {steps} steps, policy {self.steps.policy}"

    @property
    def shares_work(self) -> bool:
        """Whether ranks share the micro-batches of a step."""
        return self.steps.passes > 0

    @property
    def slow(self) -> list[RankSummary]:
        """The summaries of the slow ranks, slowest first."""
        return [rank for rank in self.slowest_first if rank.slowness.times]

    @property
    def slowest_first(self) -> list[RankSummary]:
        """The summaries of all ranks, slowest first."""
        return sorted(self.ranks, key=lambda rank: (-rank.slowness.compute, rank.rank))

    @property
    def unclear(self) -> str:
        """A few words on why the recording does not suffice to say that a rank is not slow. Empty if it does."""
        if slowness.too_loaded(self.recording):
            return "The machine was too loaded to tell which rank is slow"
        if len(self.waited) < slowness.LEAST_STEPS:
            return "Too few steps to tell which rank is slow"
        return "Too few long steps to tell which rank is slow" if self._long_steps else ""

    @property
    def headline(self) -> str:
        """A few words that say which rank is slow."""
        if self.slow:
            how = "pausing" if all(rank.slowness.kind == "pauses" for rank in self.slow) else "slow"
            return f"{listed([rank.rank for rank in self.slow])} {how}".capitalize()
        return self.unclear or "No rank is slow"

    @property
    def answer(self) -> str:
        """Sentences that say which rank is slow, and how, and which ranks waited for processors."""
        load = slowness.of_load(self.recording, [rank.rank for rank in self.slow])
        return f"{self._slowness} {load}".strip()

    @property
    def _slowness(self) -> str:
        steps = len(self.waited)
        named = [f"rank {rank.rank} {rank.slowness}" for rank in self.slow[:3]]
        if len(self.slow) > 3:
            named.append(f"{len(self.slow) - 3} more are slow")
        if named:
            text = "; ".join(named)
            return f"{text[0].upper()}{text[1:]}."
        slowest = self.slowest_first[0]
        if slowness.too_loaded(self.recording):
            return f"{self.headline}."
        if steps < slowness.LEAST_STEPS:
            return f"{steps} steps are too few to tell which rank is slow: record {slowness.LEAST_STEPS} or more."
        if len(self.ranks) == 1:
            return f"Rank {slowest.rank}, the only one that was recorded, takes about as long for each of its steps."
        times = f"{1 / slowest.slowness.score:.2f} times as long as the fastest"
        told = f"{self.headline}: the slowest, rank {slowest.rank}, takes {times}."
        return f"{told}{_LIKE_DATA if self.follows_data else ''} {self._long_steps}".strip()

    @property
    def _long_steps(self) -> str:
        slow = [rank.slowness for rank in self.ranks]
        return slowness.of_few_steps(self.steps.compute, slow, rounds=self.steps.rounds)

    @property
    def step_seconds(self) -> float:
        """How long a step took, on average."""
        return float(np.mean([rank.result - rank.begin for rank in self.steps.ranks]))

    @property
    def waited_share(self) -> float:
        """The share of the time, 0 to 1, for which a rank waited on average."""
        return float(self.waited.sum()) / self.seconds

    @property
    def waiting(self) -> str:
        """Sentences that say which links are slow, and how long ranks have waited and would have waited under `Full()`."""
        waited, full = float(self.waited.sum()), float(self.waited_under_full.sum())
        told = f"Each rank waited for {waited:.1f} s of {self.seconds:.1f} s ({self.waited_share:.0%}) on average."
        told = " ".join([*links.slow(self.recording), told])
        if not self.steps.rounds:
            return f"{told} A policy that waits for nobody saves that at most."
        less = f"{full - waited:.1f} s more" if full >= waited else f"{waited - full:.1f} s less"
        return f"{told} Under Full() the same compute times would have made it wait for {full:.1f} s: {less}."

    @property
    def remarks(self) -> list[str]:
        """Sentences that say what data is missing, and how exactly clocks were compared."""
        clocks = [str(clock) for clock in self.clocks.hosts.values()] if len(self.clocks.hosts) > 1 else []
        return [*self.recording.remarks, *self.steps.remarks, *clocks]
