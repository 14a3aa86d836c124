"""One clock for all ranks: that of rank 0.

The hosts' clocks are compared by reductions of all ranks. These end at nearly the same moment everywhere, so for each of
them the difference of a host's end and rank 0's host's is the difference of their clocks, but for ends that are seen late.
A line through these differences says by how much a clock is off, and how fast it drifts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from horovod_partial.recording.reading import RankRecording, Recording

Floats = NDArray[np.float64]

LEAST_REDUCTIONS = 8
# A clock that drifted by more would have been set by its system: NTP slews by 500 ppm at most.
MOST_DRIFT = 500e-6
_WINDOWS = 64
_MICRO = 1e-6


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock, seen from that of rank 0's host.

    Attributes:
        host: its name, or one of its names.
        source: `"reductions"` that all ranks ended together, or the `"wall"` clocks where there are too few of them;
            `"reference"` for the host of rank 0.
        offset: seconds by which it is ahead at `origin`.
        drift: seconds by which it gets further ahead in a second.
        origin: seconds of the reference's monotonic clock.
        reductions: that were compared.
        median_residual: of the distances between ends and the line, in seconds; NaN without reductions.
        residual_95: the 95th percentile of them.
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
        """What the reference's clock showed when this one showed `seconds`."""
        return self.origin + (seconds - self.origin - self.offset) / (1 + self.drift)

    def __str__(self) -> str:
        """How good the fit is, in a sentence."""
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

    Attributes:
        rank: whose clock all times are on: rank 0, or the lowest one that was recorded.
        zero: its time 0, in seconds of its host's monotonic clock.
        hosts: by the text of their clock.
    """

    rank: int
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
        return cls(first.rank, first.steady * _MICRO, hosts)

    def seconds(self, rank: RankRecording, times: NDArray[np.int64]) -> Floats:
        """Times of a rank, in seconds since time 0 of the reference rank, on its clock."""
        own: Floats = times.astype(np.float64) * _MICRO + rank.steady * _MICRO
        return self.hosts[rank.clock].reference(own) - self.zero


def _start(rank: RankRecording) -> float:
    """What the monotonic clock of a host showed at Unix time 0 of its wall clock."""
    return rank.steady * _MICRO - rank.wall


def _ends(ranks: Iterable[RankRecording]) -> tuple[NDArray[np.int64], Floats]:
    """Sequence numbers of reductions of all ranks, and when each ended on a host: an end may be seen late, not early."""
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
    """Offset and slope of a line through points some of which lie far off.

    The median of windows takes single points out, and the median of the slopes between all windows (Theil and Sen) takes
    out windows.
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
