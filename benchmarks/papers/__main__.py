"""The experiments of the five papers, one command each: the paper's numbers beside ours, and a plot.

    .venv/bin/python benchmarks/papers --list
    .venv/bin/python benchmarks/papers eager_sgd fig9 [--smoke] [--transport gloo] [--output FOLDER] [--keep]

An experiment takes 10 minutes at most on two cores. Up to 8 ranks are real; what the paper ran with more is simulated at
its scale. `--keep` stores the figures in benchmarks/papers/results, and `--write-docs` makes docs/papers.md and
docs/papers from all that are stored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import document
import drawing
import eager_sgd
import harness
import mg_wfbp
import p_reduce
import wagma_sgd
import wp_sgd
from experiment import Experiment, Job, Outcome

PAPERS = {module.PAPER.key: module.PAPER for module in (eager_sgd, wagma_sgd, p_reduce, wp_sgd, mg_wfbp)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("experiment", nargs="?", help="a name that --list shows")
    parser.add_argument("--list", action="store_true", help="what there is, and what cannot be had here")
    parser.add_argument("--smoke", action="store_true", help="seconds in place of minutes; the figures mean nothing")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=harness.default_transport())
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "papers", help="folder for the plot")
    parser.add_argument("--keep", action="store_true", help="store the figures for the pages in docs/papers")
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=ROOT / "docs",
        metavar="FOLDER",
        help="make papers.md and papers/ in docs from the stored figures",
    )
    options = parser.parse_args()
    if options.list:
        show_all()
    if options.paper:
        known = {experiment.name: experiment for experiment in PAPERS[options.paper].experiments}
        if options.experiment not in known:
            parser.error(f"the experiments of {options.paper} are {', '.join(known)}")
        run(known[options.experiment], options)
    if options.write_docs:
        document.write(list(PAPERS.values()), options.write_docs)


def show_all() -> None:
    for paper in PAPERS.values():
        rows = [[one.name, one.title, one.setting] for one in paper.experiments]
        rows += [[one.name, f"not here: {one.reason}", one.instead] for one in paper.refusals]
        harness.print_table(f"{paper.name} ({paper.key})", ["name", "what it shows", "here"], rows)


def run(experiment: Experiment, options: argparse.Namespace) -> None:
    harness.origin()  # before anything is measured
    outcome = experiment.run(Job(options.smoke, options.transport))
    show(experiment, outcome)
    file = options.output / f"{experiment.paper}_{experiment.name}.png"
    drawing.draw(outcome.plot, file, experiment.title)
    print(f"The plot is in {file}")
    if options.keep and not options.smoke:
        experiment.save(outcome)


def show(experiment: Experiment, outcome: Outcome) -> None:
    harness.print_table(
        f"{experiment.title}\n{experiment.setting}",
        ["quantity", "paper", "ours", ""],
        [[row.quantity, row.paper, f"{row.ours:.4g}", row.how] for row in outcome.rows],
    )
    if outcome.verdict:
        print(outcome.verdict)


if __name__ == "__main__":
    main()
