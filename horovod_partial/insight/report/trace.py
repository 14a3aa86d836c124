"""Writes the steps of a job as a trace for Perfetto or chrome://tracing (Google's Trace Event Format).

The track of each rank shows its steps, and what their time went to. Another track shows the rounds that rank 0
closed. From each late gradient an arrow leads to the round that delivered it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from horovod_partial.insight.recording import RankRecording, RankSteps
from horovod_partial.insight.recording.steps import Intervals, intervals, results_of_arrivals
from horovod_partial.insight.report.summary import Summary

Event = dict[str, Any]
_PROCESS = 0


def write(summary: Summary, path: str | PathLike[str]) -> None:
    """Write a recording's trace as JSON. Times are microseconds since time 0 of rank 0, on its clock."""
    events = list(_events(summary))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))


def _events(summary: Summary) -> Iterator[Event]:
    recording = summary.recording
    yield _named("process_name", 0, f"run {recording.run}, policy {summary.steps.policy}")
    for steps in summary.steps.ranks:
        rank = recording.ranks[steps.rank]
        yield _named("thread_name", steps.rank, f"rank {steps.rank} ({rank.host})")
        yield from _of_rank(steps, *(intervals(rank, name, summary.clocks) for name in ("reductions", "waits")))
    yield from _of_rounds(summary)


def _of_rank(steps: RankSteps, reductions: Intervals, halts: Intervals) -> Iterator[Event]:
    for row, step in enumerate(steps.step.tolist()):
        begin, handed, result = (float(times[row]) for times in (steps.begin, steps.handed, steps.result))
        late = bool(steps.late[row])
        told = {"round": int(steps.round[row]), "staleness": int(steps.staleness[row])}
        yield _slice(steps.rank, f"step {step}, late" if late else f"step {step}", begin, result, late, **told)
        for start, end, is_halted in [*_parts(begin, handed, halts), (handed, result, True)]:
            if not is_halted:
                yield _slice(steps.rank, "compute", start, end, late)
                continue
            for since, until, reduces in _parts(start, end, reductions):
                yield _slice(steps.rank, "reduce" if reduces else "wait", since, until, late)


def _parts(begin: float, end: float, intervals: Intervals) -> Iterator[tuple[float, float, bool]]:
    """Cut the time from `begin` to `end` at the edges of intervals.

    Yields the begin and the end of each part, and whether the part lies within an interval. Times are seconds.
    """
    begins, ends = intervals
    since = begin
    for row in range(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(begins, end))):
        start, stop = max(float(begins[row]), begin), min(float(ends[row]), end)
        if start > since:
            yield since, start, False
        if stop > start:
            yield start, stop, True
        since = stop
    if end > since:
        yield since, end, False


def _of_rounds(summary: Summary) -> Iterator[Event]:
    """Yield the trace's events of all rounds, and of the arrows from late gradients to the rounds that delivered them."""
    recording, clocks = summary.recording, summary.clocks
    rounds = summary.rounds
    if not len(rounds["time"]):
        return
    decider = recording.ranks[0]
    track = recording.size  # in a trace, the track of rounds is shown below those of the ranks, and has the next number
    yield _named("thread_name", track, "rounds, as rank 0 decided them")
    times = clocks.seconds(decider, rounds["time"])
    # In a trace, a round is shown until the next round closes or a reduction ends, whichever is first.
    edges = np.union1d(times, intervals(decider, "reductions", clocks)[1])
    pending = {rank.rank: _late_arrivals(rank, summary) for rank in recording.ranks.values()}
    arrows = 0
    for row, time in enumerate(times.tolist()):
        bucket = decider.buckets[int(rounds["bucket"][row])]
        later = np.searchsorted(edges, time, side="right")
        until = float(edges[later]) if later < len(edges) else time
        missing, delivered = rounds["missing"][row], rounds["delivered"][row]
        told = {"closed by": rounds["reason"][row], "quorum": int(rounds["quorum"][row]), "missing": str(missing)}
        yield _slice(track, f"round {rounds['round'][row]} of {bucket.name}", time, until, False, **told)
        for rank, arrivals in pending.items():
            # A rank's late gradients travel with a round if the rank is on time for it or is listed under `delivered`.
            if rank in missing and rank not in delivered:
                continue
            waiting = arrivals.get(bucket.name, [])
            while waiting and waiting[0] <= time:
                arrow = {"name": "late gradient", "cat": "late", "id": arrows, "pid": _PROCESS}
                yield arrow | {"ph": "s", "tid": rank, "ts": _micro(waiting.pop(0))}
                yield arrow | {"ph": "f", "bp": "e", "tid": track, "ts": _micro(time)}
                arrows += 1


def _late_arrivals(rank: RankRecording, summary: Summary) -> dict[str, list[float]]:
    """Return for each bucket's name the times at which a rank handed over late contributions, in order, in seconds."""
    arrivals, of = rank.tables["arrivals"], results_of_arrivals(rank)
    late = np.flatnonzero((of >= 0) & (np.r_[rank.tables["results"]["late"], 0][of] == 1))
    found: dict[str, list[float]] = {}
    for number, time in zip(
        arrivals["bucket"][late].tolist(), summary.clocks.seconds(rank, arrivals["time"][late]).tolist(), strict=True
    ):
        found.setdefault(rank.buckets[number].name, []).append(time)
    return found


def _named(what: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _slice(track: int, name: str, begin: float, end: float, late: bool, **told: Any) -> Event:
    start = _micro(begin)
    event = {"ph": "X", "name": name, "cat": "late" if late else "on time", "pid": _PROCESS, "tid": track}
    return event | {"ts": start, "dur": _micro(end) - start, "args": told}


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
