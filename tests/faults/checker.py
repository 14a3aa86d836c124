"""Decides from the histories of a job whether the plugin has kept what docs/protocol.md promises, I1 to I7, I9 and I10.

It reads nothing but the events of `history.py`, and runs no code of the plugin. Contributions are made so that a sum tells
whose are in it, and which. The key is the *account* of a bucket: after a round, how many contributions of each rank have been
delivered so far, and the sum of their marks. It must be the same on every rank that tells of that round, whether it got the
rounds one by one or several at once.

A job that a fault has ended is judged by what was told until then: waits end with the process, and what is promised after a
flush is asked of the flushes that ended on every rank.

    python tests/faults/checker.py FOLDER
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import shared_updates
from history import WITHOUT_QUORUM, Event, mark, read

# While a rank is in one of these, and after its last contribution, rounds do not wait for it.
EXEMPTING = {"flush", "collective", "join", "shutdown"}


class Account(NamedTuple):
    """What has been delivered of each rank: how many contributions, and the sum of their marks."""

    counts: tuple[int, ...]
    marks: tuple[int, ...]

    @classmethod
    def of_nothing(cls, size: int) -> Account:
        return cls((0,) * size, (0,) * size)

    def plus(self, result: Sequence[int]) -> Account:
        size = len(self.counts)
        return Account(
            tuple(a + b for a, b in zip(self.counts, result[:size], strict=True)),
            tuple(a + b for a, b in zip(self.marks, result[size:], strict=True)),
        )


@dataclass
class Told:
    """What one rank tells of one bucket."""

    submitted: list[int] = field(default_factory=list)  # the index of the event, by number of the contribution
    # The event's index, the event, and the account after it.
    results: list[tuple[int, Event, Account]] = field(default_factory=list)


class Job:
    """The histories of a job, ordered by bucket."""

    def __init__(self, histories: Mapping[int, list[Event]]) -> None:
        self.events = histories
        self.size = len(histories)
        self.whole = all(events and events[-1]["e"] == "end" for events in histories.values())  # no fault has ended it
        self.buckets: dict[str, Event] = {}
        self.excused: Counter[str] = Counter()  # rounds of a bucket that closed without their quorum
        self.told: dict[str, dict[int, Told]] = defaultdict(lambda: {rank: Told() for rank in histories})
        for rank, events in histories.items():
            for index, event in enumerate(events):
                self._enter(rank, index, event)
        self._marks = {rank: [0] for rank in histories}  # the sum of a rank's first marks, by their number

    def _enter(self, rank: int, index: int, event: Event) -> None:
        if event["e"] == "bucket":
            self.buckets.setdefault(event["b"], event)
        elif event["e"] == "closed":
            without = sum(event["by"].get(reason, 0) for reason in WITHOUT_QUORUM)
            self.excused[event["b"]] = max(self.excused[event["b"]], without)
        elif event["e"] == "submit":
            self.told[event["b"]][rank].submitted.append(index)
        elif event["e"] == "result" and not self._shares(event["b"]):
            told = self.told[event["b"]][rank]
            before = told.results[-1][2] if told.results else Account.of_nothing(self.size)
            told.results.append((index, event, before.plus(event["low"])))

    def _shares(self, bucket: str) -> bool:
        """Whether a bucket has shared updates, which `shared_updates` judges."""
        return bool(self.buckets[bucket]["policy"] == "work_sharing")

    def marks_of_first(self, rank: int, count: int) -> int:
        """The sum of the marks of a rank's first contributions."""
        sums = self._marks[rank]
        while len(sums) <= count:
            sums.append(sums[-1] + mark(rank, len(sums) - 1))
        return sums[count]

    def accounts(self, bucket: str) -> dict[int, Account]:
        """The account after each round that any rank tells of; the first that does counts."""
        accounts: dict[int, Account] = {}
        for told in self.told[bucket].values():
            for _, event, account in told.results:
                if event["round"] is not None:
                    accounts.setdefault(event["round"], account)
        return dict(sorted(accounts.items()))

    def of_rounds(self) -> Iterator[str]:
        """The buckets that have rounds, each rank with contributions of its own."""
        return (name for name, of in self.buckets.items() if of["policy"] != "full" and not self._shares(name))


def check(histories: Mapping[int, list[Event]]) -> list[str]:
    """The violations that the histories show: the number of what was promised, the bucket, the ranks, and what is wrong."""
    job = Job(histories)
    rules = (
        exactly_once,
        delivered_by_flushes,
        one_result,
        quorum,
        staleness,
        untaken,
        full,
        every_wait_ends,
        nothing_after_an_error,
        not_torn,
        one_model,
    )
    return [violation for rule in rules for violation in rule(job)] + shared_updates.check(histories)


def exactly_once(job: Job) -> Iterator[str]:
    """I1: what is delivered of a rank are its first contributions, in their order, each once."""
    for bucket in job.of_rounds():
        for rank, told in job.told[bucket].items():
            for _, event, account in told.results:
                wrong = [
                    of for of in job.events if account.marks[of] != job.marks_of_first(of, max(0, account.counts[of]))
                ]
                if wrong or min(event["low"]) < 0:
                    yield (
                        f"I1 {bucket}: rank {rank}, round {event['round']}: what was delivered of rank(s) {wrong} are not "
                        f"their first {[account.counts[of] for of in wrong]} contributions"
                    )
                    break


def delivered_by_flushes(job: Job) -> Iterator[str]:
    """I1: a flush that has ended on every rank has delivered all that was submitted before; at the end that is everything."""
    for bucket in job.of_rounds():
        told = job.told[bucket]
        before = {rank: submitted_before_flushes(events, bucket) for rank, events in job.events.items()}
        flushes = min(len(of_rank) for of_rank in before.values())
        for rank, events in job.events.items():
            ends = [index for index, event in enumerate(events) if event["e"] == "flushed"]
            for flush, end in enumerate(ends[:flushes]):
                account = last_account(job, told[rank], end)
                short = [of for of in job.events if account.counts[of] < before[of][flush]]
                if short:
                    yield f"I1 {bucket}: rank {rank} has not got what rank(s) {short} had submitted before flush {flush}"
                    break
        if job.whole:
            everything = tuple(len(told[rank].submitted) for rank in sorted(job.events))
            for rank, of_rank in told.items():
                counts = last_account(job, of_rank, len(job.events[rank])).counts
                if counts != everything:
                    yield f"I1 {bucket}: rank {rank} got {counts} contributions, and {everything} were submitted"


def submitted_before_flushes(events: Sequence[Event], bucket: str) -> list[int]:
    """How many contributions a rank had submitted when it began each flush that has ended there."""
    count, begun, result = 0, 0, []
    for event in events:
        if event["e"] == "submit" and event["b"] == bucket:
            count += 1
        elif event["e"] == "wait" and event["what"] == "flush":
            begun = count
        elif event["e"] == "flushed":
            result.append(begun)
    return result


def last_account(job: Job, told: Told, end: int) -> Account:
    accounts = [account for index, _, account in told.results if index < end]
    return accounts[-1] if accounts else Account.of_nothing(job.size)


def one_result(job: Job) -> Iterator[str]:
    """I2: all ranks that tell of a round have the same account after it, and each rank gets its rounds in their order."""
    for bucket in job.of_rounds():
        accounts = job.accounts(bucket)
        for rank, told in job.told[bucket].items():
            newest = -1
            for _, event, account in told.results:
                if event["round"] is None:
                    continue
                if account != accounts[event["round"]]:
                    yield f"I2 {bucket}: after round {event['round']} rank {rank} has another result than other ranks"
                    break
                if event["round"] < newest or (event["round"] == newest and any(event["low"])):
                    yield f"I2 {bucket}: rank {rank} got round {event['round']} after round {newest}"
                    break
                newest = event["round"]


def quorum(job: Job) -> Iterator[str]:
    """I3: as many ranks have arrived in time for a round as close it, but for rounds that close for another reason."""
    if not job.whole:
        return  # why rounds have closed was not told
    for bucket in job.of_rounds():
        if job.buckets[bucket]["optimizer"]:
            continue  # nobody tells of single arrivals
        needed = min(job.buckets[bucket]["quorum"], job.size)
        arrived: Counter[int] = Counter()
        for told in job.told[bucket].values():
            arrived.update(event["round"] for _, event, _ in told.results if event.get("late") is False)
        short = [
            number
            for number in range(min(arrived, default=0), max(arrived, default=-1) + 1)
            if arrived[number] < needed
        ]
        if len(short) > job.excused[bucket]:
            yield f"I3 {bucket}: rounds {short} closed with fewer than {needed} arrivals, {job.excused[bucket]} may"


def staleness(job: Job) -> Iterator[str]:
    """I4: no rank that is there goes without a contribution for longer than the bound."""
    if not job.whole:
        return  # why rounds have closed was not told
    for bucket in job.of_rounds():
        accounts = job.accounts(bucket)
        bound = job.buckets[bucket]["staleness"] + job.excused[bucket]
        for rank, told in job.told[bucket].items():
            by_count = defaultdict(list)
            for number, account in accounts.items():
                by_count[account.counts[rank]].append(number)
            for count, rounds in by_count.items():
                run = rounds[-1] - rounds[0]
                if 0 < count < len(told.submitted) and run > bound and not was_exempt(job, bucket, rank, count):
                    yield f"I4 {bucket}: {run} rounds after round {rounds[0]} have nothing of rank {rank}, {bound} may"


def untaken(job: Job) -> Iterator[str]:
    """I4: no more rounds of an optimizer wait for a rank than may, when it begins a step."""
    if not job.whole:
        return
    for bucket in job.of_rounds():
        of = job.buckets[bucket]
        if not of["optimizer"]:
            continue
        most = of["limit"] + job.excused[bucket]
        for rank, told in job.told[bucket].items():
            closed = [
                (event["t"], event["round"])
                for other, of_other in job.told[bucket].items()
                for _, event, _ in of_other.results
                if other != rank and event["round"] is not None
            ]
            for count, begin in enumerate(told.submitted):
                now = job.events[rank][begin]["t"]
                newest = max((number for at, number in closed if at <= now), default=-1)
                taken = max((event["round"] for index, event, _ in told.results if index < begin), default=-1)
                if newest - taken > most and not (count and was_exempt(job, bucket, rank, count)):
                    yield f"I4 {bucket}: {newest - taken} rounds wait for rank {rank} at contribution {count}, {most} may"
                    break


def was_exempt(job: Job, bucket: str, rank: int, count: int) -> bool:
    """Whether a rank was in a call that exempts it between two of its contributions."""
    submitted = job.told[bucket][rank].submitted
    between = job.events[rank][submitted[count - 1] : submitted[count]]
    return any(event["e"] == "wait" and event["what"] in EXEMPTING for event in between)


def full(job: Job) -> Iterator[str]:
    """I5: a result of `Full()` is the sum of what all ranks have submitted under that number."""
    for bucket, of in job.buckets.items():
        if of["policy"] != "full":
            continue
        for rank, told in job.told[bucket].items():
            for number, (_, event, _) in enumerate(told.results):
                expected = [1] * job.size + [mark(of_rank, number) for of_rank in sorted(job.events)]
                if event["low"] != expected:
                    yield f"I5 {bucket}: result {number} of rank {rank} is not the sum over all ranks"
                    break


def every_wait_ends(job: Job) -> Iterator[str]:
    """I6: every call that waits returns or raises. In a job that a fault has ended, waits end with their process."""
    if not job.whole:
        return
    for rank, events in job.events.items():
        ended = {event["n"] for event in events if event["e"] in ("done", "error")}
        for event in events:
            if event["e"] == "wait" and event["n"] not in ended:
                yield f"I6 rank {rank}: {event['what']} has not ended"


def nothing_after_an_error(job: Job) -> Iterator[str]:
    """I6: when Horovod has failed on a rank, nothing is delivered there any more."""
    for rank, events in job.events.items():
        after = itertools.dropwhile(lambda event: event.get("kind") != "HorovodInternalError", events)
        for event in after:
            if event["e"] == "result":
                yield f"I6 {event['b']}: rank {rank} got a result after an error"
                break


def not_torn(job: Job) -> Iterator[str]:
    """I7: all copies that a result holds are alike."""
    for rank, events in job.events.items():
        for event in events:
            if event["e"] == "result" and event["low"] != event["high"]:
                yield f"I7 {event['b']}: rank {rank}, round {event['round']}: the result is torn"
                break


def one_model(job: Job) -> Iterator[str]:
    """I9: replicas are the same when everything has been delivered."""
    digests = {
        rank: [event["digest"] for event in events if event["e"] == "replica"] for rank, events in job.events.items()
    }
    for index, of_ranks in enumerate(zip(*digests.values(), strict=False)):
        if len(set(of_ranks)) > 1:
            yield f"I9: the models differ at comparison {index}: {dict(zip(digests, of_ranks, strict=True))}"
            return
    if job.whole and len({len(of_rank) for of_rank in digests.values()}) > 1:
        yield "I9: not all ranks tell of their models"


def main() -> int:
    violations = check(read(Path(sys.argv[1])))
    print("\n".join(violations) or "no violation")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
