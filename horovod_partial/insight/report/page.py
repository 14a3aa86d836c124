"""Writes a report on a recording, or on two, as an HTML page that works offline. Needs plotly; the package does not."""

from __future__ import annotations

import base64
import gzip
from html import escape
from os import PathLike
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from horovod_partial.insight.report import comparison, figures, text
from horovod_partial.insight.report.comparison import Runs

_TEMPLATE = Path(__file__).with_name("page.html")


def write(runs: Runs, path: str | PathLike[str]) -> None:
    """Write a report to an HTML page."""
    plots, rows = figures.plots(runs), text.rows(runs)
    page = Template(_TEMPLATE.read_text()).substitute(
        runs=_paragraphs(comparison.of_each(runs, lambda run: [run.title])),
        headline=escape(comparison.headline(runs)),
        sentences=_paragraphs(comparison.sentences(runs)),
        columns="".join(_cell("th", column, column) for column in rows[0]),
        rows="\n".join(map(_row, rows)),
        plots="\n".join(
            f'<section>\n<h2>{escape(plot.title)}</h2>\n<p>{escape(plot.reading)}</p>\n<div class="plot"></div>\n</section>'
            for plot in plots
        ),
        remarks=_remarks(comparison.of_each(runs, lambda run: run.remarks)),
        # Write "<" as an escape of JSON, because the text "</script>" would end the page's script.
        figures=f"[{','.join(plot.figure.to_json() for plot in plots)}]".replace("<", "\\u003c"),
        # plotly's JavaScript is 4.5 MB; compressed and as text, it is less than half of that.
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )
    Path(path).write_text(page)


def _cell(tag: str, column: str, value: str) -> str:
    kind = ' class="text"' if column.startswith(text.WORDS) else ""
    return f"<{tag}{kind}>{escape(value)}</{tag}>"


def _paragraphs(texts: list[str]) -> str:
    return "\n".join(f"<p>{escape(one)}</p>" for one in texts)


def _row(row: dict[str, str]) -> str:
    is_slow = any(value != "-" for column, value in row.items() if column.startswith("slowness"))
    kind = ' class="slow"' if is_slow else ""
    return f"<tr{kind}>{''.join(_cell('td', *cell) for cell in row.items())}</tr>"


def _remarks(remarks: list[str]) -> str:
    if not remarks:
        return ""
    listed = "\n".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f"<section>\n<h2>What this stands on</h2>\n<ul>\n{listed}\n</ul>\n</section>"
