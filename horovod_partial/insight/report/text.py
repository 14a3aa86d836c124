"""Prints the summary of a recording to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from horovod_partial.insight.report.summary import RankSummary, Summary


def columns(summary: Summary) -> tuple[str, ...]:
    """Return the names of the columns of the table of ranks."""
    named = ("rank", "host", "slowness", "score", "compute ms", "wait ms", "reduce ms")
    return (*named, "micro-batches", "ms each") if summary.shares_work else (*named, "late", "staleness")


def cells(summary: Summary, rank: RankSummary) -> tuple[str, ...]:
    """Return the texts of a rank's row in the table of ranks, in the order of `columns`."""
    slow = rank.slowness
    if summary.shares_work:
        share = rank.micro_batches / sum(each.micro_batches for each in summary.ranks)
        last = (f"{rank.micro_batches} ({share:.0%})", f"{1e3 * slow.compute / summary.steps.passes:.1f}")
    else:
        last = (f"{rank.late:.0%}", f"{rank.staleness:.2f}")
    return (
        *(str(rank.rank), rank.host, str(slow) if slow.times else "-", f"{slow.score:.2f}"),
        *(f"{1e3 * seconds:.1f}" for seconds in (rank.compute, rank.wait, rank.reduce)),
        *last,
    )


def show(summary: Summary) -> None:
    """Print the summary of a recording: which rank is slow, what waiting has cost, and a table of the ranks."""
    recording = summary.recording
    table = Table(
        title=f"run {recording.run}: {recording.size} ranks, {len(summary.waited)} steps, policy {summary.steps.policy}",
        title_justify="left",
    )
    for column in columns(summary):
        table.add_column(column, justify="left" if column in ("host", "slowness") else "right")
    for rank in summary.slowest_first:
        table.add_row(*cells(summary, rank))
    console = Console()
    console.width = max(console.width, 120)  # in a narrower console the table would cut words off
    for text in (summary.answer, summary.waiting):
        console.print(text, highlight=False, soft_wrap=True)
    console.print(table)
    for remark in summary.remarks:
        console.print(remark, highlight=False, soft_wrap=True)
