"""eager-SGD's Fig. 9: the latency of an allreduce where each rank comes later than the one before."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from typing import Any, Literal

import harness
import latency
import numpy as np
import rivals
import torch
from experiment import Job, Outcome, Plot, Row

import horovod_partial.torch as hvd
from horovod_partial.insight.simulate import Trace, simulate

SIZES = (64, 512, 4_096, 32_768, 262_144, 4_194_304)  # bytes
PAPER_MS = {"full": ("~15.5", "~22"), "random": ("~5.3", "~11"), "solo": ("~0.25", "~1.5")}  # smallest, largest size
PAPER_ACTIVE = {"solo": ("~1 of 32", ""), "random": ("16 of 32", "~8 of 32")}
PAPER_OVER = {"solo": "53.32", "random": "2.46"}
LABELS = {"full": "Full", "solo": "Solo", "random": "Majority(random), the paper's", "majority": "Majority, ours"}
PAPER_RANKS, PAPER_ROUNDS, PAPER_SKEW = 32, 64, 1e-3
SETTLING = 2  # rounds, the first of which waits for all ranks
BEFORE_SKEW = 0.01  # seconds that a simulated step computes
CYCLE = 1e-3  # seconds, Horovod's default


def measure(sizes: list[int], rounds: int) -> dict[str, Any]:
    """On every rank: by policy, mean milliseconds by size, and how many ranks were on time in each round."""
    delays = harness.LinearSkew(hvd.size(), latency.SKEW_SECONDS)
    milliseconds: dict[str, dict[str, float]] = {name: {} for name in latency.SKEWED}
    active: dict[str, Counter[int]] = {name: Counter() for name in latency.SKEWED}
    for index, size in enumerate(sizes):
        harness.progress("latency under skew", index, len(sizes))
        turn = partial(latency.turn_under_skew, f"fig9.{size}", torch.ones(size // 4), delays)
        for number in range(SETTLING):
            turn(number)
        before = hvd.partial_stats()
        turns = [turn(number) for number in range(rounds)]
        after = hvd.partial_stats()
        for name, seconds in latency.means_of_turns(turns, f"fig9.{size}.seconds").items():
            bucket = f"fig9.{size}.{name}"
            milliseconds[name][str(size)] = 1e3 * seconds
            if bucket in after:  # Full has no rounds
                active[name].update(after[bucket]["fresh_histogram"])
                active[name].subtract(before[bucket]["fresh_histogram"])
    return {"milliseconds": milliseconds, "active": {name: list(counts.elements()) for name, counts in active.items()}}


def simulated(sizes: list[int], ranks: int, skew: float) -> dict[str, dict[str, float]]:
    """Mean milliseconds by policy and size, when every rank comes `skew` seconds later than the one before.

    In a job's first round all ranks wait for each other, and so begin its second together: that one is looked at. The
    rank that is drawn for it is always the same; so each rank is the first to come in one of the runs, and each run
    meets Horovod's cycle of a millisecond at another moment. The software itself takes no time, which leaves next to
    nothing of Solo's.
    """
    result: dict[str, dict[str, float]] = {}
    for name in latency.SKEWED:
        policy = "majority:random" if name == "random" else name
        result[name] = {}
        for size in sizes:
            means = []
            for first in range(ranks):
                trace = Trace.even(1, size, BEFORE_SKEW + CYCLE * first / ranks, 0.0)
                delays = np.stack([np.zeros(ranks), np.roll(np.arange(ranks) * skew, first)])
                job = simulate(
                    trace,
                    policy,
                    ranks,
                    cluster=rivals.PIZ_DAINT,
                    algorithm=rivals.ALGORITHM,
                    iterations=2,
                    delays=delays,
                    cycle=CYCLE,
                )
                means.append((job.ends[1] - job.ends[0] - trace.compute - delays[1]).mean())
            result[name][str(size)] = 1e3 * float(np.mean(means))
    return result


def run(job: Job) -> Outcome:
    """Measured with 8 ranks and 5 ms of skew, simulated with the paper's 32 ranks and 1 ms."""
    ranks = job.choose(8, 2)
    sizes = list(job.choose(SIZES, (SIZES[0], SIZES[-1])))
    measured = harness.launch(
        measure, ranks=ranks, transport=job.transport, sizes=sizes, rounds=job.choose(PAPER_ROUNDS, 3)
    )
    milliseconds: dict[Literal["measured", "simulated"], dict[str, dict[str, float]]] = {
        "measured": measured["milliseconds"],
        "simulated": simulated(sizes, job.choose(PAPER_RANKS, 8), PAPER_SKEW),
    }
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    for how, by_policy in milliseconds.items():
        for name, label in LABELS.items():
            times = by_policy[name]
            paper = PAPER_MS.get(name, ("", "")) if how == "simulated" else ("", "")
            for size, printed in zip((sizes[0], sizes[-1]), paper, strict=True):
                rows.append(Row(f"{label}: ms for {size:,} B", printed, times[str(size)], how))
        ratios[how] = {
            name: statistics.fmean(by_policy["full"][str(size)] / by_policy[name][str(size)] for size in sizes)
            for name in LABELS
            if name != "full"
        }
        for name, ratio in ratios[how].items():
            rows.append(Row(f"Full's latency over that of {LABELS[name]}", PAPER_OVER.get(name, ""), ratio, how))
    for name, label in LABELS.items():
        if active := measured["active"][name]:
            paper = PAPER_ACTIVE.get(name, ("", ""))
            rows.append(Row(f"{label}: active ranks of {ranks}, mean", paper[0], statistics.fmean(active), "measured"))
            rows.append(Row(f"{label}: active ranks, deviation", paper[1], statistics.pstdev(active), "measured"))
    series = {
        f"{LABELS[name]}, {how}": ([float(size) for size in sizes], [by_policy[name][str(size)] for size in sizes])
        for how, by_policy in milliseconds.items()
        for name in LABELS
    }
    solo, majority = ratios["measured"]["solo"], ratios["measured"]["random"]
    simulated_solo, simulated_majority = ratios["simulated"]["solo"], ratios["simulated"]["random"]
    verdict = (
        f"With {ranks} ranks 5 ms apart Solo cuts the mean latency by {solo:.1f} and the paper's majority by "
        f"{majority:.2f}; on a network that costs nothing the latter is 3P / (P + 1), {3 * ranks / (ranks + 1):.2f} "
        f"here and {3 * PAPER_RANKS / (PAPER_RANKS + 1):.2f} with {PAPER_RANKS} ranks, where the paper has 2.46 and "
        f"the simulation {simulated_majority:.2f}. Solo's ratio is the skew over what the software costs, which the "
        f"simulation has not ({simulated_solo:.0f}): it tells of scale and machine, and less of the method."
    )
    plot = Plot("bytes", "mean latency in ms", series, log_x=True, log_y=True)
    return Outcome(rows, plot, verdict, {"milliseconds": milliseconds, "active ranks": measured["active"]})
