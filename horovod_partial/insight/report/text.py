"""Prints a report on one recording, or on two, to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from horovod_partial.insight.report import comparison
from horovod_partial.insight.report.comparison import Runs, name
from horovod_partial.insight.report.summary import RankSummary, Summary

WORDS = ("host", "slowness")  # columns whose names begin so hold words; the others hold numbers
_COMPARED = ("slowness", "compute ms", "wait ms")  # the columns of two runs


def rows(runs: Runs) -> list[dict[str, str]]:
    """Return the table of ranks, slowest first: the texts of each rank's cells, by the names of the columns."""
    brief = len(runs) > 1
    cells = {label: {rank.rank: _cells(run, rank, brief) for rank in run.slowest_first} for label, run in runs.items()}
    if not brief:
        return list(cells[""].values())
    compared = [(name(column, label), column, cells[label]) for column in _COMPARED for label in runs]
    return [
        {"rank": str(rank), **{text: of.get(rank, {}).get(column, "-") for text, column, of in compared}}
        for rank in {**cells["after"], **cells["before"]}
    ]


def _cells(summary: Summary, rank: RankSummary, brief: bool) -> dict[str, str]:
    slow, steps = rank.slowness, rank.steps
    row = {
        "rank": str(rank.rank),
        "host": summary.recording.ranks[rank.rank].host,
        "slowness": (f"{slow.factor:.2f} {slow.kind}" if brief else str(slow)) if slow.times else "-",
        "score": f"{slow.score:.2f}",
        "compute ms": f"{1e3 * steps.compute.mean():.1f}",
        "wait ms": f"{1e3 * steps.wait.mean():.1f}",
        "reduce ms": f"{1e3 * steps.reduce.mean():.1f}",
    }
    if not summary.shares_work:
        return {**row, "late": f"{steps.late.mean():.0%}", "staleness": f"{steps.staleness.mean():.2f}"}
    made = summary.steps.micro_batches
    share = made[rank.rank] / sum(made[each.rank] for each in summary.ranks)
    each_takes = f"{1e3 * slow.compute / summary.steps.passes:.1f}"
    return {**row, "micro-batches": f"{made[rank.rank]} ({share:.0%})", "ms each": each_takes}


def show(runs: Runs) -> None:
    """Print a report: what changed if there are two runs, which rank is slow, what waiting has cost, and the ranks."""
    table = Table(title="\n".join(comparison.of_each(runs, lambda run: [run.title])), title_justify="left")
    ranks = rows(runs)
    for column in ranks[0]:
        table.add_column(column, justify="left" if column.startswith(WORDS) else "right")
    for row in ranks:
        table.add_row(*row.values())
    console = Console()
    console.width = max(console.width, 120)  # in a narrower console the table would cut words off
    for text in comparison.sentences(runs):
        console.print(text, highlight=False, soft_wrap=True)
    console.print(table)
    for remark in comparison.of_each(runs, lambda run: run.remarks):
        console.print(remark, highlight=False, soft_wrap=True)
