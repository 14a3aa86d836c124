"""Decides from the histories of a job with work sharing whether each micro-batch is in its update, once: I2 and I10.

A gradient says which micro-batch it is of, who has made it, and of which weights (`history.micro_batch`), so the sum of an
update tells all of that. `checker.py` asks these rules too, and has those about waits, torn data and models.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from history import Event, mark

LEAVING_WAITS = ("flush", "join", "shutdown")  # a rank begins no micro-batch there


class MicroBatch(NamedTuple):
    """Its update, and its number in that."""

    update: int
    number: int


@dataclass(frozen=True)
class Result:
    """What one rank tells of one update in one bucket.

    Attributes:
        counts: by the number of a micro-batch, how often it is in the update.
        marks: of whom it is.
        weights: how many micro-batches had been applied to the weights of which its gradient is.
        leaving: whether the rank took it in a flush or at its end.
    """

    bucket: str
    rank: int
    update: int
    counts: list[int]
    marks: list[int]
    weights: list[int]
    leaving: bool

    def __str__(self) -> str:
        return f"{self.bucket}: rank {self.rank}, update {self.update}"

    def of(self, number: int) -> MicroBatch:
        return MicroBatch(self.update, number)


@dataclass(frozen=True)
class Flush:
    """One that has ended on a rank: updates of which it had made micro-batches before, and updates that it has told of then."""

    made: int
    told: int


class Updates:
    """The histories of a job, ordered by micro-batch and by update."""

    def __init__(self, histories: Mapping[int, list[Event]]) -> None:
        self.begun: dict[MicroBatch, list[int]] = defaultdict(list)  # ranks
        self.made: dict[MicroBatch, list[int]] = defaultdict(list)
        self.skipped: set[MicroBatch] = set()
        self.results: dict[str, dict[int, list[Result]]] = {}
        self.flushes: dict[int, list[Flush]] = {rank: [] for rank in histories}
        self.left = {rank for rank, events in histories.items() if any(event["e"] == "leave" for event in events)}
        self._histories = histories
        for events in histories.values():
            for event in events:
                if event["e"] == "bucket" and event["policy"] == "work_sharing":
                    self.results.setdefault(event["b"], {rank: [] for rank in histories})
        for rank in histories if self.results else ():
            self._read(rank)

    def _read(self, rank: int) -> None:
        waits: dict[int, str] = {}
        made, made_before_flush, left = 0, 0, False
        for event in self._histories[rank]:
            if event["e"] in ("begun", "made"):
                micro_batch = MicroBatch(event["u"], event["n"])
                (self.begun if event["e"] == "begun" else self.made)[micro_batch].append(rank)
                if event["e"] == "made":
                    made = micro_batch.update + 1
                    self.skipped |= {micro_batch} if event["skips"] else set()
            elif event["e"] == "wait":
                waits[event["n"]] = event["what"]
                made_before_flush = made
            elif event["e"] in ("done", "error"):
                del waits[event["n"]]
            elif event["e"] == "leave":
                left = True
            elif event["e"] == "result":
                self._add_result(rank, event, leaving=left or any(what in LEAVING_WAITS for what in waits.values()))
            elif event["e"] == "flushed":
                self.flushes[rank].append(Flush(made_before_flush, self.told(rank)))

    def _add_result(self, rank: int, event: Event, *, leaving: bool) -> None:
        numbers = len(event["low"]) // 3
        counts, marks, weights = (event["low"][start : start + numbers] for start in range(0, 3 * numbers, numbers))
        result = Result(event["b"], rank, event["round"], counts, marks, weights, leaving)
        self.results[event["b"]][rank].append(result)

    def told(self, rank: int) -> int:
        """Updates of which a rank has told, in all buckets."""
        return min(len(of_ranks[rank]) for of_ranks in self.results.values())

    def made_by(self, rank: int) -> int:
        """Updates of which a rank has made micro-batches, or the ones before."""
        return max((each.update + 1 for each, ranks in self.made.items() if rank in ranks), default=0)

    def all(self) -> Iterator[Result]:
        for of_ranks in self.results.values():
            for results in of_ranks.values():
                yield from results


def check(histories: Mapping[int, list[Event]]) -> list[str]:
    """The violations that the histories show."""
    updates = Updates(histories)
    rules = (made_once, contained_once, nothing_lost, complete, of_the_same_weights, delivered_by_flushes, one_result)
    return [violation for rule in rules for violation in rule(updates)]


def made_once(updates: Updates) -> Iterator[str]:
    """I10: each micro-batch is made by one rank."""
    for (update, number), ranks in updates.made.items():
        if len(ranks) > 1:
            yield f"I10: micro-batch {number} of update {update} was made by ranks {ranks}"


def contained_once(updates: Updates) -> Iterator[str]:
    """I10: what is in an update was made for it by a rank that had begun it, and is in it once."""
    for result in updates.all():
        numbers = len(result.counts)
        for number, (count, of) in enumerate(zip(result.counts, result.marks, strict=True)):
            marks = [mark(rank, result.update * numbers + number) for rank in updates.begun.get(result.of(number), ())]
            if (count, of) != (0, 0) and not (count == 1 and of in marks):
                yield f"I10 {result}: {count} times micro-batch {number}, which is not what a rank had begun"
                break


def nothing_lost(updates: Updates) -> Iterator[str]:
    """I10: what was made for an update is in it, in all buckets."""
    for result in updates.all():
        for number, count in enumerate(result.counts):
            ranks = updates.made.get(result.of(number))
            if ranks and count == 0 and result.of(number) not in updates.skipped:
                yield f"I10 {result}: micro-batch {number} is lost, which rank {ranks[0]} has made"
                break


def complete(updates: Updates) -> Iterator[str]:
    """I10: an update has all its micro-batches, but for one that closed while every rank was leaving."""
    for result in updates.all():
        short = [n for n, count in enumerate(result.counts) if count == 0 and result.of(n) not in updates.skipped]
        if short and not result.leaving:
            yield f"I10 {result}: micro-batches {short} are missing, and the rank was not leaving"


def of_the_same_weights(updates: Updates) -> Iterator[str]:
    """I10: each gradient in an update is of the weights that all updates before have made."""
    for of_ranks in updates.results.values():
        for results in of_ranks.values():
            applied = 0
            for result in results:
                weights = {of for of, count in zip(result.weights, result.counts, strict=True) if count}
                if weights - {applied}:
                    yield f"I10 {result}: gradients are of the weights after {sorted(weights)} micro-batches, not {applied}"
                    break
                applied += sum(result.counts)


def delivered_by_flushes(updates: Updates) -> Iterator[str]:
    """I10: what was made before a flush that has ended on every rank, or by one that has left, is in an update then."""
    for index in itertools.count():
        ended = {rank: flushes[index] for rank, flushes in updates.flushes.items() if index < len(flushes)}
        others = updates.flushes.keys() - ended.keys()
        if not ended or others - updates.left:
            return
        made = max([flush.made for flush in ended.values()] + [updates.made_by(rank) for rank in others])
        for rank, flush in ended.items():
            if flush.told < made:
                yield f"I10: after flush {index} rank {rank} tells of {flush.told} updates, and {made} were begun before"


def one_result(updates: Updates) -> Iterator[str]:
    """I2: an update is the same on all ranks, and has the same micro-batches in all buckets."""
    first: dict[int, Result] = {}
    for results in updates.results.values():
        of_bucket: dict[int, Result] = {}
        for result in itertools.chain(*results.values()):
            other = of_bucket.setdefault(result.update, result)
            if _content(result) != _content(other):
                yield f"I2 {result}: has another result than rank {other.rank}"
                break
            other = first.setdefault(result.update, result)
            if _kept(result, updates) != _kept(other, updates):
                yield f"I2 {result}: has other micro-batches than {other.bucket}"
                break


def _content(result: Result) -> tuple[Sequence[int], ...]:
    return result.counts, result.marks, result.weights


def _kept(result: Result, updates: Updates) -> list[int]:
    """The numbers that are in it, without those that were skipped, which may be in one bucket and not in another."""
    return [n for n, count in enumerate(result.counts) if count and result.of(n) not in updates.skipped]
