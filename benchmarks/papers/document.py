"""docs/papers.md: paper by paper what is here, what differs, and its claims beside our figures."""

from __future__ import annotations

from collections.abc import Sequence

from experiment import Experiment, Paper

HEAD = """\
# The papers

Made by `.venv/bin/python benchmarks/papers --write-docs` from the figures in `benchmarks/papers/results`; change it there.
Measured figures are of up to 8 ranks on 2 cores. Simulated ones are of the paper's scale: by [the simulator](simulator.md), or
for rivals and WP-SGD by models of that folder. Computed ones are of a single process. `~` stands before what was read off a plot
of the paper.
"""


def write(papers: Sequence[Paper]) -> str:
    """The page."""
    return "\n".join([HEAD, *(_paper(paper) for paper in papers)])


def _paper(paper: Paper) -> str:
    parts = [f"## {paper.name}\n", f"{paper.citation}\n"]
    parts += [_table(("what", "where"), [list(pair) for pair in paper.implemented])]
    parts += ["What differs:\n", *(f"* {sentence}" for sentence in paper.differs), ""]
    parts += [_experiment(experiment) for experiment in paper.experiments]
    if paper.refusals:
        parts.append("### Not here\n")
        rows = [[refusal.name, refusal.reason, refusal.instead] for refusal in paper.refusals]
        parts.append(_table(("what", "why", "instead"), rows))
    return "\n".join(parts)


def _experiment(experiment: Experiment) -> str:
    head = f"### {experiment.title}\n\n`benchmarks/papers {experiment.paper} {experiment.name}`: {experiment.setting}\n"
    kept = experiment.load()
    if kept is None:
        return f"{head}\nNot run yet.\n"
    rows, verdict = kept
    table = _table(
        ("quantity", "paper", "ours", "how"), [[row.quantity, row.paper, f"{row.ours:.4g}", row.how] for row in rows]
    )
    return f"{head}\n{table}" + (f"\n{verdict}\n" if verdict else "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
