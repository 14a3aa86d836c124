"""Writes a report on a recording as an HTML page that works offline. Needs plotly; the package itself does not."""

from __future__ import annotations

import base64
import gzip
from html import escape
from os import PathLike
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from horovod_partial.insight.report import figures, text
from horovod_partial.insight.report.summary import RankSummary, Summary

_TEMPLATE = Path(__file__).with_name("page.html")


def write(summary: Summary, path: str | PathLike[str]) -> None:
    """Write the summary of a recording to an HTML page."""
    plots = figures.plots(summary)
    page = Template(_TEMPLATE.read_text()).substitute(
        run=escape(summary.recording.run),
        size=summary.recording.size,
        steps=len(summary.waited),
        policy=escape(summary.steps.policy),
        headline=escape(summary.headline),
        answer=escape(summary.answer),
        waiting=escape(summary.waiting),
        columns="".join(_cell("th", name, name) for name in text.cells(summary, summary.ranks[0])),
        rows="\n".join(_row(summary, rank) for rank in summary.slowest_first),
        plots="\n".join(
            f'<section>\n<h2>{escape(plot.title)}</h2>\n<p>{escape(plot.reading)}</p>\n<div class="plot"></div>\n</section>'
            for plot in plots
        ),
        remarks=_remarks(summary.remarks),
        # Write "<" as an escape of JSON, because the text "</script>" would end the page's script.
        figures=f"[{','.join(plot.figure.to_json() for plot in plots)}]".replace("<", "\\u003c"),
        # plotly's JavaScript is 4.5 MB; compressed and as text, it is less than half of that.
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )
    Path(path).write_text(page)


def _cell(tag: str, column: str, value: str) -> str:
    kind = ' class="text"' if column in text.WORDS else ""
    return f"<{tag}{kind}>{escape(value)}</{tag}>"


def _row(summary: Summary, rank: RankSummary) -> str:
    kind = ' class="slow"' if rank.slowness.times else ""
    return f"<tr{kind}>{''.join(_cell('td', *cell) for cell in text.cells(summary, rank).items())}</tr>"


def _remarks(remarks: list[str]) -> str:
    if not remarks:
        return ""
    listed = "\n".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f"<section>\n<h2>What this stands on</h2>\n<ul>\n{listed}\n</ul>\n</section>"
