"""Sync policies. A policy says when a round (one execution of a collective) closes, and which ranks wait for it.

`docs/policies.md` explains how to choose a policy.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args

from horovod_partial import _core
from horovod_partial.checks import is_flag, is_int, is_number, require, require_count

__all__ = [
    "Butterfly",
    "Full",
    "GroupAverage",
    "Majority",
    "PartialReduce",
    "Quorum",
    "Schedule",
    "Solo",
    "WeightedAverage",
    "WorkSharing",
]

LONGEST_GRACE_MS = 31_536_000_000  # the largest `grace_ms`: one year, the same as kLongest in cpp/core/values/types.h
FOR_EVER = 2**31 - 1  # a `max_staleness` of this many rounds sets no bound on staleness


@dataclass(frozen=True, repr=False)
class _Policy:
    """Base class of all sync policies."""

    def __repr__(self) -> str:
        """Return the Python call that makes this policy, without arguments that have their default."""
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in _options(type(self))
            if repr(getattr(self, each.name)) != repr(each.default)  # 1 (one rank) == 1.0 (all ranks)
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def to_core(self, size: int) -> _core.Policy:
        """Return the C++ core's form of this policy, for `size` ranks. Raises TypeError for `Full` and `WorkSharing`.

        The result's field `description` is empty; `bucket_config` sets this field later.
        """
        raise TypeError(f"{self!r} has no rounds of its own")


def _options(policy: type[_Policy]) -> list[Field[Any]]:
    """Return the fields that are arguments of a policy's constructor, the positional arguments first."""
    return sorted((each for each in fields(policy) if each.init), key=lambda each: bool(each.kw_only))


@dataclass(frozen=True, kw_only=True, repr=False)
class _OpenRounds(_Policy):
    """Base class of policies whose rounds may close before all ranks have arrived."""

    max_staleness: int = 8
    grace_ms: float | str = "auto"

    def __post_init__(self) -> None:
        require_count("max_staleness", self.max_staleness, 0)
        grace = self.grace_ms
        fits = grace == "auto" if isinstance(grace, str) else is_number(grace) and 0 <= grace <= LONGEST_GRACE_MS
        require(fits, "grace_ms", f"'auto' or a number of milliseconds, 0 to {LONGEST_GRACE_MS}", grace)

    def _to_core(self, **rule: Any) -> _core.Policy:
        if not isinstance(self.grace_ms, str):  # a grace of "auto" is the default in C++, and need not be set
            rule["grace_seconds"] = self.grace_ms / 1e3
        return _core.Policy(max_staleness=self.max_staleness, **rule)


@dataclass(frozen=True, kw_only=True, repr=False)
class LateGradients(_OpenRounds):
    """Base class of policies under which a rank's gradients may come too late for a round."""

    missed: str = "replay"
    replay_limit: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.missed in ("replay", "latest"), "missed", "'replay' or 'latest'", self.missed)
        require_count("replay_limit", self.replay_limit, 2)


@dataclass(frozen=True, repr=False)
class Full(_Policy):
    """Every rank waits for every other rank: Horovod's own collective, bit for bit."""


@dataclass(frozen=True, repr=False)
class Solo(LateGradients):
    """The first rank that arrives closes the round, and waits for no other rank (eager-SGD, PPoPP'20, section 4.1).

    Args:
        max_staleness: rounds that a rank may miss in a row before the other ranks wait for this rank, 0 or more.
        grace_ms: how many milliseconds a round that could close stays open for further ranks. `"auto"` chooses this
            time from recent arrivals, at most 5 % of the median time of a step.
        missed: what a late rank does with the results of rounds that it missed. Under `"replay"` no result is lost. An
            optimizer applies each result in a step of its own, same as the other ranks. So after a flush, models and
            optimizer states are equal bit for bit. `hvd.partial_allreduce` and tapes return the sum of these results.
            Under `"latest"` the rank takes only the newest result, and loses the others (eager-SGD).
        replay_limit: how many missed results an optimizer keeps, 2 or more; each is as large as all gradients. The
            other ranks wait for a rank that keeps this many. If they cannot wait, for example because the late rank
            waits in Horovod's own collective, it adds up its two oldest results (`summed` in `hvd.partial_stats()`).
    """

    def to_core(self, size: int) -> _core.Policy:
        return self._to_core(quorum=1)


@dataclass(frozen=True, repr=False)
class Majority(LateGradients):
    """A round closes when at least half of the ranks have arrived.

    Args:
        initiator: with None, each round has at least half of the ranks. `"random"` is the paper's statistical form
            (eager-SGD, PPoPP'20, section 4.2): one rank is drawn for each round, and the round closes when that rank
            has arrived. On average half of the ranks are then on time, but in a single round perhaps only one rank is.
        seed: seed of the draws for `initiator="random"`, an int; the same on every rank.
        max_staleness, grace_ms, missed, replay_limit: same as in `Solo`.
    """

    initiator: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.initiator in (None, "random"), "initiator", "None or 'random'", self.initiator)
        require(is_int(self.seed), "seed", "an int", self.seed)

    def to_core(self, size: int) -> _core.Policy:
        if self.initiator == "random":
            return self._to_core(rule="initiator", seed=self.seed % 2**64)
        return self._to_core(quorum=math.ceil(size / 2))


@dataclass(frozen=True, repr=False)
class Quorum(LateGradients):
    """A round closes when a given number of ranks, or a given share of all ranks, has arrived.

    Args:
        ranks: a number of ranks, 1 or more (an int), or a share of all ranks, above 0 and up to 1 (a float). An int
            larger than the number of ranks means all ranks.
        max_staleness, grace_ms, missed, replay_limit: same as in `Solo`.
    """

    ranks: int | float
    # With this field `Quorum(1)` (one rank) and `Quorum(1.0)` (all ranks) are unequal, although 1 == 1.0.
    is_share: bool = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_share", isinstance(self.ranks, float))
        is_either = isinstance(self.ranks, int | float) and not isinstance(self.ranks, bool)
        require(is_either, "ranks", "an int or a float", self.ranks)
        if self.is_share and not 0.0 < self.ranks <= 1.0:
            raise ValueError(f"a share of the ranks must be above 0 and at most 1, not {self.ranks}")
        require(self.is_share or self.ranks >= 1, "ranks", "1 or more", self.ranks)

    def to_core(self, size: int) -> _core.Policy:
        if isinstance(self.ranks, int):
            return self._to_core(quorum=min(self.ranks, size))
        # Without `round`, 0.55 of 20 ranks would be 12 ranks: the floating-point product is a little above 11.
        return self._to_core(quorum=max(1, math.ceil(round(self.ranks * size, 9))))


@dataclass(frozen=True, repr=False)
class WorkSharing(_Policy):
    """All ranks share the micro-batches of an update: each rank that is free takes the next micro-batch.

    This policy is only for `hvd.DistributedOptimizer` in PyTorch and Keras. An update has `backward_passes_per_step`
    micro-batches for each rank, on average. All their gradients are computed with the weights after the previous
    update, same as with `hvd.Full()` and gradient accumulation. No gradient is late, and all ranks have the same model
    after every update. A slow rank computes fewer micro-batches than the other ranks. Scheduling theory calls this work
    sharing, or central self-scheduling (docs/policies.md).
    """


@dataclass(frozen=True)
class SharedUpdates(_Policy):
    """The policy of the buckets of an optimizer under `WorkSharing`: `passes` micro-batches per rank, on average."""

    passes: int

    def __repr__(self) -> str:
        return f"WorkSharing(), backward_passes_per_step={self.passes}"

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(
            rule="work_sharing", micro_batches=self.passes * size, max_staleness=FOR_EVER, grace_seconds=0.0
        )


class _Schedule:
    """Base class of schedules. A schedule says which ranks reduce together in each round."""

    def to_core(self, size: int) -> _core.Schedule:
        """Return the C++ core's form of this schedule, for `size` ranks."""
        raise NotImplementedError

    def groups(self, round: int, size: int) -> list[list[int]]:
        """Return the groups of a round among `size` ranks, each as a list of ranks."""
        return self.to_core(size).groups(round, size)


@dataclass(frozen=True)
class Butterfly(_Schedule):
    """Groups along a butterfly network, as in an FFT (WAGMA-SGD, IEEE TPDS 2021, section 3.2).

    If `size` and the number of ranks are powers of two, a change of one rank's model has reached all ranks after
    log(ranks) / log(size) rounds. Otherwise groups have at most `size` ranks, and may differ in size. Algorithm 1 of
    the paper shifts its mask too far; this class follows the paper's worked example instead.

    Args:
        size: ranks in a group, 2 or more. If it is larger than the number of ranks, all ranks are one group.
    """

    size: int

    def __post_init__(self) -> None:
        require_count("size", self.size, 2)

    def to_core(self, size: int) -> _core.Schedule:
        return _core.Schedule(kind="butterfly", group_size=min(self.size, size))


@dataclass(frozen=True)
class Schedule(_Schedule):
    """Groups of ranks that the user's function chooses.

    Args:
        function: is called with a round and a rank, and returns the rank's group: any hashable value, equal for ranks
            that reduce together. It must be the same function on every rank.
        rounds: after how many rounds the groups repeat, 1 or more. `function` is called only for rounds 0 to
            `rounds` - 1.
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


def _check_share(name: str, value: Any) -> None:
    require(is_number(value) and 0.0 < value <= 1.0, name, "a number above 0 and at most 1", value)


class _ModelPolicy(_Policy):
    """Base class of policies that average models, not gradients."""

    average: tuple[str, ...]
    overlap: bool | str

    def _check_average(self) -> None:
        """Check the options `average` and `overlap`. Convert a text or a list in `average` to a tuple."""
        given: Any = self.average
        names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
        if "parameters" not in names or any(name not in ("parameters", "buffers", "state") for name in names):
            raise ValueError(f"average must hold 'parameters', and may hold 'buffers' and 'state', not {given!r}")
        object.__setattr__(self, "average", names)
        fits = is_flag(self.overlap) or self.overlap == "gradient"
        require(fits, "overlap", "True, False or 'gradient'", self.overlap)
        if self.overlap == "gradient" and "buffers" in names:
            raise ValueError(
                "overlap='gradient' cannot average buffers: forward passes change them while their average is under way"
            )

    def bucket_options(self) -> dict[str, Any]:
        """Return the fields of `_core.BucketSpec` that say what happens to late models, and how models are weighted."""
        return {"late": "discard"}


@dataclass(frozen=True, repr=False)
class GroupAverage(_ModelPolicy, _OpenRounds):
    """Every rank takes its own step, then averages its model within its group (WAGMA-SGD, IEEE TPDS 2021).

    The first rank that arrives starts the round for all groups, and does not wait for late ranks. The round sums the
    models of the S ranks in a group. For a late rank, the sum contains the model of its last arrival. A rank on time
    gets sum / S, and a late rank gets (sum + its present model) / (S + 1), as in Algorithm 2 of the paper.

    Args:
        size: ranks in a group, 2 or more. None takes the largest power of two that is not above the square root of the
            number of ranks, and at least 2.
        period: number of rounds between two averages over all ranks, 1 or more. Each of these averages waits for all
            ranks. None: there are no averages over all ranks.
        schedule: the groups of each round; None takes `hvd.Butterfly(size)`.
        average: what is averaged: `"parameters"` (always); `"buffers"`: floating-point buffers such as BatchNorm's
            statistics (pass `named_buffers` to the optimizer); `"state"`: the optimizer's tensors that have a
            parameter's shape, such as momentum. Each rank keeps its own values of everything else.
        overlap: what the program may do while an average runs. Keras allows only False, PyTorch all three values.
            False: nothing, because `step` waits for the average. True: load data; the next forward pass of any module
            waits for the average. `"gradient"`: also run the next forward and backward pass, on the model before the
            average. The next `step` waits for the average, and applies this gradient to the average, same as the
            released code of WAGMA-SGD and Algorithm 1 of D-PSGD (NIPS 2017). While an average runs, parameters hold
            their old values, and the program must not change them. `optimizer.synchronize()` waits for the average.
        max_staleness, grace_ms: same as in `Solo`.
    """

    size: int | None = None
    period: int | None = 10
    schedule: Butterfly | Schedule | None = None
    average: tuple[str, ...] = ("parameters",)
    overlap: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None:
            require_count("size", self.size, 2)
        if self.period is not None:
            require_count("period", self.period, 1)
        if self.schedule is not None and self.size is not None:
            raise ValueError("give size or schedule, not both: a schedule has its own sizes")
        fits = self.schedule is None or isinstance(self.schedule, _Schedule)
        require(fits, "schedule", "hvd.Butterfly(...) or hvd.Schedule(...)", self.schedule)
        self._check_average()

    def schedule_for(self, size: int) -> Butterfly | Schedule:
        """Return the schedule that gives the groups of each round among `size` ranks."""
        if self.schedule is not None:
            return self.schedule
        return Butterfly(max(2, 2 ** int(math.log2(max(size, 1)) / 2)) if self.size is None else self.size)

    def to_core(self, size: int) -> _core.Policy:
        return self._to_core(quorum=1, schedule=self.schedule_for(size).to_core(size), period=self.period or 0)

    def bucket_options(self) -> dict[str, Any]:
        return {"late": "keep"}


@dataclass(frozen=True, repr=False)
class PartialReduce(_ModelPolicy):
    """Every rank takes its own step, then averages its model with other ranks that are ready (P-Reduce, SIGMOD'21).

    Args:
        size: ranks in a group, 2 or more. If it is larger than the number of ranks, all ranks are one group.
        weights: `"constant"`: all models of a group have equal weights, so the mean over all ranks does not change.
            `"staleness"`: a model has less weight, the more steps it is behind the newest model of its group (an
            exponential moving average over the steps). After the average, all members take the newest step count.
        alpha: factor of the moving average, above 0 and at most 1. A lower factor gives stale models less weight.
        average, overlap: same as in `GroupAverage`.
    """

    size: int
    weights: str = "constant"
    alpha: float = 0.9
    average: tuple[str, ...] = ("parameters",)
    overlap: bool | str = False

    def __post_init__(self) -> None:
        require_count("size", self.size, 2)
        require(self.weights in ("constant", "staleness"), "weights", "'constant' or 'staleness'", self.weights)
        _check_share("alpha", self.alpha)
        self._check_average()

    def to_core(self, size: int) -> _core.Policy:
        # The last `window` groups of P-Reduce together must connect all ranks, so that ranks form no separate cliques.
        return _core.Policy(rule="ready", group_size=min(self.size, size), window=2 * size)

    def bucket_options(self) -> dict[str, Any]:
        weights = {"weights": "staleness", "weight_parameter": self.alpha} if self.weights == "staleness" else {}
        return super().bucket_options() | weights


@dataclass(frozen=True, repr=False)
class WeightedAverage(_ModelPolicy):
    """Ranks train separately, and periodically average their models, weighted by each rank's steps (WP-SGD).

    When the fastest rank has taken `period` steps, slower ranks finish only their present step before the average. The
    model of a rank that has taken T steps fewer than the fastest since the last average has the weight contraction^T.

    Args:
        period: steps of the fastest rank between two averages, 1 or more.
        contraction: factor by which a step shrinks the distance to the solution, above 0 and at most 1. 1 is the plain
            average. For a loss with strong convexity lambda, and a learning rate eta, the factor is at most
            1 - lambda * eta. `horovod_partial.exchange.wp_sgd.estimate_contraction` estimates the factor from losses.
        average, overlap: same as in `GroupAverage`.
    """

    period: int
    contraction: float
    average: tuple[str, ...] = ("parameters",)
    overlap: bool | str = False

    def __post_init__(self) -> None:
        require_count("period", self.period, 1)
        _check_share("contraction", self.contraction)
        self._check_average()

    def to_core(self, size: int) -> _core.Policy:
        return _core.Policy(quorum=size, max_staleness=FOR_EVER)

    def bucket_options(self) -> dict[str, Any]:
        return {**super().bucket_options(), "weights": "contraction", "weight_parameter": self.contraction}


GradientPolicy = Full | Solo | Majority | Quorum | WorkSharing
ModelPolicy = GroupAverage | PartialReduce | WeightedAverage
Policy = GradientPolicy | ModelPolicy


# The policies by the names that `parse` knows, such as `work_sharing` for `WorkSharing`.
_BY_NAME: dict[str, type[Policy]] = {
    re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in get_args(Policy)
}


def parse(text: str) -> Policy:
    """Return the policy that a text names.

    The text is the policy's name and, after a colon, its arguments: by position or by name, with commas in between.

    Examples: `solo`, `majority:random`, `majority:max_staleness=4`, `quorum:0.75,grace_ms=0,missed=latest`,
    `group_average:4,period=20`, `weighted_average:8,contraction=0.999`.
    """
    name, _, arguments = text.strip().lower().partition(":")
    if name not in _BY_NAME:
        raise ValueError(f"unknown sync policy {text!r}; known are {', '.join(_BY_NAME)}")
    kind = _BY_NAME[name]
    try:
        return kind(**_named(kind, [each.strip() for each in arguments.split(",")] if arguments else []))
    except ValueError as error:
        raise ValueError(f"invalid sync policy {text!r}: {error}; {_form(name, kind)}") from None


def _named(kind: type[Policy], arguments: list[str]) -> dict[str, Any]:
    """Return the arguments in a policy's text as a dict from names to values."""
    options = _options_in_texts(kind)
    by_position = [each.name for each in options if not each.kw_only]
    known = {each.name for each in options}
    named: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if not equals:
            if index >= len(by_position):
                raise ValueError(f"{argument!r} has no key")
            key, value = by_position[index], argument
        if key not in known:
            raise ValueError(f"there is no {key!r}")
        if key in named:
            raise ValueError(f"{key} is given twice")
        named[key] = _value(value)
    missing = [each.name for each in options if each.default is MISSING and each.name not in named]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given")
    return named


def _options_in_texts(kind: type[Policy]) -> list[Field[Any]]:
    """Return the options of a policy that a text can give: those that are numbers, words or flags."""
    return [
        each for each in _options(kind) if {"int", "float", "str", "bool", "None"}.issuperset(each.type.split(" | "))
    ]


def _value(text: str) -> Any:
    """Convert one argument of a policy's text to a number, None, True or False. Any other text stays a text."""
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return {"none": None, "true": True, "false": False}.get(text, text)


def _form(name: str, kind: type[Policy]) -> str:
    """Return a sentence for errors that lists which arguments a policy's text may have."""
    options = [
        each.name.upper() if each.default is MISSING else f"{each.name}={each.default}".lower()
        for each in _options_in_texts(kind)
    ]
    return f"{name} takes {', '.join(options)}" if options else f"{name} takes nothing"


def resolve(sync: Policy | str | None, default: Policy | str, *, shares_work: bool = False) -> Policy:
    """Return the policy that `sync` stands for. `sync` is a policy, a policy's text, or None for `default`.

    Raises ValueError if `sync` is not a policy, or is `WorkSharing` while `shares_work` is False.
    """
    chosen = default if sync is None else sync
    if isinstance(chosen, str):
        chosen = parse(chosen)
    require(isinstance(chosen, Policy), "sync", "a policy such as hvd.Majority(), or its name", chosen)
    if isinstance(chosen, WorkSharing) and not shares_work:
        raise ValueError(
            f"{chosen!r} is for hvd.DistributedOptimizer in PyTorch and Keras: it shares the micro-batches between two updates"
        )
    return chosen


def describe(policy: Policy | SharedUpdates, size: int) -> str:
    """Describe a policy by a text. Ranks compare these texts, so equal policies must have equal texts on all ranks."""
    schedule = getattr(policy, "schedule", None)
    if isinstance(schedule, Schedule):  # a schedule's `repr` has a function's address, which differs between ranks
        digest = hashlib.sha256(repr(schedule.to_core(size).table).encode()).hexdigest()[:8]
        return repr(policy).replace(repr(schedule), f"Schedule(rounds={schedule.rounds}, groups {digest})")
    return repr(policy)
