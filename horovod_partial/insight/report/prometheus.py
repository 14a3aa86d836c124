"""Writes the summary of a recording as metrics in Prometheus's text format, for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike, fspath

from prometheus_client import write_to_textfile

from horovod_partial.insight.report.summary import Summary
from horovod_partial.metrics.families import Family, registry


def write(summary: Summary, path: str | PathLike[str]) -> None:
    """Write a summary's metrics to a file. The file appears whole, so a collector never reads half of it."""
    write_to_textfile(fspath(path), registry(_families(summary), "horovod_partial_recording_"))


def _families(summary: Summary) -> Iterator[Family]:
    recording = summary.recording
    ranks = [({"rank": str(rank.rank), "host": rank.host}, rank) for rank in summary.ranks]
    about = {"run": recording.run, "policy": summary.steps.policy}
    yield "info", "What was recorded.", [(about, 1)]
    yield "ranks", "Ranks of the job.", [({}, recording.size)]
    yield "steps", "Steps that all ranks have recorded.", [({}, len(summary.waited))]
    parts = [
        ({**labels, "part": part}, seconds)
        for labels, rank in ranks
        for part, seconds in (("compute", rank.compute), ("wait", rank.wait), ("reduce", rank.reduce))
    ]
    yield "step_seconds", "Mean time of a step, by what it went to.", parts
    yield (
        "score_ratio",
        "Compute time of the fastest rank over this one's.",
        [(of, rank.slowness.score) for of, rank in ranks],
    )
    kinds = [({**labels, "kind": rank.slowness.kind}, rank.slowness.factor) for labels, rank in ranks]
    yield (
        "slowness_ratio",
        "How many times as long as the median rank a rank takes in its slow steps, and in what way it is slow.",
        kinds,
    )
    yield "late_ratio", "Share of steps with a contribution that was late.", [(of, rank.late) for of, rank in ranks]
    stale = [(labels, rank.staleness) for labels, rank in ranks]
    yield "staleness_rounds", "Mean number of rounds that a rank had missed before a step.", stale
    if summary.shares_work:
        made = [(of, float(rank.micro_batches)) for of, rank in ranks]
        yield "micro_batches_total", "Micro-batches that a rank made, as far as its recording goes.", made
    waits = [({"policy": "recorded"}, float(summary.waited.sum()))]
    if summary.steps.rounds:
        waits.append(({"policy": "full"}, float(summary.waited_under_full.sum())))
    yield "waiting_seconds", "Time that a rank waited, mean over the ranks: as recorded, and under Full().", waits
    residuals = [
        ({"host": clock.host, "clock": name, "quantile": quantile}, value)
        for name, clock in summary.clocks.hosts.items()
        if clock.source == "reductions"
        for quantile, value in (("0.5", clock.median_residual), ("0.95", clock.residual_95))
    ]
    yield "clock_residual_seconds", "How far ends of reductions lie from the fit of a host's clock.", residuals
