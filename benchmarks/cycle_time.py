"""What Horovod's `HOROVOD_CYCLE_TIME` gives each policy in two programs of benchmarks/work.py, which has 5 ms for all of them.

    .venv/bin/python benchmarks/cycle_time.py [--cycles 1 2.5 5 10] [--seeds 3] [--steps 200] [--json FILE]

A short cycle lets a round close sooner, and takes more of the cores from the ranks that compute. Each seed trains under every policy
with every cycle time, in turn. A figure is the time with this cycle over the time of the same policy and seed with 5 ms: the median
over the seeds. `best` is the cycle time of an arm whose figure is least.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
from harness import quota
from harness.work import CYCLE_MS, run_programs
from work import ARMS, PROGRAMS, shares

COMPARED = {"lstm": (("full", "solo"), 8.0), "transformer": (("full", "quorum 0.75"), 0.02)}  # arms and rate


def measure(name: str, options: Namespace) -> dict[str, Any]:
    """The seconds of each arm of a program with each cycle time, seed by seed, and what came of them."""
    program = PROGRAMS[name]
    arms, rate = COMPARED[name]
    cores = shares(program, options.ranks)
    seconds: dict[str, dict[str, list[float]]] = {arm: {f"{cycle:g}": [] for cycle in options.cycles} for arm in arms}
    for seed, cycle in itertools.product(range(options.seeds), options.cycles):
        jobs = [
            {
                "program": program.file,
                "policy": ARMS[arm][0],
                "rate": rate,
                "seed": seed,
                "options": [*program.options, *ARMS[arm][1], "--steps", str(options.steps)],
            }
            for arm in arms
        ]
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "runs.jsonl"
            run_programs(jobs, results, ranks=options.ranks, transport=options.transport, cores=cores, cycle_ms=cycle)
            runs = [json.loads(line)["run"] for line in results.read_text().splitlines()]
        for arm, run in zip(arms, runs, strict=True):
            seconds[arm][f"{cycle:g}"].append(run["seconds"])
    return {"seconds": seconds, "arms": {arm: summary(by_cycle) for arm, by_cycle in seconds.items()}}


def summary(by_cycle: dict[str, list[float]]) -> dict[str, Any]:
    """Of an arm: the time with each cycle over that with the usual one, and the best cycle in milliseconds."""
    usual = by_cycle[f"{CYCLE_MS:g}"]
    ratios = {
        cycle: statistics.median(mine / other for mine, other in zip(seconds, usual, strict=True))
        for cycle, seconds in by_cycle.items()
    }
    best = min(ratios, key=ratios.__getitem__)
    return {"over_usual": ratios, "best_ms": float(best), "gain": 1 - ratios[best]}


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.set_defaults(transport="gloo")  # for the reason in harness/work.py
    parser.add_argument("--cycles", nargs="+", type=float, default=[1, 2.5, CYCLE_MS, 10], help="milliseconds")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm with each cycle")
    parser.add_argument("--steps", type=int, default=200, help="of the programs")
    options = parser.parse_args()
    if CYCLE_MS not in options.cycles:
        parser.error(f"--cycles must have {CYCLE_MS}, with which the others are compared")
    if reason := quota.unavailable():
        print(f"Skipped: {reason}")
        return
    programs = {name: measure(name, options) for name in COMPARED}
    figures = {
        "ranks": options.ranks,
        "seeds": options.seeds,
        "steps": options.steps,
        "usual_ms": CYCLE_MS,
        "programs": programs,
    }
    harness.print_table(
        f"the time with a cycle of so many milliseconds over that with {CYCLE_MS}: {options.seeds} seeds",
        ["program, arm", *(f"{cycle:g}" for cycle in options.cycles)],
        [
            [f"{name}, {arm}", *(f"{ratio:.3f}" for ratio in row["over_usual"].values())]
            for name, figures in programs.items()
            for arm, row in figures["arms"].items()
        ],
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
