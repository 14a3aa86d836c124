"""Reads the steps of a training from the recordings of its ranks (table `steps` in `docs/slow-ranks.md`), on one clock.

*Compute* is the time from a step's begin to its last gradient (*handed*), minus the time that the application was
blocked, for example in the average of a metric. (Under TensorFlow blocked times are unknown.) The rest of a step is
*reduce* while reductions run on this rank, and otherwise *wait*. With NCCL a reduction ends in the recording when it
has been queued on the device, so its time on the device counts as wait. The first recorded step is left out, because
its begin is unknown.

Under `WorkSharing()` a step is an update of the optimizer that sent most bytes, and has the number of the update's
round. A row of the table is a micro-batch. A rank without a micro-batch of an update does not have this step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from horovod_partial._core import PARTS
from horovod_partial.insight.recording.clocks import Clocks
from horovod_partial.insight.recording.format import Table
from horovod_partial.insight.recording.reading import RankRecording, Recording

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# A wait was not for gradients if the application then computes for more seconds than this before it hands over tensors.
# The time between two gradients of one optimizer is shorter.
_LEAST_WORK = 2e-4
# The text by which a recording names the policy of a bucket under `WorkSharing()`.
_SHARED = re.compile(r"WorkSharing\(\), backward_passes_per_step=(\d+)")


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank. Arrays have the shape (steps,). Times are in seconds, by `Clocks.seconds`.

    `step` is the number of the step on this rank; under `WorkSharing()` the number of the update. `micro_batches` says
    how many micro-batches of the step this rank computed; 1 under other policies. At `begin` the application went on
    after the step before, at `handed` the rank's compute ended, and at `result` the last result was there. `late` says
    whether a contribution of the step was late. `staleness` is the maximum over the buckets.

    The rank computed for `compute` seconds, and waited for other ranks for `wait` seconds. Reductions ran for `reduce`
    seconds after the compute or during a wait. `share` equals `compute`, except under `WorkSharing()`. There it is the
    time that this rank would have needed for an equal share of the step's micro-batches. Each micro-batch that the rank
    computed more, or less, than its share counts as the median of the rank's micro-batches in the step.
    `parts`, of the shape (steps, 5), has the seconds of each part of `compute`, in the order of `PARTS`; -1 if unknown.
    """

    rank: int
    step: Integers
    micro_batches: Integers
    begin: Floats
    handed: Floats
    result: Floats
    late: NDArray[np.bool_]
    staleness: Integers
    compute: Floats
    share: Floats
    reduce: Floats
    wait: Floats
    parts: Floats

    def take(self, rows: NDArray[np.bool_]) -> RankSteps:
        """Return only the steps for which `rows`, of the shape (steps,), is True."""
        arrays = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "rank"}
        return RankSteps(self.rank, **arrays)


@dataclass(frozen=True)
class JobSteps:
    """The steps of all recorded ranks.

    `rounds` says whether the training reduces by rounds, not by Horovod's own operations. `policy` is the text of the
    policy under which most of the training's bytes travel, or `full` if `rounds` is False. Under `WorkSharing()`,
    `passes` is the number of micro-batches of a step for each rank, on average, and `micro_batches` says by rank how
    many the rank computed in its whole recording. Under other policies they are 0 and empty. `ranks` has the steps of
    each rank, in order of rank. Ranks may have different numbers of steps. `remarks` has sentences on missing data.
    """

    policy: str
    rounds: bool
    passes: int
    micro_batches: dict[int, int]
    ranks: tuple[RankSteps, ...]
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, recording: Recording, clocks: Clocks) -> JobSteps:
        """Find the steps of a recording.

        The training has rounds if more bytes arrived in buckets than Horovod itself reduced. Raises ValueError if no
        rank has recorded two steps, because then the length of a step is unknown.
        """
        carried: Counter[tuple[str | None, str]] = Counter()  # bytes, by optimizer and policy
        recorded = recording.ranks.values()
        for rank in recorded:
            table = rank.tables["steps"]
            for number in np.unique(table["bucket"]).tolist():
                policy = rank.buckets[number].policy if number >= 0 else "full"
                carried[_optimizer_of(rank, number), policy] += int(table["bytes"][table["bucket"] == number].sum())
        reduced = carried.pop((None, "full"), 0)
        rounds = carried.total() > reduced
        optimizer, policy = carried.most_common(1)[0][0] if rounds else (None, "full")
        shared = _SHARED.match(policy)
        passes = int(shared[1]) if shared else 0
        rows = {rank.rank: _rows(rank, optimizer) for rank in recorded}
        made = {rank: len(table["step"]) for rank, table in rows.items()} if shared else {}
        all_ranks = [_steps(rank, clocks, rows[rank.rank], passes) for rank in recorded]
        ranks = tuple(steps for steps in all_ranks if len(steps.step))
        if not ranks:
            raise ValueError(
                f"run {recording.run} has no rank with two whole steps, so nothing tells how long a step takes"
            )
        empty = [steps.rank for steps in all_ranks if not len(steps.step)]
        remarks = [f"Rank {rank} has not recorded two whole steps." for rank in empty]
        return cls(policy, rounds, passes, made, ranks, tuple(remarks))

    @property
    def compute(self) -> Floats:
        """How long each rank computes for an equal share of a step, in seconds, of the shape (steps, ranks).

        All ranks must have the same steps (`common`).
        """
        return np.column_stack([steps.share for steps in self.ranks])

    @property
    def parts(self) -> Floats:
        """The parts of a micro-batch in seconds, of the shape (steps, ranks, 5), in the order of `PARTS`. -1 if unknown."""
        return np.stack([steps.parts / steps.micro_batches[:, None] for steps in self.ranks], axis=1)

    def common(self) -> JobSteps:
        """Return only the steps that every rank has recorded. So the arrays of all ranks have the same shape."""
        both = self.ranks[0].step
        for steps in self.ranks[1:]:
            both = np.intersect1d(both, steps.step, assume_unique=True)
        ranks = tuple(steps.take(np.isin(steps.step, both)) for steps in self.ranks)
        most = max(self.ranks, key=lambda steps: len(steps.step))
        fewest = min(self.ranks, key=lambda steps: len(steps.step))
        remarks = self.remarks
        if len(both) < 0.95 * len(most.step):
            told = f"{len(both)} steps are looked at, of {len(most.step)} that rank {most.rank} has recorded: those that rank"
            remarks = (*remarks, f"{told} {fewest.rank} has too.")
        return replace(self, ranks=ranks, remarks=remarks)


def other_waits(rank: RankRecording, steps: RankSteps, clocks: Clocks, *, rounds: bool) -> NDArray[np.bool_]:
    """Return for each step whether something besides gradients made the rank wait for all ranks in it.

    The result has the shape (steps,). Under a partial policy each wait for one of Horovod's own operations counts. Under
    `Full()` a wait counts if the application did other work after it, and only then handed over the last tensors of the
    step. Under TensorFlow such waits are unknown.
    """
    waits = np.sort(clocks.seconds(rank, rank.tables["waits"]["begin"]))
    first = np.r_[waits, np.inf][np.searchsorted(waits, steps.begin)]  # the first wait since the step began
    # Without rounds, a wait counts if the rank computed for more than `_LEAST_WORK` after it.
    until = np.r_[steps.begin[1:], np.inf] if rounds else steps.begin + steps.compute - _LEAST_WORK
    return first < until


def _optimizer_of(rank: RankRecording, number: int) -> str | None:
    """Return a name for the optimizer of a bucket under `WorkSharing()`, whose updates count as steps.

    Return an empty text for all other buckets, and None for -1, the number of Horovod's own reductions.
    """
    if number < 0:
        return None
    bucket = rank.buckets[number]
    return (bucket.name.rpartition(".")[0] or bucket.name) if _SHARED.match(bucket.policy) else ""


def _rows(rank: RankRecording, optimizer: str | None) -> Table:
    """Return the rows of a rank's table `steps` that belong to an optimizer."""
    table = rank.tables["steps"]
    of = np.isin(table["bucket"], [one for one in (-1, *rank.buckets) if _optimizer_of(rank, one) == optimizer])
    return {name: column[of] for name, column in table.items()}


def _steps(rank: RankRecording, clocks: Clocks, rows: Table, passes: int) -> RankSteps:
    """Return a rank's steps, without those whose begin is unknown.

    Without work sharing `passes` is 0. Otherwise a step is an update, and each row is a micro-batch of an update. An
    update is left out, too, if some of its rows may be missing, or if the rank has no row of the previous update.
    """
    number = rows["round" if passes else "step"]
    order = np.argsort(number, kind="stable")
    rows = {name: column[order] for name, column in rows.items()}
    step, first, micro_batches = np.unique(number[order], return_index=True, return_counts=True)
    last = first + micro_batches - 1
    begin, handed, result = (clocks.seconds(rank, rows[name]) for name in ("begin", "handed", "result"))
    each = clocks.seconds(rank, rows["handed"] - rows["blocked"]) - begin
    compute = np.add.reduceat(each, first)
    median = each[np.lexsort((each, np.repeat(np.arange(len(step)), micro_batches)))][(first + last) // 2]
    parts = np.column_stack([rows[name] for name in PARTS])
    known = np.minimum.reduceat(parts, first) >= 0
    reduce = np.add.reduceat(result - clocks.seconds(rank, rows["result"] - rows["reduced"]), first)
    steps = RankSteps(
        rank=rank.rank,
        step=step,
        micro_batches=micro_batches,
        begin=begin[first],
        handed=handed[last],
        result=result[last],
        late=np.maximum.reduceat(rows["late"], first) > 0,
        staleness=np.maximum.reduceat(rows["staleness"], first),
        compute=compute,
        share=compute + (max(passes, 1) - micro_batches) * median,
        reduce=reduce,
        wait=result[last] - begin[first] - compute - reduce,
        parts=np.where(known, np.add.reduceat(parts, first) / 1e6, -1),
    )
    whole = np.minimum.reduceat(rows["begin"], first) >= 0
    if passes:
        whole &= np.r_[False, np.diff(step) == 1][: len(step)]
        whole[-1:] &= rank.ended
    return steps.take(whole)
