"""Predicts how long iterations take: simulates jobs on a model of a cluster. The code of real jobs closes rounds.

`simulate` runs a job in simulated time: ranks compute and are delayed, the coordinator closes rounds by a policy, and
a `Cluster` gives the cost of messages. `docs/simulator.md` says what is modelled and what is not.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_partial import _core, documents, merging, policies
from horovod_partial.checks import require
from horovod_partial.merging import MergingPlan, MessageCost
from horovod_partial.policies import FOR_EVER, Full, ModelPolicy, Policy, Quorum, WeightedAverage, WorkSharing


@dataclass(frozen=True)
class Cluster:
    """Links between ranks, and what reductions over them cost (MG-WFBP, IEEE TPDS 2021, section 2.5).

    Times are in seconds, 0 or more. `latency` is the time of an empty message between two ranks, the paper's alpha.
    `seconds_per_byte` is the time that a link takes for a byte, the paper's beta. `reduce_seconds_per_byte` is the time
    to add a byte of one tensor to another, the paper's gamma.
    """

    latency: float
    seconds_per_byte: float
    reduce_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {value}")

    @classmethod
    def fit_ring(cls, cost: MessageCost, ranks: int) -> Cluster:
        """Return a cluster on which an allreduce over a ring of `ranks` ranks has a given cost.

        The time of additions is counted as time of the links. Raises ValueError if `ranks` is below 2.
        """
        if ranks < 2:
            raise ValueError(f"a fit needs 2 ranks or more, not {ranks}")
        return cls(cost.latency / (2 * (ranks - 1)), cost.seconds_per_byte * ranks / (2 * (ranks - 1)))

    def cost(self, algorithm: str, ranks: int) -> MessageCost:
        """Return the cost of an allreduce. Raises ValueError if `algorithm` is not a key of `costs`."""
        costs = self.costs(ranks)
        require(algorithm in costs, "algorithm", f"one of {', '.join(map(repr, costs))}", algorithm)
        return costs[algorithm]

    def costs(self, ranks: int) -> dict[str, MessageCost]:
        """Return the costs of an allreduce among `ranks` ranks, 1 or more, by algorithm. With 1 rank the costs are 0.

        The formulas are those of table 2 in the paper on MG-WFBP (IEEE TPDS 2021), with whole numbers of steps.
        """
        doublings = (ranks - 1).bit_length()  # how often 1 must be doubled to reach at least `ranks`
        latency, link, add = self.latency, self.seconds_per_byte, self.reduce_seconds_per_byte
        share = (ranks - 1) / ranks  # of the message, which each rank sends, and then receives
        return {
            "ring": MessageCost(2 * (ranks - 1) * latency, share * (2 * link + add)),
            "recursive_doubling": MessageCost(doublings * latency, doublings * (link + add)),
            "recursive_halving_doubling": MessageCost(2 * doublings * latency, share * (2 * link + add)),
            "binary_tree": MessageCost(2 * doublings * latency, doublings * (2 * link + add)),
            # Table 2 of the MG-WFBP paper prints a start-up of 2 log N. It omits a factor: the latency of a message.
            "double_binary_trees": MessageCost(2 * doublings * latency, link + add if ranks > 1 else 0.0),
        }


class Delays(Protocol):
    """A model of delays: says by how long which ranks of a simulated job are delayed in which steps."""

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        """Return delays in seconds, of the shape (iterations, ranks).

        `compute` is the time of a step without delay, in seconds. `seed` is the seed of random delays.
        """
        ...


@dataclass(frozen=True)
class RandomRanks:
    """Delays `count` random ranks by `seconds` in each step (eager-SGD, PPoPP'20, section 7.2)."""

    count: int
    seconds: float

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        order = np.random.default_rng(seed).random((iterations, ranks)).argsort(axis=1)
        return np.where(order < self.count, self.seconds, 0.0)


@dataclass(frozen=True)
class Rotating:
    """Delays rank r in step t by `seconds[(r + t) % len(seconds)]`."""

    seconds: tuple[float, ...]

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        place = np.add.outer(np.arange(iterations), np.arange(ranks)) % len(self.seconds)
        return np.asarray(self.seconds, dtype=np.float64)[place]


@dataclass(frozen=True)
class OneSlow:
    """Makes rank 0 take `factor` times as long for each step. `factor` is 1 or more."""

    factor: float

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        delays = np.zeros((iterations, ranks))
        delays[:, 0] = (self.factor - 1) * compute
        return delays


@dataclass(frozen=True)
class LogNormal:
    """Delays every rank in every step by a log-normal time, which exceeds `median` seconds in half of the steps.

    Steps of ResNet-50 on a cloud (eager-SGD, PPoPP'20, figure 4: 399 to 1,892 ms, mean 454, standard deviation 116) take
    about 0.4 s plus such a delay with a median of 0.024 s and a sigma of 1.3.
    """

    median: float
    sigma: float = 1.3

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        return self.median * np.random.default_rng(seed).lognormal(0.0, self.sigma, (iterations, ranks))


@dataclass(frozen=True)
class RecordedSteps:
    """Delays ranks as in recorded steps. The shortest recorded time, of all ranks and steps, counts as without delay.

    `seconds` has a tuple for each step, all of one length: how long each rank computed, above 0. If `resampled`, steps
    are drawn at random, each with all its ranks. Otherwise they come in order, repeatedly.
    """

    seconds: tuple[tuple[float, ...], ...]
    resampled: bool = False

    def __post_init__(self) -> None:
        lengths = {len(step) for step in self.seconds}
        are_times = all(0.0 < time < math.inf for step in self.seconds for time in step)
        if len(lengths) != 1 or lengths == {0} or not are_times:
            raise ValueError("recorded steps are one tuple or more, all as long as there are ranks, of numbers above 0")

    @classmethod
    def load(cls, path: str | PathLike[str], *, resampled: bool = False) -> RecordedSteps:
        """Read a CSV file with the columns `step`, `rank` and `seconds`.

        If a step of a rank has several lines, as with stages of a pipeline, the longest counts. Raises ValueError if
        the file has other columns, a number is wrong, or a rank lacks a step.
        """
        times: dict[int, dict[int, float]] = {}
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                for row in csv.DictReader(file):
                    seconds = float(row["seconds"])
                    if not 0.0 < seconds < math.inf:
                        raise ValueError
                    step = times.setdefault(int(row["step"]), {})
                    step[int(row["rank"])] = max(seconds, step.get(int(row["rank"]), 0.0))
        except (KeyError, TypeError, ValueError, csv.Error):
            raise ValueError(f"{path} must be a CSV file with the columns step, rank and seconds (above 0)") from None
        ranks = max((max(step) + 1 for step in times.values()), default=0)
        if not times or any(len(step) != ranks or min(step) < 0 for step in times.values()):
            raise ValueError(f"{path} must have a line for every rank in every step, with ranks counted from 0")
        rows = (tuple(times[step][rank] for rank in range(ranks)) for step in sorted(times))
        return cls(tuple(rows), resampled)

    def draw(self, iterations: int, ranks: int, compute: float, seed: int) -> NDArray[np.float64]:
        times = np.asarray(self.seconds)
        if ranks > times.shape[1]:
            raise ValueError(
                f"the recorded steps are of {times.shape[1]} ranks, so {ranks} cannot be simulated with them"
            )
        drawn = np.random.default_rng(seed).integers(len(times), size=iterations)
        order = drawn if self.resampled else np.arange(iterations) % len(times)
        return np.asarray((times[order, :ranks] / times.min() - 1.0) * compute)


def parse_delays(text: str) -> Delays | None:
    """Return the delays that a text names; None for `none`.

    Texts are such as `none`, `random:2:0.3`, `rotating:0:0.1:0.4`, `slow:3`, `log-normal:0.02[:1.3]`; and `steps:FILE`
    or `resampled:FILE` for the steps of a recorded job. Raises ValueError if the text names no delays, or the file
    holds no steps, and OSError if the file cannot be read.
    """
    kind, _, path = text.strip().partition(":")
    if kind.lower() in ("steps", "resampled") and path:
        return RecordedSteps.load(path, resampled=kind.lower() == "resampled")
    name, *arguments = text.strip().lower().split(":")
    try:
        numbers = [float(argument) for argument in arguments]
        match name, numbers:
            case "none", []:
                return None
            case "random", [count, seconds] if count.is_integer():
                return RandomRanks(int(count), seconds)
            case "rotating", [_, *_]:
                return Rotating(tuple(numbers))
            case "slow", [factor]:
                return OneSlow(factor)
            case "log-normal", [_] | [_, _]:
                return LogNormal(*numbers)
    except ValueError:
        pass
    raise ValueError(
        f"unknown delays {text!r}; known are none, random:RANKS:SECONDS, rotating:SECONDS:SECONDS..., slow:FACTOR, "
        "log-normal:MEDIAN_SECONDS:SIGMA, steps:FILE and resampled:FILE"
    )


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient in a `Trace`. Backward computes it in `seconds` seconds, after the previous gradient."""

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """The times and sizes of one step of a model on one rank.

    Backward begins after `forward` seconds, 0 or more. `gradients` are in the order of backward, at least one.
    """

    name: str
    forward: float
    gradients: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("a trace has 1 gradient or more")
        if self.forward < 0 or any(gradient.seconds < 0 or gradient.nbytes < 0 for gradient in self.gradients):
            raise ValueError("a trace has no negative times or sizes")

    @classmethod
    def even(cls, gradients: int, nbytes: int, forward: float, backward: float) -> Trace:
        """Make the trace of a model with equal gradients: `nbytes` each, and `backward` seconds for all of them."""
        one = backward / gradients
        return cls("even", forward, tuple(Gradient(str(index), nbytes, one) for index in range(gradients)))

    @classmethod
    def recorded(cls, plan: MergingPlan) -> Trace:
        """Make a trace from the times that a training with merged gradients has measured.

        All time of a step besides backward and the reductions counts as forward. Raises ValueError if the gradients
        have several dtypes or devices, because a trace can have only one of each.
        """
        if any(later < earlier for earlier, later in itertools.pairwise(plan.ready)):
            raise ValueError("the plan's gradients have several dtypes or devices: a trace can have only one")
        seconds = np.diff(plan.ready, prepend=plan.ready[:1]).tolist()
        gradients = zip(plan.gradients, plan.nbytes, seconds, strict=True)
        return cls("recorded", plan.around, tuple(Gradient(*gradient) for gradient in gradients))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Read a file with a saved trace, or with a saved `MergingPlan`. Raises ValueError if it holds neither."""
        document = documents.load(path, "trace")
        if isinstance(document, dict) and "messages" in document:
            return cls.recorded(MergingPlan.of_document(document, path))
        return documents.read_as(cls, document, path, "trace")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a JSON file."""
        documents.save(self, path)

    def scaled(self, backward: float) -> Trace:
        """Return the trace with all times scaled in proportion, so that backward takes `backward` seconds."""
        return self._times(backward / self.backward)

    def split(self, passes: int, seconds: float = 0.0) -> Trace:
        """Return the trace of a step that is split into `passes` micro-batches.

        Each micro-batch takes `seconds` longer than 1 / `passes` of the step. Gradients are ready in the last one.
        """
        last = self._times(1 / passes)
        before = (passes - 1) * (last.compute + seconds)
        return replace(last, forward=before + seconds + last.forward)

    def _times(self, factor: float) -> Trace:
        gradients = tuple(replace(gradient, seconds=gradient.seconds * factor) for gradient in self.gradients)
        return replace(self, forward=self.forward * factor, gradients=gradients)

    @property
    def backward(self) -> float:
        """The time of the backward pass, in seconds."""
        return sum(gradient.seconds for gradient in self.gradients)

    @property
    def compute(self) -> float:
        """The time of a step without messages, in seconds: forward and backward."""
        return self.ready[-1]

    @property
    def nbytes(self) -> int:
        """The size of all gradients, in bytes."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def ready(self) -> list[float]:
        """The times when backward has computed the gradients, in seconds after the start of the step."""
        return list(itertools.accumulate((gradient.seconds for gradient in self.gradients), initial=self.forward))[1:]

    def plan(self, rule: str, cost: MessageCost) -> MergingPlan:
        """Return the plan that a rule of `hvd.MergedGradients` makes if messages have this cost."""
        names = [gradient.name for gradient in self.gradients]
        nbytes = [gradient.nbytes for gradient in self.gradients]
        return merging.plan(rule, names, nbytes, self.ready, cost)


@dataclass(frozen=True)
class Result:
    """The result of a simulated job. Times are in seconds.

    `iteration_time` is the mean over ranks and iterations. `efficiency` is the compute time of a step without delays,
    divided by `iteration_time`. This is the speed-up over one rank, divided by the number of ranks. A step has
    `messages` messages, each with rounds of its own. `late` is the share of late arrivals. `closed_by` counts the
    rounds of all messages by the reason why they closed (`docs/protocol.md`), and `fresh_histogram` by the number of
    ranks on time. `staleness_histogram` counts contributions by staleness. `ends` says when each step ended, of the
    shape (iterations, ranks).

    With `hvd.WorkSharing`, `bound` is the time of an iteration if the times of all micro-batches were known in advance,
    and each, the longest first, went to the rank that ends it first. If delays belong to ranks, no schedule is better.
    """

    iteration_time: float
    efficiency: float
    messages: int
    late: float
    closed_by: dict[str, int]
    fresh_histogram: dict[int, int]
    staleness_histogram: dict[int, int]
    ends: NDArray[np.float64] = field(repr=False, compare=False)
    bound: float | None = None

    @property
    def contributors(self) -> float:
        """The mean number of ranks on time for a round, over rounds with any rank on time; 0 without such rounds."""
        return _mean({fresh: rounds for fresh, rounds in self.fresh_histogram.items() if fresh > 0})

    @property
    def staleness(self) -> float:
        """The mean number of rounds that a rank had missed before a contribution; 0 without contributions."""
        return _mean(self.staleness_histogram)


def _mean(histogram: dict[int, int]) -> float:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else 0.0


def simulate(
    trace: Trace,
    policy: Policy | str,
    ranks: int,
    *,
    cluster: Cluster,
    algorithm: str = "ring",
    rule: str = "exact",
    iterations: int = 100,
    delays: Delays | NDArray[np.float64] | None = None,
    seed: int = 0,
    cycle: float = 1e-3,
    passes: int = 1,
    split: float = 0.0,
    delays_in: str = "each",
) -> Result:
    """Run a job in simulated time: `ranks` ranks, 1 or more, take `iterations` steps, 1 or more, of `trace` each.

    The work of a step is split into `passes` micro-batches, 1 or more. Each micro-batch takes 1 / `passes` of the
    step's compute, plus `split` seconds, 0 or more. The step's messages travel during the last micro-batch. Under
    `hvd.WorkSharing()` the ranks share the micro-batches of an iteration, `passes` per rank on average, and the delay
    of a rank delays its micro-batches. With `delays_in="each"`, each of them is delayed by 1 / `passes` of the delay,
    like on a slow machine. With `"first"`, the rank's first one is delayed by the whole delay, like by a hiccup.

    If the policy combines gradients, messages travel during backward. If it averages models, the whole model travels
    after backward; if the policy has `overlap="gradient"`, it travels during the next step. `overlap=True` gives the
    same times as False: it lets a rank load data during an average, and a trace has no separate time for loading data.

    `algorithm` is a key of `Cluster.costs`. `rule` is one of `horovod_partial.merging.RULES`, and decides by the cost
    of a message among all ranks which gradients travel together. `cycle` is the shortest time between two negotiations,
    in seconds; the default is Horovod's. With 0 a round closes at the moment when its last rank arrives, but large jobs
    take long to simulate.

    `delays` is a model of delays with the seed `seed`, or delays in seconds of the shape (iterations, ranks), before
    the compute of a step. If the shape is (iterations, ranks, passes), delays belong to micro-batches: a micro-batch
    is delayed on whichever rank computes it. This models samples of different lengths.

    Raises ValueError if an argument is out of range, or the delays have another shape.
    """
    policy = policies.resolve(policy, policy, shares_work=True)
    for name, value in (("ranks", ranks), ("iterations", iterations), ("passes", passes)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    for name, seconds in (("cycle", cycle), ("split", split)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
    require(delays_in in ("each", "first"), "delays_in", "'each' or 'first'", delays_in)
    costs = [cluster.cost(algorithm, size) for size in range(1, ranks + 1)]
    step = trace.split(passes, split)
    if not step.compute > 0:
        raise ValueError(f"a step of the trace must compute for more than 0 seconds, not {step.compute}")
    # When each message of a step is ready, in seconds after the start of the step, and the messages' bytes.
    ready, nbytes = [step.compute], [float(step.nbytes)]
    if not isinstance(policy, ModelPolicy):
        plan = step.plan(rule, costs[-1])
        last = list(itertools.accumulate(plan.messages))
        ready = [plan.ready[end - 1] for end in last]
        nbytes = np.add.reduceat(np.asarray(plan.nbytes, dtype=np.float64), [0, *last[:-1]]).tolist()
    drawn = _delays(delays, iterations, ranks, passes, trace.compute, seed)
    if isinstance(policy, WorkSharing):
        return _share(trace, step, passes, drawn, delays_in, ready=ready, bytes=nbytes, cost=costs[-1], cycle=cycle)
    rounds = Quorum(1.0, max_staleness=FOR_EVER) if isinstance(policy, Full) else policy
    figures = _core.run_job(
        policy=rounds.to_core(ranks),
        delays=drawn.reshape(iterations, ranks, -1).sum(axis=2),
        ready=ready,
        bytes=nbytes,
        compute=step.compute,
        costs=[(cost.latency, cost.seconds_per_byte) for cost in costs],
        cycle=cycle,
        average_period=policy.period if isinstance(policy, WeightedAverage) else 0,
        overlap=isinstance(policy, ModelPolicy) and policy.overlap == "gradient",
        late=policy.bucket_options()["late"] if isinstance(policy, ModelPolicy) else "accumulate",
    )
    ends = figures["ends"]
    iteration_time = float(ends[-1].mean()) / iterations
    closed_by: Counter[str] = Counter()
    fresh: Counter[int] = Counter()
    staleness: Counter[int] = Counter()
    for message in figures["messages"]:
        closed_by.update({reason: rounds for reason, rounds in message["closed_by"].items() if rounds})
        fresh.update({count: rounds for count, rounds in enumerate(message["fresh"]) if rounds})
        staleness.update(message["staleness"])
    return Result(
        iteration_time=iteration_time,
        efficiency=trace.compute / iteration_time,
        messages=len(ready),
        late=figures["late"] / figures["arrivals"] if figures["arrivals"] else 0.0,
        closed_by=dict(closed_by),
        fresh_histogram=dict(sorted(fresh.items())),
        staleness_histogram=dict(sorted(staleness.items())),
        ends=ends,
    )


def _delays(
    delays: Delays | NDArray[np.float64] | None, iterations: int, ranks: int, passes: int, compute: float, seed: int
) -> NDArray[np.float64]:
    if delays is None:
        return np.zeros((iterations, ranks))
    drawn = delays if isinstance(delays, np.ndarray) else delays.draw(iterations, ranks, compute, seed)
    shape = (iterations, ranks)
    if drawn.shape not in (shape, (*shape, passes)):
        raise ValueError(f"delays must have the shape {shape} or {(*shape, passes)}, not {drawn.shape}")
    if not (np.isfinite(drawn).all() and (drawn >= 0).all()):
        raise ValueError("delays must be finite, and 0 or more seconds")
    return drawn


def _share(
    trace: Trace,
    step: Trace,
    passes: int,
    delays: NDArray[np.float64],
    delays_in: str,
    *,
    ready: list[float],
    bytes: list[float],
    cost: MessageCost,
    cycle: float,
) -> Result:
    iterations, ranks = delays.shape[:2]
    micro_batch = step.compute / passes
    in_own = delays.reshape(iterations, -1) if delays.ndim == 3 else np.zeros((iterations, ranks * passes))
    of_ranks = delays if delays.ndim == 2 else np.zeros((iterations, ranks))
    ends, made, bounds = _core.run_shared_job(
        in_first=of_ranks * (delays_in == "first"),
        in_each=of_ranks * (delays_in == "each") / passes,
        in_own=in_own,
        ready=[seconds - (passes - 1) * micro_batch for seconds in ready],
        bytes=bytes,
        compute=micro_batch,
        cost=(cost.latency, cost.seconds_per_byte),
        cycle=cycle,
    )
    iteration_time = ends[-1] / iterations
    sent = _core.merging_messages([1] * len(ready), ready, bytes, cost.latency, cost.seconds_per_byte)[-1][1]
    contributors = np.count_nonzero(made, axis=1)
    fresh: Counter[int] = Counter(contributors.tolist())
    return Result(
        iteration_time=iteration_time,
        efficiency=trace.compute / iteration_time,
        messages=len(ready),
        late=0.0,
        closed_by={"everybody": iterations * len(ready)},
        fresh_histogram={count: updates * len(ready) for count, updates in sorted(fresh.items())},
        staleness_histogram={0: int(contributors.sum()) * len(ready)},
        ends=np.repeat(np.array(ends)[:, None], ranks, axis=1),
        bound=float(np.mean(bounds)) + max(0.0, sent - step.compute),
    )
