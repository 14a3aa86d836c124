"""Writes a report on a recording as one HTML page, which needs no network. Needs plotly; the package itself does not."""

from __future__ import annotations

from html import escape
from os import PathLike
from pathlib import Path
from string import Template

from horovod_partial.insight.report import figures, text
from horovod_partial.insight.report.summary import Summary

_TEMPLATE = Path(__file__).with_name("page.html")
_TEXT_COLUMNS = {"host", "slowness"}


def write(summary: Summary, path: str | PathLike[str]) -> None:
    """Write the summary of a recording to an HTML page."""
    page = Template(_TEMPLATE.read_text()).substitute(
        run=escape(summary.recording.run),
        size=summary.recording.size,
        steps=len(summary.waited),
        policy=escape(summary.steps.policy),
        answer=escape(summary.answer),
        waiting=escape(summary.waiting),
        columns="".join(_cell("th", name, name) for name in text.columns(summary)),
        rows="\n".join(_row(summary)),
        plots="\n".join(_plots(summary)),
        remarks=_remarks(summary.remarks),
    )
    Path(path).write_text(page)


def _cell(tag: str, column: str, value: str) -> str:
    kind = ' class="text"' if column in _TEXT_COLUMNS else ""
    return f"<{tag}{kind}>{escape(value)}</{tag}>"


def _row(summary: Summary) -> list[str]:
    rows = []
    for rank in summary.slowest_first:
        cells = zip(text.columns(summary), text.cells(summary, rank), strict=True)
        kind = ' class="slow"' if rank.slowness.times else ""
        rows.append(f"<tr{kind}>{''.join(_cell('td', *cell) for cell in cells)}</tr>")
    return rows


def _plots(summary: Summary) -> list[str]:
    sections = []
    for number, plot in enumerate(figures.plots(summary)):
        # The HTML page contains plotly's JavaScript once, before the first plot.
        figure = plot.figure.to_html(
            full_html=False,
            include_plotlyjs=number == 0,
            div_id=f"plot-{number}",
            config={"displaylogo": False, "responsive": True},
        )
        sections.append(
            f"<section>\n<h2>{escape(plot.title)}</h2>\n<p>{escape(plot.reading)}</p>\n{figure}\n</section>"
        )
    return sections


def _remarks(remarks: list[str]) -> str:
    if not remarks:
        return ""
    listed = "\n".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f"<section>\n<h2>What this stands on</h2>\n<ul>\n{listed}\n</ul>\n</section>"
