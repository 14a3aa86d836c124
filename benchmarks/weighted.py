"""Averages of unequal work: ridge regression on eight ranks that have taken different numbers of steps.

    .venv/bin/python benchmarks/weighted.py [--json FILE] [--transport gloo]

WP-SGD's claims (JPDC 2020), on noisy data whose optimum is known; errors are the excess of the loss, means over the
seeds. First one average at the end, for ranks with all, half and a quarter of the steps: by weights (Algorithm 1, equation
6; `hvd.WeightedAverage`), plainly (the baseline of section 6.2.6), and the fastest ranks alone; the usefulness test
(equation 24) says when weights beat those. Then seven ranks that fall further and further behind one: the average falls
back to the fastest rank's model. Last the time to a loss, with one rank four times slower: one weighted average at the end,
averages now and then (section 5.1; both by `hvd.WeightedAverage`), and SimuParallel SGD (Algorithm 2), in which all ranks
take the same number of steps and average plainly. A step is a sleep, so that ranks do not take each other's cores.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import torch

import horovod_partial.torch as hvd
from horovod_partial.exchange.wp_sgd import average_is_useful

DIMENSIONS, NOISE, SPREAD = 20, 5.0, 0.55
REGULARISATION, STEP = 0.1, 0.005
CONTRACTION = 1 - STEP * (1 + REGULARISATION)  # of the mean, as the points have unit variance
STEPS = 252
SHARES = (1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25)  # of the steps that each rank takes
BEHIND = (60, 120, 240, 480, 1000)  # steps by which seven ranks are behind the fastest
STEP_MS, SLOWDOWN = 2.0, 4
HORIZONS = (0.5, 0.75, 1.0, 1.25, 1.5)  # of the steps, after which those average that do it once
PERIOD = STEPS // 8


class Problem:
    """Points around a plane that all ranks share, and a rank's own stream of them."""

    def __init__(self, seed: int) -> None:
        shared = torch.Generator().manual_seed(seed)
        self.plane = SPREAD * torch.randn(DIMENSIONS, generator=shared, dtype=torch.float64)
        self.stream = torch.Generator().manual_seed(1_000 * (seed + 1) + hvd.rank())

    def loss(self, weights: torch.Tensor) -> torch.Tensor:
        point = torch.randn(DIMENSIONS, generator=self.stream, dtype=torch.float64)
        noise = NOISE * torch.randn(1, generator=self.stream, dtype=torch.float64)
        return 0.5 * (point @ (weights - self.plane) - noise).square().sum()

    def excess(self, weights: torch.Tensor) -> float:
        """By how much the expected loss, with its regularisation, is above the least."""
        optimum = self.plane / (1 + REGULARISATION)
        return 0.5 * (1 + REGULARISATION) * float((weights.detach() - optimum).square().sum())


def new_model() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weights = torch.nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
    return weights, torch.optim.SGD([weights], lr=STEP, weight_decay=REGULARISATION)


def take_step(problem: Problem, weights: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    problem.loss(weights).backward()
    optimizer.step()


def unequal_work(steps: list[int], seeds: int, stage: str) -> dict[str, float]:
    """On every rank: mean errors of one average at the end, rank r having taken `steps[r]` steps."""
    errors: dict[str, list[float]] = {"weighted": [], "plain": [], "fastest": []}
    for seed in range(seeds):
        harness.progress(stage, seed, seeds)
        problem = Problem(seed)
        weights, optimizer = new_model()
        for _ in range(steps[hvd.rank()]):
            take_step(problem, weights, optimizer)
        model = weights.detach()
        policy = hvd.WeightedAverage(1, CONTRACTION)
        weighted = hvd.average(model, policy, name="weighted", steps=steps[hvd.rank()])
        plain = hvd.allreduce(model, name="plain")
        mine = torch.zeros(2, dtype=torch.float64)
        if steps[hvd.rank()] == max(steps):
            mine += torch.tensor([problem.excess(model), 1.0], dtype=torch.float64)
        fastest, count = hvd.allreduce(mine, name="fastest", op=hvd.Sum).tolist()
        for key, error in zip(errors, (problem.excess(weighted), problem.excess(plain), fastest / count), strict=True):
            errors[key].append(error)
    return {key: statistics.fmean(values) for key, values in errors.items()}


def race(method: str, steps: int, seeds: int, stage: str) -> list[tuple[float, float]]:
    """On every rank: mean seconds and errors after each average, with rank 1 slower than the others."""
    period = PERIOD if method == "periodic" else steps
    pause = STEP_MS / 1e3 * (SLOWDOWN if hvd.rank() == 1 else 1)
    runs = []
    for seed in range(seeds):
        harness.progress(stage, seed, seeds)
        problem = Problem(seed)
        weights, optimizer = new_model()
        if method != "simuparallel":
            named = [(f"{method}.{steps}.{seed}", weights)]
            optimizer = hvd.DistributedOptimizer(optimizer, named, sync=hvd.WeightedAverage(period, CONTRACTION))
        take_step(problem, weights, optimizer)  # begins the rounds
        curve: list[tuple[float, float]] = []
        hvd.barrier()
        start = time.perf_counter()
        if method == "simuparallel":
            for _ in range(steps - 1):
                time.sleep(pause)
                take_step(problem, weights, optimizer)
            average = hvd.allreduce(weights.detach(), name="simuparallel")
            curve.append((time.perf_counter() - start, problem.excess(average)))
        last = None
        while method != "simuparallel" and len(curve) < steps // period:
            time.sleep(pause)
            take_step(problem, weights, optimizer)
            if optimizer.last_average is not last:
                last = optimizer.last_average
                curve.append((time.perf_counter() - start, problem.excess(weights)))
        runs.append(curve)
        hvd.barrier()
    return [
        (statistics.fmean(run[i][0] for run in runs), statistics.fmean(run[i][1] for run in runs))
        for i in range(len(runs[0]))
    ]


def measure(seeds: int, races: int) -> dict[str, Any]:
    """On every rank: all figures."""
    shared = [int(share * STEPS) for share in SHARES]
    figures: dict[str, Any] = {
        "shares": {
            "steps": shared,
            "useful": average_is_useful(shared, CONTRACTION),
            **unequal_work(shared, seeds, "unequal work"),
        },
        "behind": {},
        "races": {"simuparallel": [], "once": []},
    }
    for behind in BEHIND:
        steps = [max(BEHIND) + 50, *[max(BEHIND) + 50 - behind] * (hvd.size() - 1)]
        figures["behind"][str(behind)] = {
            "useful": average_is_useful(steps, CONTRACTION),
            **unequal_work(steps, seeds, f"{behind} steps behind"),
        }
    for method, curves in figures["races"].items():
        for share in HORIZONS:
            curves.append(race(method, int(share * STEPS), races, f"{method}, {share:g} of the steps")[0])
    figures["races"]["periodic"] = race("periodic", int(max(HORIZONS) * STEPS), races, "periodic")
    return figures


def time_to(curve: list[list[float]], error: float) -> float | None:
    """Seconds after which a method's averages are as good as `error`; None if they never are."""
    return next((seconds for seconds, reached in sorted(curve) if reached <= error), None)


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--seeds", type=int, default=40, help="problems to average errors over")
    parser.add_argument("--races", type=int, default=12, help="problems to average times over")
    options = parser.parse_args()
    if options.ranks != len(SHARES):
        parser.error(f"the shares of work are made for {len(SHARES)} ranks")
    job = {"ranks": options.ranks, "transport": options.transport}
    measured = harness.launch(measure, **job, asleep=True, seeds=options.seeds, races=options.races)

    rows = [["all, half, a quarter of the steps", measured["shares"]]]
    rows += [[f"7 ranks {behind} steps behind", errors] for behind, errors in measured["behind"].items()]
    harness.print_table(
        f"Excess of the loss after one average, over {options.transport}",
        ["work", "weights are useful", "weighted", "plain", "fastest alone"],
        [
            [what, "yes" if e["useful"] else "no", *(f"{e[k]:.3f}" for k in ("weighted", "plain", "fastest"))]
            for what, e in rows
        ],
    )
    target = 1.1 * dict(zip(HORIZONS, measured["races"]["simuparallel"], strict=True))[1.0][1]
    seconds = {method: time_to(curve, target) for method, curve in measured["races"].items()}
    harness.print_table(
        f"Seconds to a loss of {target:.3f} above the least, one rank {SLOWDOWN} times slower",
        ["method", "seconds"],
        [[method, f"{taken:.2f}" if taken is not None else "never"] for method, taken in seconds.items()],
    )
    harness.write_json(options.json, {**job, "seeds": options.seeds, **measured, "target": target, "seconds": seconds})


if __name__ == "__main__":
    main()
