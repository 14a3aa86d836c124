"""Predicts how fast a recorded job would be under each policy, by running its compute times through the simulator."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.recording import JobSteps
from horovod_partial.insight.simulate import Cluster, Gradient, Result, Trace, simulate
from horovod_partial.merging import MessageCost

Floats = NDArray[np.float64]

# Predictions resample a job's steps. To take only seconds, all resamples together have this many micro-batches at most.
_MOST_SIMULATED = 5_000_000
_MOST_SHARED = 300_000  # to save time, work sharing is simulated for the first steps, up to this many micro-batches
_MOST_RESAMPLES = 50
_LEAST_RESAMPLES = 20  # with fewer resamples, no bounds of the predicted steps per second are computed
PASSES = (2, 4, 8, 16)  # the numbers of micro-batches per step and rank for which work sharing is predicted
_LEAST_BLOCKS = 10  # a resample of a job's steps consists of at least this many blocks of successive steps
_HALVINGS = 10  # the number of bisections by which `price_of_a_split` finds its result
_CYCLE = 1e-3  # Horovod's default cycle time, in seconds


@dataclass(frozen=True)
class Prediction:
    """The prediction for a job under one policy.

    `policy` is the policy's text, for `HOROVOD_PARTIAL_SYNC`. With `work_sharing`, `passes` is the number of
    micro-batches of a step for each rank (`backward_passes_per_step`); otherwise 1. `rate` is how many steps a rank
    takes in a second, on average. `interval` contains the middle 95 % of the rates of resampled steps; NaN if the job
    is too large for enough resamples. `late` is the share of late contributions, 0 to 1. `staleness` is the mean over
    contributions. `staleness_95` is the 95th percentile over contributions with a staleness above 0, or 0.
    """

    policy: str
    passes: int
    rate: float
    interval: tuple[float, float]
    late: float
    staleness: float
    staleness_95: float

    def __str__(self) -> str:
        """Return the policy's text, and the number of micro-batches if there are several."""
        return f"{self.policy}, K = {self.passes}" if self.passes > 1 else self.policy


def gradient_policies(ranks: int) -> dict[str, int]:
    """Return gradient policies, each with its quorum (how many ranks a round waits for), the largest quorum first."""
    quorums = {f"quorum:{share}": math.ceil(share * ranks) for share in (0.875, 0.75, 0.25)}
    named = {"full": ranks, "majority": math.ceil(ranks / 2), "solo": 1, **quorums}
    # With few ranks, several policies may have the same quorum. Of these, keep only the first in `named`.
    first = {quorum: name for name, quorum in reversed(named.items())}
    return {first[quorum]: quorum for quorum in sorted(first, reverse=True)}


def model_policies(ranks: int) -> list[str]:
    """Return the texts of policies that average models, with group sizes that fit the number of ranks."""
    sized = max(2, 2 ** int(math.log2(ranks) / 2))
    fits = ["group_average"] if ranks % sized == 0 else []
    return [*fits, f"partial_reduce:{max(2, ranks // 2)}", "weighted_average:8,0.999"] if ranks > 2 else []


def seconds_behind_the_last(steps: JobSteps) -> float:
    """Return the seconds from the last gradient for which a round waits to the round's result; the median over steps.

    In each step this is the shortest time, among the ranks on time, from a rank's last gradient to the result. The rank
    with this time came last, so it waited for no other rank.
    """
    waited = np.column_stack([rank.result - rank.handed for rank in steps.ranks])
    late = np.column_stack([rank.late for rank in steps.ranks])
    least = np.where(late, np.inf, waited).min(axis=1)
    found = least[np.isfinite(least)]
    return float(np.median(found)) if len(found) else 0.0


def predict(
    compute: Floats,
    reduction: float,
    policies: Collection[str],
    *,
    passes: int = 1,
    split: float = 0.0,
    of_samples: bool = False,
) -> list[Prediction]:
    """Predict how fast a job would be under each policy, by running its compute times through the simulator.

    The whole time of a reduction counts as time to move bytes. A group of k of P ranks takes (k - 1) P / (k (P - 1)) of
    this time, same as in a ring. Intervals come from blocks of steps that are drawn with replacement. All ranks and
    policies have the same blocks.

    `compute` has seconds above 0, of the shape (steps, ranks). `reduction` is the seconds from the last gradient to the
    result among all ranks. A step has `passes` micro-batches for each rank. If `passes` is above 1, a micro-batch takes
    `split` seconds longer than 1 / `passes` of the step's compute time. With `of_samples`, a micro-batch takes the same
    time on every rank, because its samples decide how long it takes. Otherwise a rank that is slow in a step is slow
    for all its micro-batches.
    """
    if passes > 1:
        compute = _first_steps(compute, passes)
    steps, ranks = compute.shape
    most = _MOST_RESAMPLES if passes == 1 else _LEAST_RESAMPLES  # fewer resamples: simulating micro-batches is slow
    resamples = min(most, _MOST_SIMULATED // max(1, steps * ranks * passes * len(policies)))
    drawn = _blocks(steps, resamples if resamples >= _LEAST_RESAMPLES else 0)
    predictions = []
    for policy in policies:
        run = partial(_run, reduction=reduction, policy=policy, passes=passes, split=split, of_samples=of_samples)
        result = run(compute)
        rates = [1 / run(compute[rows]).iteration_time for rows in drawn]
        rate = 1 / result.iteration_time
        low, high = np.quantile(rates, [0.025, 0.975]).tolist() if rates else (math.nan, math.nan)
        missed = {rounds: count for rounds, count in result.staleness_histogram.items() if rounds > 0}
        values = np.repeat(list(missed), list(missed.values()))
        of_stale = float(np.quantile(values, 0.95, method="higher")) if len(values) else 0.0
        predictions.append(Prediction(policy, passes, rate, (low, high), result.late, result.staleness, of_stale))
    return predictions


def price_of_a_split(compute: Floats, reduction: float, shared: Prediction, rate: float, *, of_samples: bool) -> float:
    """Return how many seconds longer than its part of the step's compute time a micro-batch may take.

    If each micro-batch takes this much longer, the job makes `rate` steps per second under work sharing. `shared` is
    the prediction for `work_sharing`, whose rate is above `rate`. The other arguments are those of `predict`.
    """
    compute = _first_steps(compute, shared.passes)
    low, high = 0.0, 1 / (rate * shared.passes)  # `high` is the whole time of a micro-batch, at `rate` steps per second
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        result = _run(compute, reduction, shared.policy, passes=shared.passes, of_samples=of_samples, split=middle)
        low, high = (middle, high) if 1 / result.iteration_time > rate else (low, middle)
    return low


def _run(compute: Floats, reduction: float, policy: str, *, passes: int, split: float, of_samples: bool) -> Result:
    ranks = compute.shape[1]
    least = float(compute.min())
    trace = Trace("recorded", least, (Gradient("all", 1, 0.0),))
    # A measured reduction includes a wait of half a cycle of Horovod, on average. The simulator adds this wait itself.
    cost = max(reduction - _CYCLE / 2, 0.0)
    delays = compute - least
    if of_samples:
        delays = np.repeat(delays[:, :, None] / passes, passes, axis=2)
    cluster = Cluster.fit_ring(MessageCost(0.0, cost), ranks) if ranks > 1 else Cluster(0.0, 0.0)
    return simulate(
        trace,
        policy,
        ranks,
        cluster=cluster,
        rule="single",
        iterations=len(compute),
        delays=delays,
        cycle=_CYCLE,
        passes=passes,
        split=split,
    )


def _first_steps(compute: Floats, passes: int) -> Floats:
    """Return the compute times of as many first steps as predictions of work sharing simulate."""
    return compute[: max(_LEAST_BLOCKS, _MOST_SHARED // (compute.shape[1] * passes))]


def _blocks(steps: int, resamples: int) -> list[NDArray[np.int64]]:
    """Draw the steps of each resample, as row numbers. Blocks of successive steps keep bursts of slow steps whole."""
    length = max(1, steps // _LEAST_BLOCKS)
    count = math.ceil(steps / length)
    generator = np.random.default_rng(0)
    begins = generator.integers(0, steps - length + 1, (resamples, count))
    return [(begin[:, None] + np.arange(length)).ravel()[:steps] for begin in begins]
