"""The simulator: against reality, how fast it is, and what it says of merged gradients at scale.

    .venv/bin/python benchmarks/simulator.py [--sections reality speed scale sharing jobs] [--json FILE]

reality  2, 4 and 8 ranks; four gradients of 256 KiB, each after 10 ms of backward (a sleep), one message for each; in
         every step one rank, drawn at random, is delayed by 40 ms. Inputs of the prediction are measured in the same
         job: what a message costs, from reductions of all ranks at once (Horovod's own for Full), and what a step takes
         where nothing is exchanged. Times are means over ranks and steps, medians over runs with other delays; the
         error is the median of those of the runs.
speed    2,048 ranks, 1,000 iterations, one message in each, log-normal delays, on one core.
scale    ResNet-50's trace, the MG-WFBP paper's first cluster, a ring, no delays: up to which number of ranks a message
         for each gradient is faster than a single one, by the time of backward; and what merging gains at 64 ranks.
sharing  how many times as fast as Full work sharing is, and in brackets the best schedule of whole micro-batches; 8 ranks,
         steps of 43 ms. Also with the compute times of a production job of 32 ranks. There each micro-batch costs a share
         of the step in addition, and Full does not split.
jobs     how many times as fast as Full each policy is with the compute times of two production jobs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import harness
import numpy as np
import torch
from harness.scenarios import TRACES
from harness.shaped import Shaped

import horovod_partial.torch as hvd
from horovod_partial.insight.simulate import (
    Cluster,
    LogNormal,
    OneSlow,
    RandomRanks,
    RecordedSteps,
    Result,
    Rotating,
    Trace,
    simulate,
)
from horovod_partial.merging import MessageCost

# --- Against reality -------------------------------------------------------------------------------------------------

RANKS = (2, 4, 8)
POLICIES = ("full", "solo", "majority")
GRADIENTS, NUMBERS, BACKWARD, DELAY = 4, 2**16, 0.040, 0.040
SIZES = [2**power for power in range(15, 23)]  # bytes


def measure(steps: int, repeats: int) -> dict[str, Any]:
    """On every rank: seconds of messages, of a step alone, and of a step under each policy; means over the ranks."""
    costs = {path: fitting_messages(path) for path in ("full", "partial")}
    alone: list[float] = []
    taken: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for repeat in range(repeats):  # by turns, so that a disturbance hits all alike
        alone.append(train(None, steps // 2, harness.RandomVictims(hvd.size(), 0, 0.0)))
        for policy, seconds in taken.items():
            seconds.append(train(policy, steps, delays_of(hvd.size(), repeat)))
    return {"costs": costs, "alone": alone, "steps": taken}


def delays_of(ranks: int, repeat: int) -> harness.Delays:
    return harness.RandomVictims(ranks, 1, DELAY, seed=repeat)


def fitting_messages(path: str, attempts: int = 4) -> list[float]:
    """Seconds of messages of each size, measured again while they make no line."""
    for _ in range(attempts):
        seconds = messages(path)  # the same on every rank
        try:
            MessageCost.fit(SIZES, seconds)
        except ValueError as error:
            reason = error
        else:
            return seconds
    raise reason


def messages(path: str, repeats: int = 60) -> list[float]:
    """Median seconds of reductions of each size that all ranks begin together."""
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for repeat in range(repeats):
        harness.progress(f"messages, {path}", repeat, repeats)
        for size, taken in seconds.items():  # by turns, so that a disturbance does not hit one size
            tensor = torch.ones(size // 4)
            hvd.barrier()
            start = time.perf_counter()
            if path == "full":
                hvd.allreduce_(tensor, name=f"message.{size}")
            else:
                hvd.partial_allreduce_(tensor, name=f"message.{size}", sync=hvd.Quorum(1.0))
            taken.append(time.perf_counter() - start)
    return [mean(statistics.median(taken)) for taken in seconds.values()]


def train(policy: str | None, steps: int, delays: harness.Delays) -> float:
    """Mean seconds of a step; without a policy each rank trains alone."""
    layers = Shaped([(NUMBERS,)] * GRADIENTS, [BACKWARD / GRADIENTS] * GRADIENTS)
    optimizer: Any = torch.optim.SGD(layers.parameters, lr=1e-3)
    if policy is not None:
        names = [(str(index), parameter) for index, parameter in enumerate(layers.parameters)]
        optimizer = hvd.DistributedOptimizer(optimizer, names, sync=policy)
    hvd.barrier()
    start = time.perf_counter()
    for step in range(steps):
        harness.progress(f"{policy or 'alone'}", step, steps)
        delays.serve(hvd.rank(), step)
        optimizer.zero_grad()
        layers.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    if policy not in (None, "full"):
        optimizer.flush()
    return mean(seconds / steps)


def mean(value: float) -> float:
    """Over the ranks."""
    return hvd.allreduce(torch.tensor([value], dtype=torch.float64), name="mean").item()


def predict(measured: dict[str, Any], ranks: int, steps: int, policy: str, repeat: int) -> float:
    """Seconds of a step."""
    cost = MessageCost.fit(SIZES, measured["costs"]["full" if policy == "full" else "partial"])
    delays = delays_of(ranks, repeat)
    # The cost holds the time to the next of Horovod's cycles already.
    return simulate(
        Trace.even(GRADIENTS, 4 * NUMBERS, 0.0, measured["alone"][repeat]),
        policy,
        ranks,
        cluster=Cluster.fit_ring(cost, ranks),
        rule="wait_free",
        iterations=steps,
        delays=np.array([delays.draw(step) for step in range(steps)]),
        cycle=0.0,
    ).iteration_time


def reality(most_ranks: int, transport: str, steps: int, repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    rows = []
    # A message for each gradient, as Horovod sends them.
    environment = {"HOROVOD_PARTIAL_BUCKET_MB": str(4 * NUMBERS / 1e6)}
    job = {"transport": transport, "environment": environment, "steps": steps, "repeats": repeats}
    for ranks in (ranks for ranks in RANKS if ranks <= most_ranks):
        measured = harness.launch(measure, ranks=ranks, **job)
        figures[str(ranks)] = {"measured": measured, "predicted": {}, "ratio": {}}
        for policy, seconds in measured["steps"].items():
            predicted = [predict(measured, ranks, steps, policy, repeat) for repeat in range(repeats)]
            ratio = statistics.median(mine / real for mine, real in zip(predicted, seconds, strict=True))
            figures[str(ranks)]["predicted"][policy] = predicted
            figures[str(ranks)]["ratio"][policy] = ratio
            medians = [f"{1e3 * statistics.median(values):.1f}" for values in (seconds, predicted)]
            rows.append([str(ranks), policy, *medians, f"{ratio - 1:+.1%}"])
    harness.print_table(
        f"Time of a step, over {transport}", ["ranks", "policy", "measured ms", "predicted ms", "error"], rows
    )
    return figures


# --- Speed -----------------------------------------------------------------------------------------------------------


def speed(ranks: int = 2048, iterations: int = 1000) -> dict[str, float]:
    trace = Trace.even(1, 100_000_000, 0.0, 0.4)
    figures = {}
    for policy in POLICIES:
        start = time.perf_counter()
        simulate(trace, policy, ranks, cluster=PAPER, iterations=iterations, delays=LogNormal(0.024))
        figures[policy] = time.perf_counter() - start
    harness.print_table(
        f"To simulate {ranks:,} ranks, {iterations:,} iterations",
        ["policy", "seconds"],
        [[policy, f"{seconds:.1f}"] for policy, seconds in figures.items()],
    )
    return figures


# --- Merged gradients at scale ---------------------------------------------------------------------------------------

PAPER = Cluster.fit_ring(MessageCost(9.72e-4, 1.97e-9), 16)
TRACE = TRACES / "resnet50.json"


def iteration(backward: float, rule: str, ranks: int) -> float:
    trace = Trace.load(TRACE).scaled(backward)
    return simulate(trace, "full", ranks, cluster=PAPER, rule=rule, iterations=1, cycle=0.0).iteration_time


def scale() -> dict[str, Any]:
    crossing: dict[str, int] = {}
    for backward in (0.1, 0.2, 0.4, 0.8, 1.6):
        ranks = 4
        while iteration(backward, "wait_free", ranks) <= iteration(backward, "single", ranks):
            ranks *= 2
        crossing[str(backward)] = ranks
    harness.print_table(
        "ResNet-50: where a single message overtakes a message for each gradient",
        ["backward in s", "between", "and ranks"],
        [[backward, str(ranks // 2), str(ranks)] for backward, ranks in crossing.items()],
    )
    exact = iteration(0.4, "exact", 64)
    gains = {rule: iteration(0.4, rule, 64) / exact for rule in ("wait_free", "single", "paper", "threshold")}
    harness.print_table(
        "ResNet-50, backward of 0.4 s, 64 ranks: iterations over those of the exact plan",
        ["rule", "times"],
        [[rule, f"{gain:.3f}"] for rule, gain in gains.items()],
    )
    return {"crossing": crossing, "over_exact": gains}


# --- Work sharing ----------------------------------------------------------------------------------------------------

STEP, UPDATES = 0.043, 400
MESSAGE = 0.008


def share(
    times: np.ndarray, passes: int, delays_in: str = "each", *, message: float = 0.0, split: float = 0.0
) -> dict[str, float]:
    """Seconds of an iteration, of which Full does not split the step.

    Args:
        times: seconds, of the shape (iterations, ranks): what a rank's step takes. Or of the shape (iterations, ranks,
            passes): what a planned micro-batch takes.
        passes: micro-batches of a step.
        delays_in: as in `simulate`.
        message: seconds of the reduction after the step.
        split: seconds that a micro-batch takes in addition.
    """
    iterations, ranks = times.shape[:2]
    delays = times - times.min()

    def run(policy: str, delays: np.ndarray, **options: Any) -> Result:
        return simulate(
            Trace.even(1, 4, 0.0, times.min() * (1 if times.ndim == 2 else passes)),
            policy,
            ranks,
            cluster=Cluster.fit_ring(MessageCost(message, 0.0), ranks),
            iterations=iterations,
            delays=delays,
            **options,
        )

    full = run("full", delays.reshape(iterations, ranks, -1).sum(axis=2))
    shared = run("work_sharing", delays, passes=passes, split=split, delays_in=delays_in)
    return {"full": full.iteration_time, "shared": shared.iteration_time, "bound": shared.bound or 0.0}


def shown(figures: dict[str, float]) -> str:
    return f"{figures['full'] / figures['shared']:.2f} ({figures['full'] / figures['bound']:.2f})"


def models(passes: int, message: float = 0.0) -> dict[str, dict[str, float]]:
    """By delays."""
    random = np.random.default_rng(0)
    even = np.full((UPDATES, 8), STEP)
    late = even + RandomRanks(1, STEP).draw(UPDATES, 8, STEP, seed=0)
    slow = even + OneSlow(3.0).draw(UPDATES, 8, STEP, seed=0)
    turns = Rotating((0.25 * STEP, 0.5 * STEP, STEP, 2.25 * STEP)).draw(UPDATES, 8, STEP, seed=0)
    rows = {
        "none": (even, "each"),
        "one random rank late by a step": (late, "first"),
        "one rank always 3 times slower": (slow, "each"),
        "log-normal 0.5, a rank's whole step": (even * random.lognormal(0.0, 0.5, even.shape), "each"),
        "log-normal 0.5, each micro-batch": (STEP / passes * random.lognormal(0.0, 0.5, (*even.shape, passes)), "each"),
        "0.25, 0.5, 1, 2.25 in turn": (turns, "each"),
    }
    return {name: share(times, passes, where, message=message) for name, (times, where) in rows.items()}


def production() -> dict[str, dict[str, dict[str, float]]]:
    """By whose the delays are and what splitting costs, and by the number of micro-batches."""
    times = np.array(RecordedSteps.load(TRACES / "sequences.csv").seconds)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for owner, cost in itertools.product(("rank", "samples"), (0.0, 0.005, 0.01, 0.02)):
        for passes in (4, 8, 16, 32):
            planned = times if owner == "rank" else np.repeat(times[:, :, None] / passes, passes, axis=2)
            figures = share(planned, passes, split=cost * times.mean())
            found.setdefault(f"the {owner}, {cost:.1%}", {})[str(passes)] = figures
    return found


def sharing() -> dict[str, Any]:
    columns = {f"K = {passes}": models(passes) for passes in (2, 4, 8)}
    columns[f"K = 4, {1e3 * MESSAGE:.0f} ms of messages"] = models(4, MESSAGE)
    harness.print_table(
        "Full over work sharing",
        ["delays", *columns],
        [[name, *(shown(figures[name]) for figures in columns.values())] for name in columns["K = 2"]],
    )
    rows = production()
    harness.print_table(
        "Full over work sharing, a production job whose sequences differ in length",
        ["delays of, cost of splitting", *(f"K = {passes}" for passes in next(iter(rows.values())))],
        [[name, *map(shown, row.values())] for name, row in rows.items()],
    )
    return {"models": columns, "production": rows}


# --- Steps of production jobs ----------------------------------------------------------------------------------------

JOBS = {  # file, whether its steps are drawn at random, size of groups
    "sequences, in order": ("sequences.csv", False, 4),
    "sequences, steps at random": ("sequences.csv", True, 4),
    "one rank slowed": ("one_worker_slowed.csv", False, 2),
}
REPEATED = 10  # times that a job takes its steps


def jobs() -> dict[str, Any]:
    """For each job and policy: how many times as fast as `Full` it is, and the share of late gradients."""
    figures: dict[str, Any] = {}
    trace = Trace.load(TRACE).scaled(1.0)
    for name, (file, resampled, group) in JOBS.items():
        of_models = (f"group_average:{group}", f"partial_reduce:{group}")
        steps = RecordedSteps.load(TRACES / file, resampled=resampled)
        results = {
            policy: simulate(
                trace,
                policy,
                len(steps.seconds[0]),
                cluster=PAPER,
                rule="threshold",
                iterations=REPEATED * len(steps.seconds),
                delays=steps,
                passes=4,
            )
            for policy in ("full", "quorum:0.75", "majority", "solo", *of_models, "work_sharing")
        }
        full = results["full"].iteration_time
        figures[name] = {
            policy.partition(":")[0]: {"full_over_this": full / result.iteration_time, "late": result.late}
            for policy, result in results.items()
        }
    harness.print_table(
        "Full over each policy (late gradients)",
        ["job", *figures["one rank slowed"]],
        [
            [name, *(f"{one['full_over_this']:.2f} ({one['late']:.0%})" for one in row.values())]
            for name, row in figures.items()
        ],
    )
    return figures


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    sections = ["reality", "speed", "scale", "sharing", "jobs"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--steps", type=int, default=60, help="of each run, against reality")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each policy, against reality")
    options = parser.parse_args()
    figures: dict[str, Any] = {"transport": options.transport, "steps": options.steps, "repeats": options.repeats}
    if "reality" in options.sections:
        figures["reality"] = reality(options.ranks, options.transport, options.steps, options.repeats)
    if "speed" in options.sections:
        figures["speed"] = speed()
    if "scale" in options.sections:
        figures["scale"] = scale()
    if "sharing" in options.sections:
        figures["sharing"] = sharing()
    if "jobs" in options.sections:
        figures["jobs"] = jobs()
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
