"""docs/papers.md, and a page for each paper: what is here, what differs, and its claims beside our figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from experiment import Experiment, Paper, Row

HEAD = """\
# The papers

Each page says what of a paper is implemented, what differs, and what could not be had. The paper's figures stand beside ours.

"""
FOOT = """
Measured figures are of up to 8 ranks on 2 cores. Simulated ones are of the paper's scale: by [the simulator](simulator.md), or
for rivals and WP-SGD by models of `benchmarks/papers`. Computed ones are of a single process. `~` stands before what was read off
a plot of the paper. Where a table says `ours [paper]`, the paper's figure is in brackets, if it has one.

`.venv/bin/python benchmarks/papers --write-docs` makes these pages from the figures in `benchmarks/papers/results`; change them there.
"""
ABOVE = "[The papers](../papers.md) says what measured, simulated, computed, `~` and the brackets mean.\n"
PAGES = "papers"  # folder of the pages, beside the page that links to them

# A table with more lines than columns is laid on its side, if the names of its new columns have no more characters than this.
MOST_CHARACTERS = 360
# Figures that belong to no table of their experiment, up to this many, are sentences.
MOST_IN_A_SENTENCE = 2


def write(papers: Sequence[Paper], folder: Path) -> None:
    """Write papers.md into the folder, and the page of each paper into a folder below it."""
    (folder / PAGES).mkdir(parents=True, exist_ok=True)
    for paper in papers:
        (folder / PAGES / f"{_page(paper)}.md").write_text(_paper(paper))
    rows = [[f"[{paper.name}]({PAGES}/{_page(paper)}.md)", paper.idea] for paper in papers]
    lines = [f"{PAGES}/{_page(paper)}" for paper in papers]
    tree = "\n".join(["\n```{toctree}", ":hidden:", "", *lines, "```\n"])
    (folder / "papers.md").write_text(HEAD + _table(("paper", "what it is about"), rows) + FOOT + tree)


def _page(paper: Paper) -> str:
    return paper.key.replace("_", "-")


def _paper(paper: Paper) -> str:
    parts = [f"# {paper.name}\n", f"{paper.citation}\n", ABOVE]
    parts += [_table(("what", "where"), [list(pair) for pair in paper.implemented])]
    parts += ["What differs:\n", *(f"* {sentence}" for sentence in paper.differs), ""]
    parts += [_experiment(experiment) for experiment in paper.experiments]
    refused = [[refusal.name, refusal.reason, refusal.instead] for refusal in paper.refusals]
    return "\n".join([*parts, "## What is not here\n", _table(("what", "why", "instead"), refused)])


def _experiment(experiment: Experiment) -> str:
    head = f"## {experiment.title}\n\n`benchmarks/papers {experiment.paper} {experiment.name}`: {experiment.setting}."
    kept = experiment.load()
    if kept is None:
        return f"{head} Not run yet.\n"
    rows, verdict, busy = kept
    parts = [f"{head} {verdict}".rstrip() + "\n"]
    if busy and any(row.how == "measured" for row in rows):
        parts.append("**Not quiet:** other programs ran beside this experiment when it began.\n")
    for columns in experiment.grids:
        placed = {row.quantity: place for row in rows if (place := _place(row.quantity, columns))}
        parts.append(_grid(columns, [(*placed[row.quantity], row) for row in rows if row.quantity in placed]))
        rows = [row for row in rows if row.quantity not in placed]
    if len(rows) > MOST_IN_A_SENTENCE:
        cells = [[row.quantity, row.paper, f"{row.ours:.4g}", row.how] for row in rows]
        parts.append(_table(("quantity", "paper", "ours", "how"), cells))
    elif rows:
        parts.append(" ".join(f"{row.how.capitalize()}, {row.quantity}: {_figure(row)}." for row in rows) + "\n")
    return "\n".join(parts)


def _place(quantity: str, columns: Sequence[str]) -> tuple[str, str] | None:
    """The line and the column of a quantity: the column is the longest of them that it names, the line is what is left."""
    for column in sorted(columns, key=len, reverse=True):
        found = re.search(rf"(?<!\w){re.escape(column)}(?!\w)", quantity)
        if found:
            before, after = quantity[: found.start()].rstrip(" ,:"), quantity[found.end() :]
            return (before + after if before else after.lstrip(" ,:"), column)
    return None


def _grid(columns: Sequence[str], places: Sequence[tuple[str, str, Row]]) -> str:
    """A table with one line for each name; or with one for each column, if that takes fewer lines and does not get too wide."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for name, column, row in places:
        lines.setdefault((name, row.how), {})[column] = _figure(row)
    names = [name for name, _ in lines]
    origins = {how for _, how in lines}
    if len(columns) < len(lines) and len("".join(names)) <= MOST_CHARACTERS and len(origins) == 1:
        cells = [[column, *(line.get(column, "") for line in lines.values()), *origins] for column in columns]
        return _table(("ours [paper]", *names, "how"), cells)
    cells = [[name, *(line.get(column, "") for column in columns), how] for (name, how), line in lines.items()]
    return _table(("ours [paper]", *columns, "how"), cells)


def _figure(row: Row) -> str:
    return f"{row.ours:.4g}" + (f" [{row.paper}]" if row.paper else "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
