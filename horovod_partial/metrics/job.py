"""The metrics of a running job, from what rank 0 knows of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from horovod_partial._core import PARTS

PREFIX = "horovod_partial_"

# Metrics of each watched rank: the key in what `ranks` returns, the name of the metric, and its help text.
_OF_RANKS = (
    ("steps", "steps_total", "Steps whose compute time is known. Under WorkSharing() a micro-batch is a step."),
    ("compute_seconds", "compute_seconds_total", "Compute time of these steps, without waiting."),
    ("step_seconds", "step_seconds_total", "Whole time of these steps, with waiting and reductions."),
    ("bytes", "bytes_total", "Bytes that the rank has handed over for reduction."),
    (
        "slowness",
        "slowness_ratio",
        "How many times as long as the median rank a slow rank computes, in what way, and which part explains it; else 1. Pauses: "
        + "the time of the job divided by what that would be without them.",
    ),
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


class JobMetrics(Collector):
    """The metrics of a running job, as a collector of Prometheus. Each collection reads the job anew.

    `size` is the number of ranks. `ranks` returns what rank 0 knows of each watched rank, same as
    `_attach.Monitor.ranks`. `statistics` returns the raw statistics of each process set that rank 0 is in, by the set's
    number. One thread at a time reads the job, and none after `close`.
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
        # Counts over all buckets, including buckets that have ended with their optimizers.
        self._totals: dict[str, Counter[tuple[tuple[str, str], ...]]] = {name: Counter() for name in _COUNTED}
        self._before: dict[tuple[int, str, str, int], int] = {}  # the counts of each bucket at the last collection
        self._lock = threading.Lock()  # guards _is_open, and is held while the job is read
        self._is_open = True

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that have samples. A name that ends with `_total` is a counter, any other one a gauge."""
        with self._lock:
            return [metric for metric in self._metrics() if metric.samples] if self._is_open else []

    def close(self) -> None:
        """Wait until no thread reads the job. After this call no thread reads it again."""
        with self._lock:
            self._is_open = False

    def _metrics(self) -> Iterator[Metric]:
        yield _metric("ranks", "Ranks of the job.", [({}, self._size)])
        ranks = self._ranks()
        for key, name, help_text in _OF_RANKS:
            samples = [({"rank": str(number)}, rank) for number, rank in enumerate(ranks) if key in rank]
            if key == "slowness":
                samples = [({**labels, "kind": rank["kind"], "part": rank["part"]}, rank) for labels, rank in samples]
            yield _metric(name, help_text, [(labels, rank[key]) for labels, rank in samples])
        parts = [
            ({"rank": str(number), "part": part}, rank[part])
            for number, rank in enumerate(ranks)
            for part in PARTS
            if part in rank
        ]
        yield _metric("part_seconds_total", "Parts of the compute time, over the steps where they are known.", parts)
        counts = {
            (number, bucket, *of): value
            for number, buckets in self._statistics().items()
            for bucket, raw in buckets.items()
            for of, value in _counts(raw)
        }
        for count, value in counts.items():
            number, _, name, rank = count
            labels = (("process_set", str(number)), *((("rank", str(rank)),) if rank >= 0 else ()))
            before = self._before.get(count, 0)
            self._totals[name][labels] += value - before if value >= before else value
        self._before = counts
        for name, help_text in _COUNTED.items():
            yield _metric(
                name, help_text, [(dict(labels), total) for labels, total in sorted(self._totals[name].items())]
            )


def _metric(name: str, help_text: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = kind(PREFIX + name, help_text)
    for labels, value in samples:
        metric.add_sample(PREFIX + name, labels, value)
    return metric


def _counts(raw: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    """Return a bucket's counts, by the name of the metric and the rank; the rank is -1 if the metric has no ranks."""
    for name in ("on_time", "late"):
        for rank, count in enumerate(raw[name]):
            yield (f"{name}_total", rank), count
    yield ("rounds_total", -1), raw["rounds"]
    yield ("contributions_total", -1), sum(raw["staleness"].values())
    yield ("staleness_rounds_total", -1), sum(missed * count for missed, count in raw["staleness"].items())
