"""Converts the recorded times of all ranks to one clock, that of the reference rank: the lowest recorded rank.

The clocks of hosts are compared by reductions of all ranks, because these end at nearly the same moment everywhere. The
difference between the recorded ends on two hosts is the difference of their clocks, unless a host noticed the end late.
A line through these differences gives the offset of a clock, and its drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.recording.reading import RankRecording, Recording

Floats = NDArray[np.float64]

LEAST_REDUCTIONS = 8  # with fewer reductions in common, two hosts' clocks are compared by their wall clocks
# The largest drift between two hosts' clocks that a comparison may find, because NTP slews clocks by 500 ppm at most.
MOST_DRIFT = 500e-6
_WINDOWS = 64
_MICRO = 1e-6


@dataclass(frozen=True)
class HostClock:
    """The monotonic clock of a host, compared with that of the reference rank's host. Times are in seconds.

    `host` is one of the host's names. `source` says how the clock was compared: by the `"reductions"` of all ranks, or
    by the `"wall"` clocks if there are too few reductions. The reference host has `"reference"`. At `origin`, a time
    on the reference clock, this clock is ahead by `offset`. In each second it gets further ahead by `drift` seconds.
    `reductions` is the number of compared reductions. `median_residual` and `residual_95` are the median and the 95th
    percentile of how far the reductions' ends lie from the fitted line; NaN if no line was fitted.
    """

    host: str
    source: Literal["reference", "reductions", "wall"]
    offset: float = 0.0
    drift: float = 0.0
    origin: float = 0.0
    reductions: int = 0
    median_residual: float = float("nan")
    residual_95: float = float("nan")

    def reference(self, seconds: Floats) -> Floats:
        """Return the time on the reference clock when this clock showed `seconds`."""
        return self.origin + (seconds - self.origin - self.offset) / (1 + self.drift)

    def __str__(self) -> str:
        """Return sentences for a report: how this clock was compared with the reference clock, and how exactly."""
        if self.source == "reference":
            return f"Host {self.host} has the clock that all times are on."
        if self.source == "wall":
            return (
                f"Host {self.host}: compared by the wall clocks, which may be off by any amount, since it has only "
                f"{self.reductions} reductions of all ranks in common with rank 0's host."
            )
        return (
            f"Host {self.host}: {self.reductions} reductions of all ranks; ends lie {1e3 * self.median_residual:.2f} ms from "
            f"the fit in the median, and 95% within {1e3 * self.residual_95:.2f} ms. Its clock drifts by "
            f"{1e6 * self.drift:.0f} ppm."
        )


@dataclass(frozen=True)
class Clocks:
    """The clocks of a job's hosts.

    Times are converted to seconds since time 0 of the lowest recorded rank, the reference rank. `zero` is this time 0
    on the monotonic clock of the rank's host, in seconds. `hosts` has the clocks by `Header.clock`.
    """

    zero: float
    hosts: dict[str, HostClock]

    @classmethod
    def fit(cls, recording: Recording) -> Clocks:
        """Compare the clocks of a recording's hosts."""
        first = recording.ranks[min(recording.ranks)]
        by_clock: dict[str, list[RankRecording]] = {}
        for rank in recording.ranks.values():
            by_clock.setdefault(rank.clock, []).append(rank)
        reference = _ends(by_clock[first.clock])
        hosts = {}
        for clock, ranks in by_clock.items():
            host = ranks[0].host
            if clock == first.clock:
                hosts[clock] = HostClock(host, "reference")
            else:
                walls = _start(ranks[0]) - _start(first)
                hosts[clock] = _compare(host, reference, _ends(ranks), walls)
        return cls(first.steady * _MICRO, hosts)

    def seconds(self, rank: RankRecording, times: NDArray[np.int64]) -> Floats:
        """Convert a rank's recorded times, in microseconds, to seconds since time 0 of the reference rank."""
        own: Floats = times.astype(np.float64) * _MICRO + rank.steady * _MICRO
        return self.hosts[rank.clock].reference(own) - self.zero


def _start(rank: RankRecording) -> float:
    """Return the time on a host's monotonic clock, in seconds, at Unix time 0 of its wall clock."""
    return rank.steady * _MICRO - rank.wall


def _ends(ranks: Iterable[RankRecording]) -> tuple[NDArray[np.int64], Floats]:
    """Return the sequence numbers of reductions over all ranks, and when each ended on a host, in seconds.

    `ranks` are the ranks of the host. A rank may notice an end late, but never early, so the earliest time counts.
    """
    sequences, ends = [], []
    for rank in ranks:
        table = rank.tables["reductions"]
        rows = (table["everyone"] == 1) & (table["process_set"] == 0) & (table["end"] >= 0)
        sequences.append(table["sequence"][rows])
        ends.append(_MICRO * table["end"][rows] + _MICRO * rank.steady)
    sequence, end = np.concatenate(sequences), np.concatenate(ends)
    order = np.lexsort((end, sequence))
    found, first = np.unique(sequence[order], return_index=True)
    return found, end[order][first]


def _compare(
    host: str, reference: tuple[NDArray[np.int64], Floats], other: tuple[NDArray[np.int64], Floats], walls: float
) -> HostClock:
    _, here, there = np.intersect1d(reference[0], other[0], assume_unique=True, return_indices=True)
    count = len(here)
    if count < LEAST_REDUCTIONS:
        return HostClock(host, "wall", offset=walls, reductions=count)
    times, ahead = reference[1][here], other[1][there] - reference[1][here]
    origin = float(times[0])
    offset, drift = _line(times - origin, ahead)
    residuals = np.abs(ahead - offset - drift * (times - origin))
    median, most = np.quantile(residuals, [0.5, 0.95]).tolist()
    return HostClock(host, "reductions", offset, drift, origin, count, median, most)


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the offset and the slope of a line through points, some of which may be outliers.

    Single outliers vanish in the medians of windows. Outlying windows vanish in the median of the slopes between all
    windows (Theil and Sen).
    """
    if len(x) >= 4 * _WINDOWS:
        x = np.array([np.median(window) for window in np.array_split(x, _WINDOWS)])
        y = np.array([np.median(window) for window in np.array_split(y, _WINDOWS)])
    left, right = np.triu_indices(len(x), 1)
    apart = x[right] - x[left]
    rows = apart > 0
    slope = float(np.median((y[right] - y[left])[rows] / apart[rows])) if rows.any() else 0.0
    slope = min(max(slope, -MOST_DRIFT), MOST_DRIFT)
    return float(np.median(y - slope * x)), slope
