"""What recorded compute times would come to under each policy."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_partial.fusion import MessageCost
from horovod_partial.recording import JobSteps
from horovod_partial.simulate import Cluster, Gradient, Result, Trace, simulate

Floats = NDArray[np.float64]

# So many simulated steps of all ranks, over all policies and resamples, take some seconds.
_MOST_SIMULATED = 5_000_000
_MOST_RESAMPLES = 50
_LEAST_RESAMPLES = 20  # that make an interval
_LEAST_BLOCKS = 10
_CYCLE = 1e-3  # Horovod's


@dataclass(frozen=True)
class Prediction:
    """A job under one policy.

    Attributes:
        policy: as `HOROVOD_PARTIAL_SYNC` takes it.
        rate: steps in a second, of each rank, mean over the ranks.
        interval: 95 % of the rates of resampled steps; NaN where the job is too large to take enough of them.
        late: share of the contributions that come too late for their round, 0 to 1.
        staleness: rounds that a rank had missed before a contribution, mean over contributions.
        staleness_95: of contributions that had missed any, the 95th percentile; 0 if there are none.
    """

    policy: str
    rate: float
    interval: tuple[float, float]
    late: float
    staleness: float
    staleness_95: float


def gradient_policies(ranks: int) -> dict[str, int]:
    """Policies for every job of gradients, each with its quorum: from the one that waits for all to the one that waits for nobody."""
    quorums = {f"quorum:{share}": math.ceil(share * ranks) for share in (0.875, 0.75, 0.25)}
    named = {"full": ranks, "majority": math.ceil(ranks / 2), "solo": 1, **quorums}
    first = {quorum: name for name, quorum in reversed(named.items())}  # of several that are one the first
    return {first[quorum]: quorum for quorum in sorted(first, reverse=True)}


def model_policies(ranks: int) -> list[str]:
    """Those of models, which change what is trained and not only when, with sizes that fit."""
    sized = max(2, 2 ** int(math.log2(ranks) / 2))
    fits = ["group_average"] if ranks % sized == 0 else []
    return [*fits, f"partial_reduce:{max(2, ranks // 2)}", "weighted_average:8,0.999"] if ranks > 2 else []


def seconds_behind_the_last(steps: JobSteps) -> float:
    """From the last gradient that a round needs to its result: the median over the steps, in seconds.

    That is what the rank of a step had to wait which waited least, among those that were on time: nobody else was missing
    when it came.
    """
    waited = np.column_stack([rank.wait + rank.reduce for rank in steps.ranks])
    late = np.column_stack([rank.late for rank in steps.ranks])
    least = np.where(late, np.inf, waited).min(axis=1)
    found = least[np.isfinite(least)]
    return float(np.median(found)) if len(found) else 0.0


def predict(compute: Floats, reduction: float, policies: Collection[str], seed: int = 0) -> list[Prediction]:
    """Run compute times through the simulator.

    The cost of a reduction counts as one of bytes: a group of k of P ranks takes (k - 1) P / (k (P - 1)) of it, as a ring does.
    Intervals are from blocks of steps that are drawn with replacement, the same ones for all ranks and policies.

    Args:
        compute: seconds, of the shape (steps, ranks), more than 0.
        reduction: seconds from the last gradient to the result, among all ranks.
        policies: as `HOROVOD_PARTIAL_SYNC` takes them.
        seed: of the blocks.
    """
    steps, ranks = compute.shape
    resamples = min(_MOST_RESAMPLES, _MOST_SIMULATED // max(1, steps * ranks * len(policies)))
    drawn = _blocks(steps, resamples, seed)
    predictions = []
    for policy in policies:
        result = _run(compute, reduction, policy)
        rates = [1 / _run(compute[rows], reduction, policy).iteration_time for rows in drawn]
        rate = 1 / result.iteration_time
        low, high = (
            np.quantile(rates, [0.025, 0.975]).tolist() if len(rates) >= _LEAST_RESAMPLES else (math.nan, math.nan)
        )
        predictions.append(
            Prediction(
                policy, rate, (low, high), result.late, result.staleness, _percentile(result.staleness_histogram)
            )
        )
    return predictions


def _run(compute: Floats, reduction: float, policy: str) -> Result:
    ranks = compute.shape[1]
    least = float(compute.min())
    trace = Trace("recorded", least, (Gradient("all", 1, 0.0),))
    # Half a cycle passes until a round closes, and was measured with the reduction.
    cost = max(reduction - _CYCLE / 2, 0.0)
    cluster = Cluster.fit_ring(MessageCost(0.0, cost), ranks) if ranks > 1 else Cluster(0.0, 0.0)
    return simulate(
        trace,
        policy,
        ranks,
        cluster=cluster,
        rule="single",
        iterations=len(compute),
        delays=compute - least,
        cycle=_CYCLE,
    )


def _blocks(steps: int, resamples: int, seed: int) -> list[NDArray[np.int64]]:
    """Rows of each resample: blocks long enough for bursts to stay whole."""
    length = max(1, steps // _LEAST_BLOCKS)
    count = math.ceil(steps / length)
    generator = np.random.default_rng(seed)
    begins = generator.integers(0, steps - length + 1, (resamples, count))
    return [(begin[:, None] + np.arange(length)).ravel()[:steps] for begin in begins]


def _percentile(histogram: dict[int, int]) -> float:
    missed = {rounds: count for rounds, count in histogram.items() if rounds > 0}
    values = np.repeat(list(missed), list(missed.values()))
    return float(np.quantile(values, 0.95, method="higher")) if len(values) else 0.0
