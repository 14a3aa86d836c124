"""Predicts how long a recorded job would take under each policy, by running its compute times through the simulator."""

from __future__ import annotations

import math
from collections import Counter
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
_A_MEETING = 1000  # a step before which all ranks meet makes a simulation as much longer as this many micro-batches
_MOST_SHARED = 300_000  # to save time, work sharing is simulated for the first steps, up to this many micro-batches
_MOST_RESAMPLES = 50
_LEAST_RESAMPLES = 20  # with fewer resamples, no bounds of the predicted time are computed
PASSES = (2, 4, 8, 16)  # the numbers of micro-batches per step and rank for which work sharing is predicted
_LEAST_BLOCKS = 10  # a resample of a job's steps consists of at least this many blocks of successive steps
_HALVINGS = 10  # the number of bisections by which `price_of_a_split` finds its result
_CYCLE = 1e-3  # Horovod's default cycle time, in seconds


@dataclass(frozen=True)
class Prediction:
    """The prediction for a job under one policy.

    `policy` is the policy's text, for `HOROVOD_PARTIAL_SYNC`. With `work_sharing`, `passes` is the number of
    micro-batches of a step for each rank (`backward_passes_per_step`); otherwise 1. `batches` says how other batches
    than the recorded ones were shared out; empty for the recorded ones.

    `seconds` is the time until the last rank has taken all of its steps, divided by the number of its steps. `interval`
    contains the middle 95 % of this value for resampled steps; NaN if the job is too large for enough resamples. `rate`
    is how many steps a rank takes in a second, on average over the ranks, while none has ended. If the program counts
    rounds in place of the steps of each rank, `seconds` is 1 / `rate`.

    `late` is the share of late contributions, 0 to 1. `staleness` is the mean over contributions. `staleness_95` is the
    95th percentile over contributions with a staleness above 0, or 0.
    """

    policy: str
    passes: int
    seconds: float
    interval: tuple[float, float]
    rate: float
    late: float
    staleness: float
    staleness_95: float
    batches: str = ""

    def __str__(self) -> str:
        """Return the policy's text, the number of micro-batches if there are several, and how batches are shared."""
        policy = f"{self.policy}, K = {self.passes}" if self.passes > 1 else self.policy
        return f"{policy}, {self.batches}" if self.batches else policy


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
    meets: NDArray[np.bool_] | None = None,
    rounds: bool = False,
) -> list[Prediction]:
    """Predict how long a job would take under each policy, by running its compute times through the simulator.

    The whole time of a reduction counts as time to move bytes. A group of k of P ranks takes (k - 1) P / (k (P - 1)) of
    this time, same as in a ring. Intervals come from blocks of steps that are drawn with replacement. All ranks and
    policies have the same blocks.

    `compute` has seconds above 0, of the shape (steps, ranks). `reduction` is the seconds from the last gradient to the
    result among all ranks. A step has `passes` micro-batches for each rank. If `passes` is above 1, a micro-batch takes
    `split` seconds longer than 1 / `passes` of the step's compute time. With `of_samples`, a micro-batch takes the same
    time on every rank, because its samples decide how long it takes. Otherwise a rank that is slow in a step is slow
    for all its micro-batches.

    `meets`, of the shape (steps,), is True for steps before which all ranks meet under every policy, as in an average
    of a metric; None for no such steps. Each rank takes all steps of `compute`, and the slowest rank comes to its end
    last. If `rounds`, the program counts rounds, and so fast ranks take steps of slow ones.
    """
    if passes > 1:
        compute = _first_steps(compute, passes)
    steps, ranks = compute.shape
    meets = np.zeros(steps, bool) if meets is None else meets[:steps]
    most = _MOST_RESAMPLES if passes == 1 else _LEAST_RESAMPLES  # fewer resamples: simulating micro-batches is slow
    each = steps * ranks * passes + _A_MEETING * np.count_nonzero(meets)
    resamples = min(most, _MOST_SIMULATED // max(1, each * len(policies)))
    drawn = _blocks(steps, resamples if resamples >= _LEAST_RESAMPLES else 0)
    predictions = []
    for policy in policies:
        run = partial(_run, reduction=reduction, policy=policy, passes=passes, split=split, of_samples=of_samples)
        results = [run(stretch) for stretch in _stretches(compute, meets)]
        times = [_seconds([run(one) for one in _stretches(compute[rows], meets[rows])], rounds) for rows in drawn]
        low, high = np.quantile(times, [0.025, 0.975]).tolist() if times else (math.nan, math.nan)
        late = sum(result.late * len(result.ends) for result in results) / steps
        histogram = sum((Counter(result.staleness_histogram) for result in results), Counter())
        staleness = np.repeat(*np.array(list(histogram.items()), dtype=np.int64).reshape(-1, 2).T)
        stale = staleness[staleness > 0]
        of_stale = float(np.quantile(stale, 0.95, method="higher")) if len(stale) else 0.0
        told = late, float(staleness.mean()) if len(staleness) else 0.0, of_stale
        seconds, rate = _seconds(results, rounds), 1 / _seconds(results, rounds=True)
        predictions.append(Prediction(policy, passes, seconds, (low, high), rate, *told))
    return predictions


def price_of_a_split(compute: Floats, reduction: float, shared: Prediction, full: float, *, of_samples: bool) -> float:
    """Return how many seconds longer than its part of the step's compute time a micro-batch may take.

    If each micro-batch takes this much longer, a step takes `full` seconds under work sharing. `shared` is the
    prediction for `work_sharing`, under which a step is shorter. The other arguments are those of `predict`.
    """
    compute = _first_steps(compute, shared.passes)
    low, high = 0.0, full / shared.passes  # `high` is the whole time of a micro-batch, if a step takes `full` seconds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        result = _run(compute, reduction, shared.policy, passes=shared.passes, of_samples=of_samples, split=middle)
        low, high = (middle, high) if result.iteration_time < full else (low, middle)
    return low


def _stretches(compute: Floats, meets: NDArray[np.bool_]) -> list[Floats]:
    """Cut compute times before each step of `meets`."""
    return [stretch for stretch in np.split(compute, np.flatnonzero(meets)) if len(stretch)]


def _seconds(results: list[Result], rounds: bool) -> float:
    """Return the seconds of a step: those of the slowest rank in each stretch, or if `rounds`, by the mean rate."""
    ends = np.array([result.ends[-1] for result in results])
    taken = 1 / (1 / ends).mean(axis=1) if rounds else ends.max(axis=1)
    return float(taken.sum()) / sum(len(result.ends) for result in results)


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
