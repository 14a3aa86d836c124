"""Sync policies: when may a round of a collective close, and who waits?

A policy says nothing about data; see `docs/policies.md` for how to choose one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from horovod_partial import _core
from horovod_partial.checks import is_flag, is_int, is_number, require, require_count

__all__ = [
    "Auto",
    "Butterfly",
    "Full",
    "GroupAverage",
    "Majority",
    "PartialReduce",
    "Quorum",
    "Schedule",
    "SlowMomentum",
    "Solo",
    "WeightedAverage",
    "WorkSharing",
]


class _Policy:
    """What every policy can tell of itself."""

    def to_core(self, size: int) -> _core.Policy:
        """The rule by which rounds of `size` ranks close, in the core's terms.

        Bounds on staleness, the grace period and the words for errors are added in `bucket_config`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Full(_Policy):
    """Every rank waits for every other: Horovod's own collective, bit for bit."""

    def to_core(self, size: int) -> _core.Policy:
        raise TypeError(f"{self!r} has no rounds: it is Horovod's own collective")


@dataclass(frozen=True)
class Solo(_Policy):
    """The first rank that arrives closes the round; nobody waits (eager-SGD, PPoPP'20, section 4.1)."""

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(quorum=1)


@dataclass(frozen=True)
class Majority(_Policy):
    """A round closes when at least half of the ranks have arrived.

    Args:
        initiator: None for the guarantee; `"random"` for the paper's statistical form (eager-SGD, PPoPP'20, section 4.2):
            one rank is drawn for each round, and the round closes when that rank has arrived. On average half of the
            ranks are then on time, but a single round may have one.
        seed: of the draws, for `initiator="random"`; the same on every rank.
    """

    initiator: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.initiator not in (None, "random"):
            raise ValueError(f"initiator must be None or 'random', not {self.initiator!r}")
        require(is_int(self.seed), "seed", "an int", self.seed)

    def to_core(self, size: int) -> _core.Policy:
        if self.initiator == "random":
            return _core.Policy(rule="initiator", seed=self.seed % 2**64)
        return _core.Policy(quorum=math.ceil(size / 2))


@dataclass(frozen=True)
class Quorum(_Policy):
    """A round closes when `ranks` ranks have arrived, or that share of them.

    Args:
        ranks: a number of ranks, 1 or more (an int), or a share of all ranks, above 0 and up to 1 (a float). More ranks
            than there are means all of them.
    """

    ranks: int | float
    # 1 is one rank and 1.0 is all of them, although the numbers are equal.
    is_share: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(self.ranks, float))
        _check_ranks("ranks", self.ranks)

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(quorum=_count_of(self.ranks, size))


def _check_ranks(name: str, ranks: Any) -> None:
    is_either = isinstance(ranks, int | float) and not isinstance(ranks, bool)
    require(is_either, name, "an int or a float", ranks)
    if isinstance(ranks, int) and ranks < 1:
        raise ValueError(f"{name} must be 1 or more, not {ranks}")
    if isinstance(ranks, float) and not 0.0 < ranks <= 1.0:
        raise ValueError(f"a share of the ranks must be above 0 and at most 1, not {ranks}")


def _count_of(ranks: float, size: int) -> int:
    """A number of ranks, or a share of `size`, as a number."""
    if isinstance(ranks, int):
        return min(ranks, size)
    # 0.55 of 20 ranks is 11, although the product is a little more.
    return max(1, math.ceil(round(ranks * size, 9)))


@dataclass(frozen=True)
class Auto(_Policy):
    """A quorum that begins with all ranks, and follows what their steps take.

    It is the largest of all, 7/8, 3/4, 1/2 and 1/4 of the ranks and one, that is nearly as fast as the best of them: a
    larger quorum makes fewer gradients late. Rank 0 of the process set decides, from the steps of the last 64 rounds, and
    keeps a change only if the measured speed bears it out (`docs/policies.md`).

    Args:
        min_quorum: as `ranks` of `hvd.Quorum`: at least so many ranks, or that share of them, are in each round. Raise it
            where the learning rate bears no stale gradients.
    """

    min_quorum: int | float = 1
    # As in `Quorum`.
    is_share: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(self.min_quorum, float))
        _check_ranks("min_quorum", self.min_quorum)

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(rule="auto", quorum=_count_of(self.min_quorum, size))


@dataclass(frozen=True)
class WorkSharing(_Policy):
    """The micro-batches of an update belong to all ranks, and whoever is free takes the next one.

    For `hvd.DistributedOptimizer` in PyTorch, with `backward_passes_per_step` micro-batches for each rank, on average. An update
    has the gradients of all of them, each of the weights of the update before, as with `hvd.Full()` and the same accumulation. No
    gradient is late, and all ranks have the same model after every update. A slow rank makes fewer micro-batches, and the others
    more. Scheduling theory calls this work sharing, or central self-scheduling (docs/policies.md).
    """

    def to_core(self, size: int) -> _core.Policy:
        raise TypeError(f"{self!r} has no rounds by itself: those of an optimizer's buckets are SharedUpdates")


@dataclass(frozen=True)
class SharedUpdates(_Policy):
    """What the buckets of an optimizer under `WorkSharing` are declared with.

    Args:
        passes: micro-batches of an update, for each rank on average.
        grants: with this bucket the ranks tell what they have begun, and are told what they may begin.
    """

    passes: int
    grants: bool

    def __repr__(self) -> str:
        return f"WorkSharing(), backward_passes_per_step={self.passes}"

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(rule="work_sharing", micro_batches=self.passes * size, grants=self.grants)


# --- Schedules -------------------------------------------------------------------------------------------------------


class _Schedule:
    """Which ranks reduce together in a round."""

    def to_core(self, size: int) -> _core.Schedule:
        """The schedule among `size` ranks, in the core's terms."""
        raise NotImplementedError

    def groups(self, round: int, size: int) -> list[list[int]]:
        """The groups of a round among `size` ranks, each a list of ranks."""
        return self.to_core(size).groups(round, size)


@dataclass(frozen=True)
class Butterfly(_Schedule):
    """Groups along a butterfly (WAGMA-SGD, IEEE TPDS 2021, section 3.2).

    For powers of two every change has reached all ranks after log(ranks) / log(size) rounds; other numbers get groups
    of at most `size`, which may differ in size. The paper's Algorithm 1 shifts its mask too far; its worked example, and
    this class, do not.

    Args:
        size: ranks in a group, 2 or more. More ranks than there are means all of them.
    """

    size: int

    def __post_init__(self) -> None:
        require_count("size", self.size, 2)

    def to_core(self, size: int) -> _core.Schedule:
        return _core.Schedule(kind="butterfly", group_size=min(self.size, size))


@dataclass(frozen=True)
class Schedule(_Schedule):
    """Groups of your own.

    Args:
        function: called with a round and a rank, tells the rank's group: any hashable value, the same for ranks that
            reduce together. It must be the same function on every rank.
        rounds: it is asked for rounds 0 up to this number, 1 or more; then the groups come again from the start.
    """

    function: Callable[[int, int], Hashable]
    rounds: int

    def __post_init__(self) -> None:
        require(callable(self.function), "function", "callable with a round and a rank", self.function)
        require_count("rounds", self.rounds, 1)

    def to_core(self, size: int) -> _core.Schedule:
        table = []
        for round in range(self.rounds):
            numbers: dict[Hashable, int] = {}
            table.append([numbers.setdefault(self.function(round, rank), len(numbers)) for rank in range(size)])
        return _core.Schedule(kind="table", group_size=1, table=table)


# --- Policies of models ----------------------------------------------------------------------------------------------

_AVERAGED = ("parameters", "buffers", "state")


def _check_average(average: Any) -> tuple[str, ...]:
    names = (average,) if isinstance(average, str) else tuple(average) if isinstance(average, Iterable) else ()
    unknown = [name for name in names if name not in _AVERAGED]
    if unknown or "parameters" not in names:
        raise ValueError(f"average must hold 'parameters', and may hold 'buffers' and 'state', not {average!r}")
    return names


def _check_share(name: str, value: Any) -> None:
    require(is_number(value) and 0.0 < value <= 1.0, name, "a number above 0 and at most 1", value)


def _check_overlap(overlap: Any) -> None:
    require(is_flag(overlap), "overlap", "True or False", overlap)


@dataclass(frozen=True)
class SlowMomentum:
    """Momentum of the averages over all ranks (SlowMo, Wang et al., ICLR 2020, Algorithm 1).

    With x the model after the last such average and a the plain average now, the momentum v becomes beta v + (x - a), and all
    ranks go on from x - alpha v. It takes two more copies of the model. Parameters only are moved. The paper divides x - a by
    the learning rate, and multiplies v by it again, so that v shrinks where a schedule lowers the rate; here it does not.

    Args:
        beta: of the momentum, 0 or more and below 1. With 0, and `alpha` 1, the average stays as it is.
        alpha: the rate of the averages, above 0.
    """

    beta: float
    alpha: float = 1.0

    def __post_init__(self) -> None:
        require(is_number(self.beta) and 0.0 <= self.beta < 1.0, "beta", "a number, 0 or more and below 1", self.beta)
        require(is_number(self.alpha) and 0.0 < self.alpha < math.inf, "alpha", "a number above 0", self.alpha)


def _check_slow_momentum(slow_momentum: Any) -> None:
    fits = slow_momentum is None or isinstance(slow_momentum, SlowMomentum)
    require(fits, "slow_momentum", "hvd.SlowMomentum(beta)", slow_momentum)


class _ModelPolicy(_Policy):
    """A policy whose contributions are models."""

    slow_momentum: SlowMomentum | None = None

    def bucket_options(self) -> dict[str, Any]:
        """What becomes of models that are late, and how much each counts: fields of `_core.BucketSpec`."""
        return {"late": "discard"}


@dataclass(frozen=True)
class GroupAverage(_ModelPolicy):
    """Every rank takes its own step, then averages its model with its group, without waiting (WAGMA-SGD, IEEE TPDS 2021).

    The first rank to arrive starts the round for all groups. A rank that is on time gets sum / S, one that is late
    (sum + own) / (S + 1), where the sum has the model with which it last arrived. (The released code of the paper always
    takes the second form, and averages before the step; Algorithm 2, and this class, do not.)

    Args:
        size: ranks in a group, 2 or more; None takes the largest power of two that is not above the square root of the
            number of ranks, and at least 2.
        period: every so many rounds one is an average over all ranks, for which all wait; None never.
        schedule: the groups, if not `hvd.Butterfly(size)`.
        average: what is averaged: `"parameters"`; `"buffers"`, floating-point ones such as BatchNorm's statistics (pass
            `named_buffers` to the optimizer); `"state"`, the optimizer's tensors of a parameter's shape, such as
            momentum. What is not averaged stays the rank's own.
        overlap: `step` does not wait for the average: the next forward pass of any module does, or `synchronize`. So it
            runs beside loading data. Whoever reads parameters in between sees them before the average.
        slow_momentum: of the averages over all ranks, every `period` rounds. For PyTorch.
    """

    size: int | None = None
    period: int | None = 10
    schedule: Butterfly | Schedule | None = None
    average: tuple[str, ...] = ("parameters",)
    overlap: bool = False
    slow_momentum: SlowMomentum | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            require_count("size", self.size, 2)
        if self.period is not None:
            require_count("period", self.period, 1)
        if self.schedule is not None and self.size is not None:
            raise ValueError("give size or schedule, not both: a schedule has its own sizes")
        fits = self.schedule is None or isinstance(self.schedule, _Schedule)
        require(fits, "schedule", "hvd.Butterfly(...) or hvd.Schedule(...)", self.schedule)
        object.__setattr__(self, "average", _check_average(self.average))
        _check_overlap(self.overlap)
        _check_slow_momentum(self.slow_momentum)
        if self.slow_momentum is not None and self.period is None:
            raise ValueError("slow_momentum is of the averages over all ranks: give a period, after which there is one")

    def schedule_for(self, size: int) -> Butterfly | Schedule:
        """The schedule among `size` ranks."""
        if self.schedule is not None:
            return self.schedule
        return Butterfly(max(2, 2 ** int(math.log2(max(size, 1)) / 2)) if self.size is None else self.size)

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(quorum=1, schedule=self.schedule_for(size).to_core(size), period=self.period or 0)

    def bucket_options(self) -> dict[str, Any]:
        return {"late": "keep"}


@dataclass(frozen=True)
class PartialReduce(_ModelPolicy):
    """Every rank takes its own step, then averages its model with the first ranks that are ready too (P-Reduce, SIGMOD'21).

    Args:
        size: ranks in a group, 2 or more. More ranks than there are means all of them.
        weights: `"constant"`: all models count alike, and their mean over all ranks is preserved. `"staleness"`: a model
            counts less the more steps it is behind the newest of its group (an exponential moving average over the
            steps); the steps of all members are then taken to be the newest's.
        alpha: of the moving average, above 0 and at most 1; nearer to 0 punishes stale models harder.
        average: as in `GroupAverage`.
        overlap: as in `GroupAverage`.
    """

    size: int
    weights: str = "constant"
    alpha: float = 0.9
    average: tuple[str, ...] = ("parameters",)
    overlap: bool = False

    def __post_init__(self) -> None:
        require_count("size", self.size, 2)
        if self.weights not in ("constant", "staleness"):
            raise ValueError(f"weights must be 'constant' or 'staleness', not {self.weights!r}")
        _check_share("alpha", self.alpha)
        object.__setattr__(self, "average", _check_average(self.average))
        _check_overlap(self.overlap)

    def to_core(self, size: int) -> _core.Policy:
        # So many groups, the last ones, shall connect all ranks, so that no cliques form.
        return _core.Policy(rule="ready", group_size=min(self.size, size), window=2 * size)

    def bucket_options(self) -> dict[str, Any]:
        if self.weights == "constant":
            return super().bucket_options()
        return {**super().bucket_options(), "weights": "staleness", "weight_parameter": self.alpha}


@dataclass(frozen=True)
class WeightedAverage(_ModelPolicy):
    """Ranks train by themselves, and now and then average their models by the work that each has done (WP-SGD).

    Each rank takes steps until the fastest has taken `period`; a slower one finishes its step first. A rank that has
    taken T steps fewer than the fastest since the last average counts with contraction^T.

    Args:
        period: steps of the fastest rank between two averages, 1 or more.
        contraction: by how much a step shrinks the distance to the solution: above 0 and at most 1. 1 is the plain average
            of unequal work; for a loss with strong convexity lambda and a step eta at most 1 - lambda * eta.
            `hvd.estimate_contraction` measures it.
        average: as in `GroupAverage`.
        overlap: as in `GroupAverage`.
        slow_momentum: of all averages. For PyTorch.
    """

    period: int
    contraction: float
    average: tuple[str, ...] = ("parameters",)
    overlap: bool = False
    slow_momentum: SlowMomentum | None = None

    def __post_init__(self) -> None:
        require_count("period", self.period, 1)
        _check_share("contraction", self.contraction)
        object.__setattr__(self, "average", _check_average(self.average))
        _check_overlap(self.overlap)
        _check_slow_momentum(self.slow_momentum)

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(quorum=size)

    def bucket_options(self) -> dict[str, Any]:
        return {**super().bucket_options(), "weights": "contraction", "weight_parameter": self.contraction}


GradientPolicy = Full | Solo | Majority | Quorum | Auto | WorkSharing
ModelPolicy = GroupAverage | PartialReduce | WeightedAverage
Policy = GradientPolicy | ModelPolicy


def parse(text: str) -> Policy:
    """The policy that `text` names.

    `full`, `solo`, `work-sharing`, `majority`, `majority:random`, `quorum:3`, `quorum:0.75`, `auto`, `auto:3`, `auto:0.25`,
    `group_average`, `group_average:4`, `partial_reduce:4`, `weighted_average:8:0.999`.
    """
    name, _, argument = text.strip().lower().partition(":")
    try:
        if name == "full" and not argument:
            return Full()
        if name == "solo" and not argument:
            return Solo()
        if name == "work-sharing" and not argument:
            return WorkSharing()
        if name == "majority":
            return Majority(initiator=argument or None)
        if name == "quorum" and argument:
            return Quorum(_number_of_ranks(argument))
        if name == "auto":
            return Auto(_number_of_ranks(argument)) if argument else Auto()
        if name == "group_average":
            return GroupAverage(size=int(argument) if argument else None)
        if name == "partial_reduce" and argument:
            return PartialReduce(int(argument))
        if name == "weighted_average" and argument:
            period, _, contraction = argument.partition(":")
            return WeightedAverage(int(period), float(contraction))
    except ValueError as error:
        raise ValueError(f"invalid sync policy {text!r}: {error}") from None
    raise ValueError(
        f"unknown sync policy {text!r}; known are full, solo, majority, majority:random, quorum:N with a number of "
        "ranks or a share of them, auto, auto:N, work-sharing, group_average:N, partial_reduce:N, and weighted_average:PERIOD:CONTRACTION"
    )


def _number_of_ranks(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def resolve(sync: Policy | str | None, default: Policy | str, *, shares_work: bool = False) -> Policy:
    """The policy that an argument stands for: a policy, a policy's text, or None for the default.

    Raises:
        ValueError: it is none, or `WorkSharing` where there are no micro-batches to share.
    """
    chosen = default if sync is None else sync
    if isinstance(chosen, str):
        chosen = parse(chosen)
    require(isinstance(chosen, Policy), "sync", "a policy such as hvd.Majority(), or its name", chosen)
    if isinstance(chosen, WorkSharing) and not shares_work:
        raise ValueError(
            f"{chosen!r} is for hvd.DistributedOptimizer in PyTorch: what it shares are the micro-batches between two updates"
        )
    return chosen


def describe(policy: Policy, size: int) -> str:
    """A policy in words, which differ where two ranks mean different things."""
    schedule = getattr(policy, "schedule", None)
    if isinstance(schedule, Schedule):  # a function's own words tell its address
        digest = hashlib.sha256(repr(schedule.to_core(size).table).encode()).hexdigest()[:8]
        return repr(policy).replace(repr(schedule), f"Schedule(rounds={schedule.rounds}, groups {digest})")
    return repr(policy)
