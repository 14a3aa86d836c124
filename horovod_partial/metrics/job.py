"""The metrics of a running job, from what rank 0 knows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from horovod_partial.metrics.families import Family

PREFIX = "horovod_partial_"
_SIGNS = (
    ("processors", "processors", "Processors that the rank's process uses, on average."),
    (
        "throttled",
        "throttled_ratio",
        "Share of scheduling periods in which the cgroup of the rank's process is throttled.",
    ),
    (
        "stolen",
        "stolen_ratio",
        "Share of the processor time of the rank's machine that its hypervisor gives to others.",
    ),
    ("pressure", "pressure_ratio", "Share of the time in which some process on the rank's host waits for a processor."),
)


_COUNTED = {
    "rounds_total": "Rounds that have closed, of all buckets.",
    "on_time_total": "Contributions that were on time for their round. The rank counts within the process set.",
    "late_total": "Contributions that were late for their round. The rank counts within the process set.",
    "contributions_total": "Contributions of all ranks in all rounds.",
    "staleness_rounds_total": "Sum of the staleness of these contributions, in rounds.",
}


class JobMetrics:
    """The families of a running job. Each iteration reads the job anew. Only one thread at a time may iterate.

    `size` is the number of ranks. `ranks` returns what rank 0 knows of each watched rank, same as
    `_attach.Monitor.ranks`. `statistics` returns the raw statistics of each process set that rank 0 is in, by the set's
    number.
    """

    def __init__(
        self,
        size: int,
        ranks: Callable[[], Sequence[Mapping[str, Any]]],
        statistics: Callable[[], Mapping[int, Mapping[str, Mapping[str, Any]]]],
    ) -> None:
        self._size = size
        self._ranks = ranks
        self._statistics = statistics
        self._rounds = _RoundCounters()

    def __iter__(self) -> Iterator[Family]:
        yield "ranks", "Ranks of the job.", [({}, self._size)]
        yield from _of_ranks(self._ranks())
        yield from self._rounds.families(self._statistics())


def _of_ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    labelled = [({"rank": str(number)}, rank) for number, rank in enumerate(ranks)]
    for key, name, help_text in (
        ("steps", "steps_total", "Steps whose compute time is known. Under WorkSharing() a micro-batch is a step."),
        ("compute_seconds", "compute_seconds_total", "Compute time of these steps, without waiting."),
        ("bytes", "bytes_total", "Bytes that the rank has handed over for reduction."),
    ):
        yield name, help_text, [(labels, rank[key]) for labels, rank in labelled]
    help_text = "How many times as long as the median rank a slow rank computes, and in what way it is slow; 1 if it is not slow."
    yield (
        "slowness_ratio",
        help_text,
        [({**labels, "kind": rank["kind"]}, rank["slowness"]) for labels, rank in labelled],
    )
    for key, name, help_text in _SIGNS:
        yield name, help_text, [(labels, rank[key]) for labels, rank in labelled if key in rank]


class _RoundCounters:
    """Adds up the rounds of all buckets. A bucket is forgotten when its optimizer is; what it has counted stays."""

    def __init__(self) -> None:
        self._totals: dict[str, Counter[tuple[tuple[str, str], ...]]] = {name: Counter() for name in _COUNTED}
        self._before: dict[tuple[int, str, str, int], int] = {}  # what each bucket had counted at the last look

    def families(self, statistics: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Iterator[Family]:
        """Return the families of rounds, from the raw statistics of each process set."""
        counts = {
            (number, bucket, *count): value
            for number, buckets in statistics.items()
            for bucket, raw in buckets.items()
            for count, value in _counts(raw)
        }
        for key, value in counts.items():
            number, _, name, rank = key
            labels = (("process_set", str(number)), *((("rank", str(rank)),) if rank >= 0 else ()))
            before = self._before.get(key, 0)
            self._totals[name][labels] += value - before if value >= before else value
        self._before = counts
        for name, help_text in _COUNTED.items():
            yield name, help_text, [(dict(labels), total) for labels, total in sorted(self._totals[name].items())]


def _counts(raw: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    """Return what a bucket has counted, by the name of the metric and the rank; the rank is -1 if the metric has none."""
    for name in ("on_time", "late"):
        for rank, count in enumerate(raw[name]):
            yield (f"{name}_total", rank), count
    yield ("rounds_total", -1), raw["rounds"]
    yield ("contributions_total", -1), sum(raw["staleness"].values())
    yield ("staleness_rounds_total", -1), sum(missed * count for missed, count in raw["staleness"].items())
