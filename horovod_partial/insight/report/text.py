"""Prints the summary of a recording to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from horovod_partial.insight.report.summary import RankSummary, Summary

WORDS = {"host", "slowness"}  # the columns that hold words; the others hold numbers


def cells(summary: Summary, rank: RankSummary) -> dict[str, str]:
    """Return a rank's row in the table of ranks: the texts of the cells, by the names of the columns."""
    slow, steps = rank.slowness, rank.steps
    row = {
        "rank": str(rank.rank),
        "host": rank.host,
        "slowness": str(slow) if slow.times else "-",
        "score": f"{slow.score:.2f}",
        "compute ms": f"{1e3 * steps.compute.mean():.1f}",
        "wait ms": f"{1e3 * steps.wait.mean():.1f}",
        "reduce ms": f"{1e3 * steps.reduce.mean():.1f}",
    }
    if not summary.shares_work:
        return {**row, "late": f"{steps.late.mean():.0%}", "staleness": f"{steps.staleness.mean():.2f}"}
    share = rank.micro_batches / sum(each.micro_batches for each in summary.ranks)
    each_takes = f"{1e3 * slow.compute / summary.steps.passes:.1f}"
    return {**row, "micro-batches": f"{rank.micro_batches} ({share:.0%})", "ms each": each_takes}


def show(summary: Summary) -> None:
    """Print the summary of a recording: which rank is slow, what waiting has cost, and a table of the ranks."""
    recording = summary.recording
    table = Table(
        title=f"run {recording.run}: {recording.size} ranks, {len(summary.waited)} steps, policy {summary.steps.policy}",
        title_justify="left",
    )
    rows = [cells(summary, rank) for rank in summary.slowest_first]
    for column in rows[0]:
        table.add_column(column, justify="left" if column in WORDS else "right")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.width = max(console.width, 120)  # in a narrower console the table would cut words off
    for text in (summary.answer, summary.waiting):
        console.print(text, highlight=False, soft_wrap=True)
    console.print(table)
    for remark in summary.remarks:
        console.print(remark, highlight=False, soft_wrap=True)
