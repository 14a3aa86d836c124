"""P-Reduce in simulated time: speed-ups by kind of heterogeneity, how groups mix, and what rounds one at a time cost.

The groups are those of the real coordinator, through `horovod_partial.insight.simulate`, where nothing else is said. There, as in
a process set of Horovod's, groups that form while a round runs wait for its end. `independent` is a model of groups that
do not: in the order in which ranks come, each `size` of them begin to reduce at once, and are ready again after that and
their next step. It knows no windows, so that equally fast ranks may stay in cliques.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from experiment import Job, Outcome, Plot, Row
from numpy.typing import NDArray

from horovod_partial.insight.simulate import Cluster, Result, Trace, simulate
from horovod_partial.policies import PartialReduce, Policy

Floats = NDArray[np.float64]

RANKS = 16
BYTES = 1_000_000  # of a model; only its time matters
NO_COMPUTE = Trace.even(1, BYTES, 0.0, 1e-9)  # steps are delays


def coordinated(policy: Policy | str, times: Floats, cluster: Cluster) -> Result:
    """A job whose steps take `times`, of the shape (steps, ranks)."""
    steps, ranks = times.shape
    return simulate(NO_COMPUTE, policy, ranks, cluster=cluster, iterations=steps, delays=times, cycle=0.0)


def independent(times: Floats, size: int, communication: float) -> tuple[Floats, list[list[int]]]:
    """As `coordinated`, with groups that wait for no other: when each step of each rank ended, and the groups.

    Where fewer than `size` ranks are left, they reduce together.
    """
    steps, ranks = times.shape
    ends = np.zeros_like(times)
    groups: list[list[int]] = []
    taken = [0] * ranks
    ready: list[int] = []
    training = ranks
    comes = [(float(times[0, rank]), rank) for rank in range(ranks)]
    heapq.heapify(comes)
    while comes:
        now, rank = heapq.heappop(comes)
        ready.append(rank)
        if len(ready) < min(size, training):
            continue
        groups.append(ready)
        for member in ready:
            ends[taken[member], member] = now + communication
            taken[member] += 1
            if taken[member] == steps:
                training -= 1
            else:
                heapq.heappush(comes, (now + communication + float(times[taken[member], member]), member))
        ready = []
    return ends, groups


def groups_of(ends: Floats) -> list[list[int]]:
    """The groups of a job, in their order: those end a step at the same moment; the first round is of all ranks.

    The end is left out, where some ranks have no more steps.
    """
    whole = ends[-1].min()
    moments = np.unique(ends[ends < whole])[1:]
    return [np.flatnonzero((ends == moment).any(axis=0)).tolist() for moment in moments]


def throughput(ends: Floats) -> float:
    """Steps of all ranks by time, while all of them train."""
    whole = float(ends[-1].min())
    return int((ends <= whole).sum()) / whole


def log_normal(variation: float, steps: int, ranks: int, seed: int) -> Floats:
    """Step times with a mean of 1 and that coefficient of variation."""
    sigma = math.sqrt(math.log(1 + variation**2))
    return np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, (steps, ranks))


# --- Speed-up --------------------------------------------------------------------------------------------------------

SIZES = (2, 4, 8)
COMMUNICATION = 0.1  # of a step, among all ranks; a group moves 2 (P - 1) / P of the model, as a ring does
SLOW = (1.0, 1.5, 2.0, 3.0, 4.0)
JITTER = 0.25  # coefficient of variation of every rank's steps


def slower(factors: Iterable[float], steps: int) -> Floats:
    """Step times of ranks that are that many times as slow as they could be."""
    each = np.array(list(factors))
    return log_normal(JITTER, steps, len(each), 0) * each


def speedups(times: Floats) -> dict[int, float]:
    """By size of the groups: the throughput of P-Reduce over that of a reduction over all ranks."""
    ranks = times.shape[1]
    cluster = Cluster(0.0, COMMUNICATION * ranks / (2 * (ranks - 1)) / BYTES)
    full = throughput(coordinated("full", times, cluster).ends)
    return {size: throughput(coordinated(PartialReduce(size), times, cluster).ends) / full for size in SIZES}


def heterogeneity(job: Job) -> Outcome:
    """Throughput over that of all-reduce, for kinds of heterogeneity that the abstract names."""
    steps = job.choose(300, 30)
    kinds = {f"one rank of {RANKS} takes {slow:g} times as long": [slow] + [1.0] * (RANKS - 1) for slow in SLOW}
    kinds["half of the ranks share their device, and take twice as long"] = [2.0, 1.0] * (RANKS // 2)
    kinds["two kinds of machines, a quarter takes 1.5 times as long"] = [1.5, 1.0, 1.0, 1.0] * (RANKS // 4)
    measured = {kind: speedups(slower(factors, steps)) for kind, factors in kinds.items()}
    measured["steps vary as those of UCF101, coefficient 0.57"] = speedups(log_normal(0.57, steps, RANKS, 0))
    rows = [
        Row(f"{kind}: groups of {size}", "", ratio, "simulated")
        for kind, ratios in measured.items()
        for size, ratio in ratios.items()
    ]
    of_one = [measured[kind] for kind in list(kinds)[: len(SLOW)]]
    plot = Plot(
        "times as long that one rank takes",
        "steps a second, over all-reduce's",
        {f"groups of {size}": (list(SLOW), [ratios[size] for ratios in of_one]) for size in SIZES},
    )
    every = [ratio for ratios in measured.values() for ratio in ratios.values()]
    within = sum(1.21 <= ratio <= 2 for ratio in every)
    return Outcome(
        rows,
        plot,
        f"{within} of {len(every)} figures lie within the abstract's 1.21 to 2, {sum(ratio > 2 for ratio in every)} above and "
        f"{sum(ratio < 1.21 for ratio in every)} below. They are throughputs; the abstract's are times of a training, whose "
        "settings could not be had.",
    )


# --- Mixing ----------------------------------------------------------------------------------------------------------

FREE = Cluster(0.0, 0.0)


def mixing(groups: Sequence[Sequence[int]], ranks: int) -> float:
    """rho: the second largest eigenvalue, by modulus, of the mean matrix by which a group mixes the models."""
    mean = np.zeros((ranks, ranks))
    for group in groups:
        matrix = np.eye(ranks)
        matrix[np.ix_(group, group)] = 1 / len(group)
        mean += matrix / len(groups)
    return float(sorted(abs(np.linalg.eigvals(mean)))[-2])


def rho(job: Job) -> Outcome:
    """The two examples of three workers, and other numbers of ranks, with the groups that the coordinator forms."""
    steps = job.choose(4000, 400)
    generator = np.random.default_rng(0)
    # Exponential steps forget how long they have lasted, so that any rank may be the next.
    equal = generator.exponential(size=(steps, 3))
    # The third misses every other pair, as in the example, and comes just before one of the others, either of them.
    in_turn = np.column_stack([generator.uniform(1.1, 1.2, (steps, 2)), np.full(steps, 1.999)])
    half = np.column_stack([log_normal(JITTER, steps, 2, 0), 2 * log_normal(JITTER, steps, 1, 1)])
    rows = []
    for name, paper, times in (
        ("equal speeds", "0.5", equal),
        ("one in every other pair", "0.625", in_turn),
        ("one takes twice as long, all vary", "0.625", half),
    ):
        found = mixing(groups_of(coordinated(PartialReduce(2), times, FREE).ends), 3)
        rows.append(Row(f"rho of three workers in groups of 2, {name}", paper, found, "simulated"))
    ranks = (8, 16, 32)
    by_size: dict[int, list[float]] = {2: [], 3: [], 4: []}
    for count in ranks:
        times = generator.exponential(size=(job.choose(500, 50), count))
        for size, values in by_size.items():
            values.append(mixing(groups_of(coordinated(PartialReduce(size), times, FREE).ends), count))
            rows.append(Row(f"rho of {count} ranks in groups of {size}, equal speeds", "", values[-1], "simulated"))
    off = [abs(row.ours - float(row.paper)) for row in rows[:3]]
    return Outcome(
        rows,
        Plot("ranks", "rho", {f"groups of {size}": (list(ranks), values) for size, values in by_size.items()}),
        f"The two examples are off by {off[0]:.3f} and {off[1]:.3f}, the second with step times that give its groups; with a "
        f"rank of half the speed and steps that vary it is off by {off[2]:.3f}. Groups are random there; here a window of the "
        "last groups must connect all ranks.",
    )


# --- Cliques ---------------------------------------------------------------------------------------------------------


def spreads(groups: Iterable[Sequence[int]], ranks: int) -> list[float]:
    """The largest difference of two models, which begin as the ranks' numbers, after each group has averaged."""
    models = np.arange(ranks, dtype=np.float64)
    found = []
    for group in groups:
        members = list(group)
        models[members] = models[members].mean()
        found.append(float(np.ptp(models)))
    return found


def isolation(job: Job) -> Outcome:
    """Four ranks of the same speed, two of which begin half a step later: first come, first served makes two cliques."""
    steps = job.choose(200, 40)
    times = 1 + 0.01 * np.random.default_rng(0).random((steps, 4))
    times[0] += [0.0, 0.0, 0.5, 0.5]
    apart = np.concatenate([times[:1], times])  # the coordinator's first round is of all ranks
    _, alone = independent(times, 2, 0.0)
    by_rule = groups_of(coordinated(PartialReduce(2), apart, FREE).ends)
    shown = min(len(alone), len(by_rule), 40)
    series = {"first come, first served": spreads(alone[:shown], 4), "with a window": spreads(by_rule[:shown], 4)}
    rows = [
        Row("pairs that ever met of 6, first come, first served", "", _pairs(alone), "computed"),
        Row("pairs that ever met of 6, with a window of 8 groups", "", _pairs(by_rule), "simulated"),
        Row(
            f"difference of two models after {shown} groups, first served",
            "",
            series["first come, first served"][-1],
            "computed",
        ),
        Row(
            f"difference of two models after {shown} groups, with a window",
            "",
            series["with a window"][-1],
            "simulated",
        ),
    ]
    numbers = [float(number) for number in range(1, shown + 1)]
    return Outcome(
        rows,
        Plot("groups so far", "largest difference of two models", {name: (numbers, ys) for name, ys in series.items()}),
        "The abstract names a mechanism against update isolation without its rules; the window is this project's.",
    )


def _pairs(groups: Iterable[Sequence[int]]) -> int:
    return len({tuple(sorted(group)) for group in groups})


# --- Rounds one at a time ---------------------------------------------------------------------------------------------

SHARES = (0.1, 0.5, 1.0)  # of a step, that a group's reduction takes
GROUPS = (2, 3, 4, 8)
VARIATION = 0.25


def independence(job: Job) -> Outcome:
    """By how much longer a step takes where a group waits for the round that runs, than where groups are independent."""
    steps, seeds = job.choose(2000, 100), job.choose(3, 1)
    costs: dict[int, list[float]] = {size: [] for size in GROUPS}
    rows = []
    for size in GROUPS:
        for share in SHARES:
            cluster = Cluster(share / (2 * (size - 1)), 0.0)
            ratios = []
            for seed in range(seeds):
                times = log_normal(VARIATION, steps, RANKS, seed)
                ends, _ = independent(times, size, share)
                in_rounds = coordinated(PartialReduce(size), times, cluster).ends
                ratios.append(float(in_rounds[-1].mean() / ends[-1].mean()))
            costs[size].append(100 * (statistics.fmean(ratios) - 1))
            quantity = f"groups of {size}, communication {share:g} of a step: % longer than with independent groups"
            rows.append(Row(quantity, "", costs[size][-1], "simulated"))
    plot = Plot(
        "communication, in steps", "% longer", {f"groups of {size}": (list(SHARES), ys) for size, ys in costs.items()}
    )
    of_few = [[costs[size][index] for size in GROUPS[:-1]] for index in range(len(SHARES))]
    told = ", ".join(
        f"{min(few):.0f} to {max(few):.0f} % at communication of {share:g} of a step"
        for few, share in zip(of_few, SHARES, strict=True)
    )
    return Outcome(
        rows,
        plot,
        f"In one process set groups of {GROUPS[0]} to {GROUPS[-2]} lose {told}; groups of {GROUPS[-1]}, half of the ranks, at "
        f"most {max(costs[GROUPS[-1]]):.0f} %. Worse than the paper's groups, which wait for no other.",
    )
