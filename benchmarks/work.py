"""Real work in place of sleeps: programs whose steps differ by what is in their data, under each policy.

    .venv/bin/python benchmarks/work.py [--programs lstm ppo] [--arms solo majority] [--seeds 5] [--json FILE]

The programs are in examples/torch/work; each says in its first lines where its steps differ. The threads in which ranks compute
get equal shares of most of the cores, by quotas (harness/quota.py, needs root). Horovod's threads are outside of the quotas
under every policy, and have the rest of the cores, as on machines whose network has a core. In `heterogeneous` the last rank
has a third of what the others have; in `turns` ranks also sleep, and take turns at being slow. No rate is carried over from one
policy to another: each arm is tuned over the same grid with one seed, by the quality at the end, and then runs with other
seeds, all arms in turn for each. (Full with a larger momentum has a grid of smaller rates. Work sharing has Full's rate.)

Whoever wants less time may as well take fewer steps under Full. So Full runs with fewer steps, too, each time with a schedule
of that length if the program has one, and with the rate of the whole length. `ahead at equal time` is how much better an arm is
than Full in the time that the arm takes. Full's quality there is on a straight line between those of two lengths: somewhat worse
than it would be, since learning slows down.

Every run is appended to the file `--results`, and what is there is not run again: a benchmark that was ended goes on where
it was. So the figures name the commits of their runs. Speed-ups are medians over the seeds, qualities means with their standard
deviations. Differences are means over the seeds, with their standard errors, in points for an accuracy, in percent of Full's for
a perplexity or a loss, and as they are for a return.

`limit` is how much faster a policy without waits could be, by computing alone: the sum over the steps of the slowest rank's
time, over the largest sum of one rank. Where a step has several passes it stands beside Full, and is how much faster Full's own
training would be by the best schedule of whole micro-batches (`limit_of_sharing` in examples/torch/work/job.py). `of limit` is
an arm's speed-up over the limit that stands beside Full; arms that compute something else have none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import quota
from harness.work import FOLDER, Job, run_programs

ROOT = Path(__file__).resolve().parents[1]
TUNING_SEED = 100

MOMENTUM = "full, momentum 0.9"
BALANCED = "full, balanced batches"
SHORTER = {f"full, {share:.0%} of the steps": share for share in (0.4, 0.55, 0.7, 0.85)}
LIKE_FULL = (*SHORTER, "work_sharing")  # arms that have its rate
OTHER_WORK = (*SHORTER, BALANCED)  # arms whose limit is not Full's
# The text of a policy, and more words. `missed=latest` is eager-SGD as it was published: a late rank applies only the newest of the
# results that it has missed, and models are averaged every 10 epochs and at the end.
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("full", ()),
    BALANCED: ("full", ("--balanced",)),
    "solo": ("solo", ()),
    "majority": ("majority", ()),
    "quorum 0.75": ("quorum:0.75", ()),
    "work_sharing": ("work_sharing", ()),
    "solo+latest": ("solo:missed=latest", ()),
    "group_average": ("group_average:2", ()),
    "partial_reduce": ("partial_reduce:2", ()),
    "weighted_average": ("weighted_average:20,0.97", ()),
} | {arm: ("full", ("--share", f"{share:g}")) for arm, share in SHORTER.items()}
MOMENTA = {  # of SGD, and Adam's first beta; MOMENTUM is one of them
    f"{arm}, momentum {momentum:g}": (ARMS[arm][0], ("--momentum", f"{momentum:g}"))
    for arm in ("full", "majority", "quorum 0.75")
    for momentum in (0.7, 0.9, 0.95)
}
ARMS |= MOMENTA
GRADIENTS = ("full", *SHORTER, "solo", "majority", "quorum 0.75")
SLOW_SHARE = 1 / 3  # of what the others have
COMPUTING = 0.8  # of this machine's cores is for the ranks; of two cores Horovod's threads took 0.35 to 0.45


@dataclass(frozen=True)
class Program:
    """What is compared in one program.

    Attributes:
        file: of the program.
        arms: those that make sense there.
        rates: the grid.
        with_momentum: that of Full with the momentum that is usual, if it is another one; the programs have less, for the sake of
            late gradients.
        unequal: the last rank has a smaller share.
        options: of the program, for all arms.
    """

    file: str
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    with_momentum: tuple[float, ...] = ()
    unequal: bool = False
    options: tuple[str, ...] = ()


PROGRAMS = {
    # Steps differ from batch to batch on all ranks alike: what eager-SGD and WAGMA-SGD are for.
    "lstm": Program(
        "lstm", (*GRADIENTS, "solo+latest", BALANCED, MOMENTUM, "group_average"), (4.0, 8.0, 16.0), (1.0, 2.0, 4.0)
    ),
    "transformer": Program(
        "transformer", (*GRADIENTS, "solo+latest", BALANCED, "group_average"), (0.005, 0.01, 0.02, 0.04)
    ),
    # With Muon for the matrices. Its step takes long beside a small batch; so batches are larger.
    "muon": Program(
        "transformer",
        (*GRADIENTS, BALANCED),
        (0.02, 0.04, 0.08, 0.16),
        options=("--optimizer", "muon", "--batch", "24", "--steps", "200"),
    ),
    # Late gradients act as momentum, so how much of it is best depends on the policy.
    "betas": Program(
        "transformer",
        ("full", "majority", "quorum 0.75", *MOMENTA),
        (0.005, 0.01, 0.02, 0.04),
        options=("--steps", "300"),
    ),
    # A step of 4 backward passes.
    "accumulation": Program(
        "transformer",
        (*GRADIENTS, "work_sharing"),
        (0.005, 0.01, 0.02, 0.04, 0.08),
        options=("--passes", "4", "--steps", "150"),
    ),
    # The same, where ranks take turns at being slow.
    "turns": Program(
        "transformer",
        (*GRADIENTS, "work_sharing"),
        (0.005, 0.01, 0.02, 0.04, 0.08),
        options=("--passes", "4", "--delay-ms", "20", "--steps", "150"),
    ),
    # WAGMA-SGD's paper has reinforcement learning, too.
    "ppo": Program("ppo", (*GRADIENTS, "solo+latest", "group_average"), (0.001, 0.002, 0.004, 0.008, 0.016)),
    # Convex, as WP-SGD wants it.
    "svm": Program("svm", (*GRADIENTS, "solo+latest", "weighted_average"), (2e-4, 4e-4, 8e-4, 1.6e-3)),
    # One rank is always slower: P-Reduce's case.
    "heterogeneous": Program(
        "heterogeneous",
        (*GRADIENTS, "solo+latest", MOMENTUM, "partial_reduce"),
        (0.1, 0.2, 0.4),
        (0.025, 0.05, 0.1),
        unequal=True,
    ),
}
IN_PERCENT = ("perplexity", "hinge loss")  # of Full's; accuracies are in points

Run = dict[str, Any]


def shares(program: Program, ranks: int) -> list[float]:
    """The cores of each rank, all together those that are for computing."""
    relative = [1.0] * (ranks - 1) + [SLOW_SHARE if program.unequal else 1.0]
    cores = COMPUTING * (os.cpu_count() or 1)
    return [round(cores * share / sum(relative) - 5e-5, 4) for share in relative]


def job_of(program: Program, arm: str, rate: float, seed: int, steps: int | None) -> Job:
    """What `harness.work.run_programs` is given. `steps` is None for the program's own."""
    policy, more = ARMS[arm]
    words = [*program.options, *more, *(["--steps", str(steps)] if steps else [])]
    return {"program": program.file, "policy": policy, "rate": rate, "seed": seed, "options": words}


class Runs:
    """The runs of a program, of which each is made once."""

    def __init__(self, name: str, options: Namespace) -> None:
        self._name = name
        self._options = options
        self._cores = shares(PROGRAMS[name], options.ranks)
        self._failed: set[str] = set()
        self._program = PROGRAMS[name]
        text = "".join((FOLDER / f"{each}.py").read_text() for each in (self._program.file, "job"))
        self._source = hashlib.sha256(text.encode()).hexdigest()[:12]  # another program has other runs

    def job(self, arm: str, rate: float, seed: int) -> Job:
        where = {"transport": self._options.transport, "cores": self._cores, "source": self._source}
        return job_of(self._program, arm, rate, seed, self._options.steps) | where

    def make(self, jobs: Sequence[Job]) -> list[Run | None]:
        """Make those runs that are not there. Returns what the programs measured; None of one that failed."""
        self._options.results.parent.mkdir(parents=True, exist_ok=True)
        known = self._known()
        while missing := [job for job in jobs if json.dumps(job) not in known.keys() | self._failed]:
            try:
                run_programs(
                    missing,
                    self._options.results,
                    ranks=self._options.ranks,
                    transport=self._options.transport,
                    cores=self._cores,
                )
            except harness.LaunchError as failure:  # perhaps a rate at which a training diverges
                print(failure, flush=True)
            known = self._known()
            self._failed.update([key for key in map(json.dumps, missing) if key not in known][:1])
        return [known.get(json.dumps(job)) for job in jobs]

    def _known(self) -> dict[str, Run]:
        file = self._options.results
        lines = file.read_text().splitlines() if file.exists() else []
        records = map(json.loads, lines)
        return {
            json.dumps(record["job"]): record["run"] | {"commit": record["commit"] or "unknown"} for record in records
        }


def badness(run: Run | None) -> float:
    """Of a rate, by the quality at the end."""
    if run is None or not math.isfinite(run["quality"]):
        return math.inf
    return -run["quality"] if run["better"] == "higher" else run["quality"]


def compare(name: str, options: Namespace) -> dict[str, Any]:
    """Tune and run the arms of a program. Returns their figures, and prints them."""
    program, runs = PROGRAMS[name], Runs(name, options)
    unknown = set(options.arms or ()) - set(program.arms)
    if unknown:
        raise SystemExit(f"{name} has no {', '.join(sorted(unknown))}: its arms are {', '.join(program.arms)}")
    arms = ["full"] + [arm for arm in program.arms if arm != "full" and arm in (options.arms or program.arms)]
    with_momentum = program.with_momentum or program.rates
    grids = {arm: options.rates or (with_momentum if arm == MOMENTUM else program.rates) for arm in arms}
    grid = [(arm, rate) for arm in arms if arm not in LIKE_FULL for rate in grids[arm]]
    tuning = dict(zip(grid, runs.make([runs.job(*of, TUNING_SEED) for of in grid]), strict=True))
    best = lambda arm: min(grids[arm], key=lambda rate: badness(tuning[arm, rate]))
    rates = {arm: best("full" if arm in LIKE_FULL else arm) for arm in arms}
    measured = runs.make([runs.job(arm, rates[arm], seed) for seed in range(options.seeds) for arm in arms])
    by_seed: list[dict[str, Run]] = []
    for seed in range(options.seeds):
        in_turn = dict(zip(arms, measured[seed * len(arms) :], strict=False))
        failed = [arm for arm, run in in_turn.items() if run is None]
        if failed:
            raise SystemExit(f"{name}, seed {seed}: {', '.join(failed)} failed; see above")
        by_seed.append({arm: run for arm, run in in_turn.items() if run is not None})
    made = [run for run in (*tuning.values(), *measured) if run is not None]
    figures = {
        "quality": by_seed[0]["full"]["quality_name"],
        "commits": sorted({run["commit"] for run in made}),
        "cores": shares(program, options.ranks),
        "at_the_edge": [arm for arm in arms if rates[arm] in (min(grids[arm]), max(grids[arm]))],
        "arms": {arm: summary(by_seed, arm, has_limit=not program.unequal) | {"rate": rates[arm]} for arm in arms},
    }
    show(name, figures, options)
    return figures


def summary(by_seed: Sequence[dict[str, Run]], arm: str, *, has_limit: bool) -> dict[str, Any]:
    """The figures of an arm over all seeds."""
    pairs = [(runs[arm], runs["full"]) for runs in by_seed]
    qualities = [run["quality"] for run, _ in pairs]
    name = pairs[0][0]["quality_name"]
    scale = scale_of(name)
    differences = [difference(run["quality"], full["quality"], name) for run, full in pairs]
    better = 1.0 if pairs[0][0]["better"] == "higher" else -1.0
    point = lambda run: (run["seconds"], run["quality"])
    ahead, ahead_error = harness.ahead_in_time(
        [point(run) for run, _ in pairs],
        [[point(runs[full]) for full in ("full", *SHORTER) if full in runs] for runs in by_seed],
        lambda mine, full: better * difference(mine, full, name),
    )
    return {
        "seconds_by_seed": [run["seconds"] for run, _ in pairs],
        "quality_by_seed": [scale * quality for quality in qualities],
        "seconds": statistics.fmean(run["seconds"] for run, _ in pairs),
        "speed_up": statistics.median(full["seconds"] / run["seconds"] for run, full in pairs),
        "quality": scale * statistics.fmean(qualities),
        "deviation": scale * harness.deviation(qualities),
        "against_full": statistics.fmean(differences),
        "against_full_error": harness.standard_error(differences),
        "ahead": ahead,
        "ahead_error": ahead_error,
        "late": mean_if_all([run["late"] for run, _ in pairs]),
        "limit": mean_if_all([run["limit"] for run, _ in pairs]) if has_limit else None,
        "of_limit": statistics.median(full["seconds"] / run["seconds"] / full["limit"] for run, full in pairs)
        if has_limit and arm not in OTHER_WORK
        else None,
    }


def mean_if_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def scale_of(name: str) -> float:
    """Accuracies are in points."""
    return 100.0 if name == "accuracy" else 1.0


def difference(quality: float, full: float, name: str) -> float:
    """Of a quality from that of Full: in percent of that, in points, or as it is."""
    if name in IN_PERCENT:
        return 100 * (quality / full - 1)
    return scale_of(name) * (quality - full)


def show(name: str, figures: dict[str, Any], options: Namespace) -> None:
    cores = " ".join(f"{share:.2f}" for share in figures["cores"])
    harness.print_table(
        f"{name}: {options.ranks} ranks on {cores} cores over {options.transport}, {options.seeds} seeds",
        [
            "arm",
            "rate",
            "seconds",
            "speed-up",
            figures["quality"],
            "against Full",
            "ahead at equal time",
            "late",
            "limit",
            "of limit",
        ],
        [
            [
                arm,
                f"{row['rate']:g}",
                f"{row['seconds']:.1f}",
                f"{row['speed_up']:.2f}",
                f"{row['quality']:.4g} ± {row['deviation']:.2g}",
                f"{row['against_full']:+.2f} ± {row['against_full_error']:.2f}",
                "" if row["ahead"] is None else f"{row['ahead']:+.2f} ± {row['ahead_error']:.2f}",
                "" if row["late"] is None else f"{row['late']:.0%}",
                "" if row["limit"] is None else f"{row['limit']:.2f}",
                "" if row["of_limit"] is None else f"{row['of_limit']:.0%}",
            ]
            for arm, row in figures["arms"].items()
        ],
    )
    if figures["at_the_edge"]:
        print(f"The best rate is the first or the last of its grid for {', '.join(figures['at_the_edge'])}.")


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.set_defaults(transport="gloo")  # for the reason in harness/work.py
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        help="those of each program, if not all; Full is always there. For `ahead` it needs shorter trainings, too",
    )
    parser.add_argument("--rates", nargs="+", type=float, help="the grid, if not each program's own")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm at its best rate")
    parser.add_argument("--steps", type=int, help="of the programs, if not their own: to see that all runs")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "work.jsonl", help="file of all runs")
    options = parser.parse_args()
    if reason := quota.unavailable():
        print(f"Skipped: {reason}")
        return
    compared = {name: compare(name, options) for name in options.programs}
    harness.write_json(options.json, {"ranks": options.ranks, "transport": options.transport, "programs": compared})


if __name__ == "__main__":
    main()
