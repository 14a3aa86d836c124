"""Converts the core's counts of rounds to statistics that users can read and plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Raw = dict[str, dict[str, Any]]  # counts of rounds, arrivals and waits in the C++ part of this package, by bucket name


class Progress:
    """Tells, for logs, what has happened to the rounds since the last call of `since`.

    `read` returns the counts of all buckets since they were declared. `rank` is this rank's number in the process set.
    """

    def __init__(self, read: Callable[[], Raw], rank: int) -> None:
        self._read = read
        self._rank = rank
        self._before = self._counts()

    def since(self) -> dict[str, float]:
        """Return what has happened to the rounds since the last call. The dictionary is empty if there was no round.

        `late` is the share of this rank's arrivals that came too late, 0 to 1. `fresh` is the mean number of ranks on
        time for a round. `staleness` is the mean staleness of contributions, in rounds. `waited_seconds` is this rank's
        wait for results, over all buckets.
        """
        before, self._before = self._before, self._counts()
        new: Counter[str] = Counter()
        for name, counts in self._before.items():
            new.update(counts)
            new.subtract(before.get(name, {}))  # without old counts, the bucket's first round came after the last call
        if not new["rounds"]:
            return {}
        return {
            "late": new["late"] / max(new["late"] + new["on_time"], 1),
            "fresh": new["fresh"] / new["rounds"],
            "staleness": new["staleness"] / max(new["contributions"], 1),
            "waited_seconds": new["microseconds_waited"] / 1e6,
        }

    def _counts(self) -> dict[str, Counter[str]]:
        return {
            name: Counter(
                rounds=raw["rounds"],
                on_time=raw["on_time"][self._rank],
                late=raw["late"][self._rank],
                fresh=sum(count * rounds for count, rounds in enumerate(raw["fresh"])),
                staleness=sum(rounds * count for rounds, count in raw["staleness"].items()),
                contributions=sum(raw["staleness"].values()),
                microseconds_waited=round(1e6 * raw["waited_seconds"]),
            )
            for name, raw in self._read().items()
            if raw["rounds"]  # before its first round a bucket has no counts of ranks
        }


def slowness_now(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how many ranks are slow, for logs, from the result of `Runtime.watched_ranks`.

    `slow_ranks` is the number of slow ranks, and `slowness` that of the slowest rank. It is empty if no rank is watched.
    """
    slowness = [rank["slowness"] for rank in ranks]
    return {"slow_ranks": sum(factor > 1 for factor in slowness), "slowness": max(slowness)} if slowness else {}


def summarise(raw: Raw) -> dict[str, dict[str, Any]]:
    """Return statistics by bucket, from the core's counts. `docs/api.md` explains the keys, under Statistics."""
    statistics = {}
    for name, bucket in sorted(raw.items()):
        fresh = {count: rounds for count, rounds in enumerate(bucket["fresh"]) if rounds}
        rounds = bucket["rounds"]
        statistics[name] = {key: value for key, value in bucket.items() if key not in ("fresh", "staleness")} | {
            "closed_by": {reason: count for reason, count in bucket["closed_by"].items() if count},
            "fresh_mean": sum(count * n for count, n in fresh.items()) / rounds if rounds else 0.0,
            "fresh_histogram": fresh,
            "staleness_histogram": dict(sorted(bucket["staleness"].items())),
        }
    return statistics
