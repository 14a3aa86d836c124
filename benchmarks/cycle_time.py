"""What Horovod's `HOROVOD_CYCLE_TIME` gives each policy in two programs of benchmarks/work.py, which has 5 ms for all of them.

    .venv/bin/python benchmarks/cycle_time.py [--cycles 1 2.5 5 10] [--seeds 3] [--steps 200] [--json FILE]

A short cycle lets a round close sooner, and takes more of the cores from the ranks that compute. Each seed trains under every policy
with every cycle time, in turn. A figure is the time with this cycle over the time of the same policy and seed with 5 ms: the median
over the seeds.
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
from work import PROGRAMS, job_of, shares

COMPARED = {"lstm": (("full", "solo"), 8.0), "transformer": (("full", "quorum 0.75"), 0.02)}  # arms and rate


def measure(name: str, options: Namespace) -> dict[str, Any]:
    """The seconds of each arm of a program with each cycle time, seed by seed, and what came of them."""
    program = PROGRAMS[name]
    arms, rate = COMPARED[name]
    cores = shares(program, options.ranks)
    seconds: dict[str, dict[str, list[float]]] = {arm: {f"{cycle:g}": [] for cycle in options.cycles} for arm in arms}
    for seed, cycle in itertools.product(range(options.seeds), options.cycles):
        jobs = [job_of(program, arm, rate, seed, options.steps) for arm in arms]
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "runs.jsonl"
            run_programs(jobs, results, ranks=options.ranks, transport=options.transport, cores=cores, cycle_ms=cycle)
            runs = [json.loads(line)["run"] for line in results.read_text().splitlines()]
        for arm, run in zip(arms, runs, strict=True):
            seconds[arm][f"{cycle:g}"].append(run["seconds"])
    return {"seconds": seconds, "over_usual": {arm: over_usual(by_cycle) for arm, by_cycle in seconds.items()}}


def over_usual(by_cycle: dict[str, list[float]]) -> dict[str, float]:
    """Of an arm: the time with each cycle over that with the usual one."""
    usual = by_cycle[f"{CYCLE_MS:g}"]
    return {
        cycle: statistics.median(mine / other for mine, other in zip(seconds, usual, strict=True))
        for cycle, seconds in by_cycle.items()
    }


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
    harness.print_table(
        f"the time with a cycle of so many milliseconds over that with {CYCLE_MS}: {options.seeds} seeds",
        ["program, arm", *(f"{cycle:g}" for cycle in options.cycles)],
        [
            [f"{name}, {arm}", *(f"{ratio:.3f}" for ratio in by_cycle.values())]
            for name, figures in programs.items()
            for arm, by_cycle in figures["over_usual"].items()
        ],
    )
    job = {"ranks": options.ranks, "seeds": options.seeds, "steps": options.steps, "usual_ms": CYCLE_MS}
    harness.write_json(options.json, {**job, "programs": programs})


if __name__ == "__main__":
    main()
