"""`hvd.Auto` in simulated time: against every static quorum, and what a decision costs.

    .venv/bin/python benchmarks/auto_quorum.py [--sections tuned others loads cost accuracy lateness] [--seeds 3] [--json FILE]

The simulator drives the coordinator of a real job; a step computes for 50 ms, a message takes 1 ms, Horovod's cycle 1 ms. Rates
are steps of all ranks per second until the first rank has taken its last. Nothing here is measured on a cluster.

tuned    ten kinds of delays with 8 ranks, on which the thresholds of the policy were chosen.
others   kinds of delays and numbers of ranks on which they were not.
loads    delays that begin in step 300 and end with step 600: rounds until the first change, and until all ranks are in again
         after the last delayed step.
cost     the longest that one closing takes, with 8, 64 and 1,024 ranks: processor time, medians of 5 maxima over 256 rounds.
accuracy  the ten kinds of delays with other seeds, and a network that learns the digits from the gradients in these very rounds:
         seconds, simulated, until it recognises 95 % of those that are held out.
lateness  the same training at several learning rates, under static quorums: the gradients that it takes, over those of all ranks in
         every round, grow with the share of late ones as 1 + a * late^2; a is fitted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import digits
from numpy.typing import NDArray

from horovod_partial import _core
from horovod_partial.insight.simulate import Cluster, Result, Trace, simulate
from horovod_partial.policies import Auto, Quorum

COMPUTE, REDUCTION = 0.05, 0.001
BEGIN, END = 300, 600  # steps
ACCURACY, LEARNING_RATE, MOST_STEPS = 0.95, 0.05, 3000
LATENESS_RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
LATENESS_DELAYS = ("one at random", "log-normal", "rotating", "half 1.7 times slower")
FIRST_SEED = 1000  # of the accuracy; no threshold was chosen with it or a later one

Matrix = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Matrix]  # iterations and ranks to delays in steps


def one_random(rng: np.random.Generator, steps: int, ranks: int, count: int = 1) -> Matrix:
    delays = np.zeros((steps, ranks))
    for row in delays:
        row[rng.choice(ranks, count, replace=False)] = 2.0
    return delays


def always(ranks_of: Callable[[int], int], steps_late: float) -> Draw:
    def draw(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
        delays = np.zeros((steps, ranks))
        delays[:, : ranks_of(ranks)] = steps_late
        return delays

    return draw


def rotating(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
    return np.linspace(0, 1.5, ranks)[(np.arange(steps)[:, None] + np.arange(ranks)) % ranks]


def bursts(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
    delays = np.zeros((steps, ranks))
    for rank in range(ranks):
        step = 0
        while step < steps:
            step += int(rng.geometric(1 / 60))
            length = int(rng.integers(5, 20))
            delays[step : step + length, rank] = 2.0
            step += length
    return delays


def growing(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
    delays = np.zeros((steps, ranks))
    delays[:, 0] = np.linspace(0, 3, steps)
    return delays


def by_turns(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
    delays = np.zeros((steps, ranks))
    delays[np.arange(steps) % 200 < 100, 0] = 2.0
    return delays


def evaluating(rng: np.random.Generator, steps: int, ranks: int) -> Matrix:
    delays = np.zeros((steps, ranks))
    delays[99::100] = 20.0
    return delays


TUNED: dict[str, Draw] = {
    "none": lambda rng, steps, ranks: np.zeros((steps, ranks)),
    "one at random": one_random,
    "one always": always(lambda ranks: 1, 2.0),
    "half 1.7 times slower": always(lambda ranks: ranks // 2, 0.7),
    "log-normal": lambda rng, steps, ranks: 0.3 * rng.lognormal(0.0, 1.0, (steps, ranks)),
    "rotating": rotating,
    "bursts": bursts,
    "two groups": lambda rng, steps, ranks: (
        always(lambda ranks: ranks // 4, 1.0)(rng, steps, ranks) + rng.exponential(0.1, (steps, ranks))
    ),
    "growing": growing,
    "one in twenty by 1 s": lambda rng, steps, ranks: (rng.random((steps, ranks)) < 0.05) / COMPUTE,
}
OTHERS: list[tuple[str, int, Draw]] = [
    ("gamma", 2, lambda rng, steps, ranks: rng.gamma(2, 0.25, (steps, ranks))),
    ("gamma", 3, lambda rng, steps, ranks: rng.gamma(2, 0.25, (steps, ranks))),
    ("bursts", 3, bursts),
    ("half 1.7 times slower", 4, TUNED["half 1.7 times slower"]),
    ("100 steps with delays, 100 without", 4, by_turns),
    ("Pareto", 8, lambda rng, steps, ranks: 0.1 * rng.pareto(1.5, (steps, ranks))),
    ("an evaluation every 100 steps", 8, evaluating),
    ("a quarter at random", 16, lambda rng, steps, ranks: one_random(rng, steps, ranks, ranks // 4)),
    ("one in 500 by 10 steps", 16, lambda rng, steps, ranks: 10.0 * (rng.random((steps, ranks)) < 0.002)),
    ("log-normal", 64, TUNED["log-normal"]),
    ("a third 2.2 times slower", 64, always(lambda ranks: ranks // 3, 1.2)),
]
LOADS: dict[str, Draw] = {
    "one always": TUNED["one always"],
    "one at random": one_random,
    "half": always(lambda ranks: ranks // 2, 2.0),
    "log-normal": TUNED["log-normal"],
}


def run(policy: Auto | Quorum, delays: Matrix) -> Result:
    ranks = delays.shape[1]
    cluster = Cluster(REDUCTION / (2 * (ranks - 1)), 0.0)
    trace = Trace.even(1, 4, 0.4 * COMPUTE, 0.6 * COMPUTE)
    return simulate(trace, policy, ranks, cluster=cluster, iterations=len(delays), delays=COMPUTE * delays)


def rate(result: Result) -> float:
    end = result.ends[-1].min()
    return float((result.ends <= end).sum() / end)


def candidates(ranks: int) -> list[int]:
    return sorted({-(-ranks * eighths // 8) for eighths in (8, 7, 6, 4, 2)} | {1}, reverse=True)


def compare(name: str, ranks: int, draw: Draw, seed: int, steps: int) -> dict[str, Any]:
    delays = draw(np.random.default_rng(seed), steps, ranks)
    static = {quorum: run(Quorum(quorum), delays) for quorum in candidates(ranks)}
    best = max(static, key=lambda quorum: rate(static[quorum]))
    auto = run(Auto(), delays)
    return {
        "delays": name,
        "ranks": ranks,
        "seed": seed,
        "all": rate(static[ranks]),
        "best": rate(static[best]),
        "best_quorum": best,
        "best_late": static[best].late,
        "auto": rate(auto),
        "auto_late": auto.late,
        "slower": rate(static[best]) / rate(auto),
        "changes": len(auto.quorums) - 1,
        "quorums": auto.quorums,
    }


def against_static(title: str, cases: list[tuple[str, int, Draw]], seeds: range, steps: int) -> list[dict[str, Any]]:
    figures = [compare(name, ranks, draw, seed, steps) for name, ranks, draw in cases for seed in seeds]
    rows = []
    for name, ranks, _ in cases:
        mine = [row for row in figures if (row["delays"], row["ranks"]) == (name, ranks)]
        row = [name, str(ranks)]
        row += [_mean(mine, key, 1) for key in ("all", "best", "auto")]
        row += [_mean(mine, "slower", 3), f"{max(each['slower'] for each in mine):.3f}"]
        row += [_mean(mine, "best_late", 2), _mean(mine, "auto_late", 2), str(max(each["changes"] for each in mine))]
        rows.append(row)
    columns = ["delays", "ranks", "all", "best", "auto", "best/auto", "worst", "late best", "late auto", "most changes"]
    harness.print_table(title, columns, rows)
    return figures


def _mean(figures: list[dict[str, Any]], key: str, digits: int) -> str:
    return f"{statistics.mean(row[key] for row in figures):.{digits}f}"


def loads(seeds: range) -> list[dict[str, Any]]:
    figures = []
    for name, draw in LOADS.items():
        for ranks in (2, 8, 64):
            for seed in seeds:
                delays = draw(np.random.default_rng(seed), 1200, ranks)
                delays[:BEGIN] = delays[END:] = 0.0
                auto = run(Auto(), delays)
                began = int(np.searchsorted(auto.closed, auto.ends[BEGIN - 1].max()))
                ended = int(np.searchsorted(auto.closed, auto.ends[delays > 0].max()))
                changes = [round for round, _, _ in auto.quorums[1:]]
                back = [round for round, quorum, _ in auto.quorums if quorum == ranks]
                row = {"delays": name, "ranks": ranks, "seed": seed, "quorums": auto.quorums, "late": auto.late}
                row["first"] = next((round - began for round in changes if round >= began), None)
                row["back"] = max(0, back[-1] - ended) if auto.quorums[-1][1] == ranks else None
                figures.append(row)
    rows = []
    for name in LOADS:
        for ranks in (2, 8, 64):
            mine = [row for row in figures if (row["delays"], row["ranks"]) == (name, ranks)]
            rows.append([name, str(ranks)] + [", ".join(str(row[key]) for row in mine) for key in ("first", "back")])
    harness.print_table("Delays in steps 300 to 600: rounds", ["delays", "ranks", "first change", "all again"], rows)
    return figures


def cost() -> dict[str, float]:
    figures = {}
    for ranks in (8, 64, 1024):
        longest = [_longest_closing(ranks, seed) for seed in range(5)]
        figures[str(ranks)] = statistics.median(longest)
    harness.print_table(
        "The longest closing", ["ranks", "ms"], [[ranks, f"{1e3 * seconds:.3f}"] for ranks, seconds in figures.items()]
    )
    return figures


def _longest_closing(ranks: int, seed: int, rounds: int = 256) -> float:
    """Seconds, where all ranks are in each round and vary by much, so that small quorums are replayed for long."""
    rng = np.random.default_rng(seed)
    quorum = _core.AutoQuorum(ranks, Auto().to_core(ranks))
    everybody = [True] * ranks
    now, longest = 0.0, 0.0
    for _ in range(rounds):
        arrivals = now + COMPUTE * (1.0 + rng.exponential(1.0, ranks))
        for rank, at in enumerate(arrivals.tolist()):
            quorum.arrive(rank, at)
        now = float(arrivals.max())
        start = time.thread_time()
        quorum.close(everybody, now)
        longest = max(longest, time.thread_time() - start)
        now += REDUCTION
        quorum.ended(now)
    return longest


def train(policy: Auto | Quorum, delays: Matrix, rate: float, seed: int) -> tuple[Result, int | None, int]:
    """The job; the rounds until the accuracy is reached, if it is; and the gradients in those."""
    result = run(policy, delays)
    began = np.vstack([np.zeros(delays.shape[1]), result.ends[:-1]])
    arrived = began + COMPUTE * (1 + delays)
    done = result.closed + REDUCTION
    tick = 1e-6  # of rounding
    joined = np.searchsorted(result.closed, arrived - tick)
    model_of = np.searchsorted(done, began + tick, side="right")
    rounds = digits.rounds_until(ACCURACY, joined, model_of, rate, seed)
    return result, rounds, int((joined < (len(done) if rounds is None else rounds)).sum())


def seconds_to_accuracy(policy: Auto | Quorum, delays: Matrix, seed: int) -> tuple[float, int, float]:
    """Seconds, infinite where it is not reached; rounds; and the share of late gradients of the job."""
    result, rounds, _ = train(policy, delays, LEARNING_RATE, seed)
    if rounds is None:
        return np.inf, len(result.closed), result.late
    return float(result.closed[rounds - 1]) + REDUCTION, rounds, result.late


def accuracy(seeds: range) -> dict[str, dict[str, Any]]:
    columns = ["delays", "auto", "all", "best", "quorum", "auto/best", "worst", "late auto", "fewest rounds of all"]
    figures: dict[str, dict[str, Any]] = {}
    rows = []
    for name, draw in TUNED.items():
        policies = {"auto": Auto()} | {str(quorum): Quorum(quorum) for quorum in candidates(8)}
        # By policy, for each seed: seconds, rounds, share of late contributions.
        runs: dict[str, list[tuple[float, int, float]]] = {key: [] for key in policies}
        for seed in seeds:
            delays = draw(np.random.default_rng(FIRST_SEED + seed), MOST_STEPS, 8)
            for key, policy in policies.items():
                runs[key].append(seconds_to_accuracy(policy, delays, FIRST_SEED + seed))
        seconds = {key: statistics.median(run[0] for run in mine) for key, mine in runs.items()}
        best = min(seconds.keys() - {"auto"}, key=lambda key: seconds[key])
        ratios = [auto[0] / other[0] for auto, other in zip(runs["auto"], runs[best], strict=True)]
        figures[name] = {
            "seconds": seconds,
            "auto_over_all": seconds["auto"] / seconds["8"],
            "best": best,
            "auto_over_best": statistics.median(ratios),
            "worst_auto_over_best": max(ratios),
            "late": statistics.mean(run[2] for run in runs["auto"]),
            "fewest_rounds_of_all": min(run[1] for run in runs["8"]),
            "runs": runs,
        }
        told = figures[name]
        row = [name, *(f"{seconds[key]:.1f}" for key in ("auto", "8", best)), best]
        row += [f"{told['auto_over_best']:.3f}", f"{told['worst_auto_over_best']:.3f}", f"{told['late']:.1%}"]
        rows.append([*row, str(told["fewest_rounds_of_all"])])
    harness.print_table(f"Seconds to {ACCURACY:.0%} of the digits, medians of {len(seeds)} seeds", columns, rows)
    return figures


def lateness(seeds: range) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for rate in LATENESS_RATES:
        points = []
        for name, seed in itertools.product(LATENESS_DELAYS, seeds):
            delays = TUNED[name](np.random.default_rng(FIRST_SEED + seed), MOST_STEPS, 8)
            _, reached, of_all = train(Quorum(8), delays, rate, FIRST_SEED + seed)
            for quorum in candidates(8)[1:]:
                result, rounds, gradients = train(Quorum(quorum), delays, rate, FIRST_SEED + seed)
                if reached is not None and rounds is not None:
                    points.append((result.late, gradients / of_all))
        late, cost = np.array(points).T
        figures[str(rate)] = {"a": float((late**2 @ (cost - 1)) / (late**2 @ late**2)), "points": points}
    rows = []
    for rate_text, found in figures.items():
        late, cost = np.array(found["points"]).T
        off = np.abs(1 + found["a"] * late**2 - cost)
        rows.append([rate_text, f"{found['a']:.2f}", f"{np.median(off):.3f}", f"{late.max():.2f}", f"{cost.max():.2f}"])
    columns = ["learning rate", "a", "median error", "largest late share", "largest cost"]
    harness.print_table("Gradients to the accuracy, over those of all ranks: 1 + a * late^2", columns, rows)
    return figures


def main() -> None:
    harness.origin()  # before anything is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ["tuned", "others", "loads", "cost", "accuracy", "lateness"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    seeds = range(options.seeds)
    figures: dict[str, Any] = {"steps": options.steps}
    if "tuned" in options.sections:
        cases = [(name, 8, draw) for name, draw in TUNED.items()]
        figures["tuned"] = against_static("Steps per second, delays of the tuning", cases, seeds, options.steps)
    if "others" in options.sections:
        figures["others"] = against_static("Steps per second, other delays", OTHERS, seeds, options.steps)
    if "loads" in options.sections:
        figures["loads"] = loads(seeds)
    if "cost" in options.sections:
        figures["cost"] = cost()
    if "accuracy" in options.sections:
        figures["accuracy"] = accuracy(seeds)
    if "lateness" in options.sections:
        figures["lateness"] = lateness(seeds)
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
