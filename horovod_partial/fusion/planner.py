"""Measures a training, and plans which gradients travel together: `fusion=hvd.MergedGradients`, in every framework."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from horovod_partial import fusion
from horovod_partial.fusion import FusionPlan, MergedGradients, MessageCost

# The range of the paper's profiler, 32 KiB to 2 MiB (section 5; the released code).
_PROBE_BYTES = tuple(2**n for n in range(15, 22))
_PROBES = 20  # of each size
_ATTEMPTS = 3  # a machine may be busy for a moment
_WORTH_IT = 0.95  # of the old plan's time: buckets that are replaced cost a round of all ranks


@dataclass(frozen=True)
class Gradient:
    """What a plan has to know of a gradient.

    Attributes:
        name: the same on every rank.
        kind: what gradients in one message have in common: dtype and device.
        shape: its own.
        dtype: its own, as text.
        nbytes: that travel.
    """

    name: str
    kind: Hashable
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Collectives(Protocol):
    """What planning needs of a framework's Horovod. All ranks of the training call the same, under the same names."""

    def everybody_is_here(self, name: str) -> bool:
        """Wait for all ranks; False if one has left.

        Before the ranks flush: those that train no more may be flushing for another reason.

        Raises:
            HorovodInternalError: a rank has left before it ever came here.
        """

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        """What sums a tensor of so many bytes over the ranks in the way that the training takes, and waits.

        It returns False if what came back was not made with this rank's contribution: then its time tells nothing.
        """

    def from_rank_0(self, value: Any, name: str) -> Any:
        """The value of the first rank."""

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        """The rows of all ranks, numbers of 64 bits."""


class Clock:
    """Times of the gradients of some steps, on one rank. Moments are seconds of one clock; None is now.

    Not for several threads at the same time.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next step."""
        self._times: list[dict[str, float]] = []
        self._current: dict[str, float] = {}
        self._around: list[float] = []
        self._steps: list[float] = []
        self._last_end: float | None = None
        self._synchronized = 0.0

    def gradient(self, name: str, moment: float | None = None) -> None:
        """A gradient is there."""
        self._current[name] = time.perf_counter() if moment is None else moment

    def synchronized(self, moment: float | None = None) -> None:
        """All results are there."""
        self._synchronized = time.perf_counter() if moment is None else moment

    def step_ended(self, moment: float | None = None) -> None:
        """A step is over."""
        now = time.perf_counter() if moment is None else moment
        if self._last_end is not None and self._current:
            self._times.append(self._current)
            self._steps.append(now - self._last_end)
            first = min(self._current.values())
            self._around.append(first - self._last_end + now - self._synchronized)
        self._last_end = now
        self._current = {}

    @property
    def steps(self) -> int:
        """Steps that have been measured."""
        return len(self._steps)

    def step_seconds(self) -> float:
        """Median of the measured steps."""
        return statistics.median(self._steps)

    def around_seconds(self) -> float:
        """Median of what of a step is before the first gradient and after the last result."""
        return statistics.median(self._around)

    def ready(self, names: Sequence[str]) -> dict[str, float]:
        """When each gradient is there, in seconds after the first, earliest first; the last moment if it never was."""
        seconds: dict[str, list[float]] = {}
        for times in self._times:
            first = min(times.values())
            for name, moment in times.items():
                seconds.setdefault(name, []).append(moment - first)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        latest = max(medians.values(), default=0.0)
        ready = {name: medians.get(name, latest) for name in names}
        return dict(sorted(ready.items(), key=lambda item: item[1]))


class Planner:
    """Makes the plans of one training. Its steps are counted, and measured, by whoever asks for a plan.

    Args:
        gradients: in the order of the model.
        name: of the training's buckets.
    """

    def __init__(
        self, options: MergedGradients, gradients: Sequence[Gradient], name: str, collectives: Collectives
    ) -> None:
        self.plan: FusionPlan | None = None
        self._options = options
        self._gradients = {gradient.name: gradient for gradient in gradients}
        self._name = name
        self._collectives = collectives
        self._given = options.plan

    @property
    def first_due(self) -> int:
        """Steps before the first plan."""
        return self._options.warmup_steps + 1 if self._given is None else 1

    def restart(self) -> None:
        """Horovod has been initialised anew, perhaps with other ranks: begin as those that are new."""
        self.plan, self._given = None, self._options.plan

    def everybody_is_here(self) -> bool:
        """As in `Collectives`. Where a rank has left no plan can be agreed to, so the one in use stays for good."""
        return self._collectives.everybody_is_here(f"{self._name}.everybody")

    def make_plan(self, current: list[list[str]], clock: Clock) -> list[list[str]] | None:
        """Rank 0 plans, and all ranks get the plan: which gradients travel together.

        Args:
            current: what is in use.
            clock: what was measured under it.

        Returns:
            None if what is in use stays.

        Raises:
            ValueError: the plan does not fit the gradients of some rank; on every rank.
        """
        planned, self._given = self._given, None
        if not isinstance(planned, FusionPlan):
            for _ in range(_ATTEMPTS):
                cost = self._from_rank_0(self._measure_cost(), "cost")
                if isinstance(cost, MessageCost):
                    break
            planned = self._from_rank_0(self._plan(current, clock, cost), "plan")
        messages = self._check(planned)
        self.plan = planned
        return messages if not planned.reason and messages != current else None

    def measured(self, clock: Clock) -> None:
        """These are steps under the plan."""
        if self.plan is not None:
            self.plan = replace(self.plan, measured=clock.step_seconds())

    def _from_rank_0(self, value: Any, what: str) -> Any:
        return self._collectives.from_rank_0(value, f"{self._name}.{what}")

    def _measure_cost(self) -> MessageCost | str:
        """The cost of a message, or why it could not be measured. Every rank takes part."""
        seconds: dict[int, list[float]] = {nbytes: [] for nbytes in _PROBE_BYTES}
        probes = {nbytes: self._collectives.probe(f"{self._name}.probe.{nbytes}", nbytes) for nbytes in _PROBE_BYTES}
        # A message waits for Horovod's next cycle. Probes that began just after the one before had ended would all wait
        # for a whole one, and most sizes would take the same time; these begin anywhere in it, evenly.
        cycle = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1e3
        for number in range(_PROBES + 1):
            for nbytes, probe in probes.items():
                time.sleep(cycle * (number + 0.5) / (_PROBES + 1))
                start = time.perf_counter()
                in_time = probe()
                if in_time and number > 0:  # the first of a name is a round of all ranks
                    seconds[nbytes].append(time.perf_counter() - start)
        medians = {nbytes: statistics.median(times) for nbytes, times in seconds.items() if times}
        try:
            return MessageCost.fit(list(medians), list(medians.values()))
        except ValueError as error:
            return str(error)

    def _plan(self, current: list[list[str]], clock: Clock, cost: MessageCost | str) -> FusionPlan:
        gradients = self._gradients
        ready = clock.ready(list(gradients))
        if isinstance(cost, str):
            names = [name for message in current for name in message]
            return FusionPlan(
                rule=self._options.rule,
                gradients=tuple(names),
                nbytes=tuple(gradients[name].nbytes for name in names),
                ready=tuple(ready[name] for name in names),
                messages=tuple(map(len, current)),
                around=clock.around_seconds(),
                reason=cost,
            )
        # One dtype and device after the other: what is in one message has one.
        kinds = dict.fromkeys(gradients[name].kind for name in ready)
        by_kind = [[name for name in ready if gradients[name].kind == kind] for kind in kinds]
        names = [name for members in by_kind for name in members]
        breaks, at = [], 0
        for members in by_kind[:-1]:
            at += len(members)
            breaks.append(at)
        made = fusion.plan(
            self._options.rule,
            names,
            [gradients[name].nbytes for name in names],
            [ready[name] for name in names],
            cost,
            breaks=breaks,
            around=clock.around_seconds(),
        )
        if self.plan is None or self.plan.reason or sorted(self.plan.gradients) != sorted(made.gradients):
            return made
        old = replace(
            self.plan,
            nbytes=tuple(gradients[name].nbytes for name in self.plan.gradients),
            ready=tuple(ready[name] for name in self.plan.gradients),
            cost=cost,
            around=made.around,
            measured=None,
        )
        return made if made.duration(cost) < _WORTH_IT * old.duration(cost) else old

    def _check(self, planned: FusionPlan) -> list[list[str]]:
        """The plan's messages, if every rank can follow it, and all have the same."""
        gradients = self._gradients
        messages: list[list[str]] = []
        problem = ""
        if sorted(planned.gradients) != sorted(gradients):
            missing = sorted(set(gradients).symmetric_difference(planned.gradients))
            problem = f"the fusion plan is for other parameters: {', '.join(missing[:3])} and so on"
        else:
            messages = planned.names()
            if any(len({gradients[name].kind for name in message}) > 1 for message in messages):
                problem = "the fusion plan mixes dtypes or devices in a message"
        shapes = [[(name, gradients[name].shape, gradients[name].dtype) for name in message] for message in messages]
        digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
        everybody = self._collectives.gather([int(bool(problem)), digest], f"{self._name}.check")
        if problem:
            raise ValueError(f"{problem}; measure a new one")
        unfit = [rank for rank, (failed, _) in enumerate(everybody) if failed]
        if unfit:
            raise ValueError(f"the fusion plan does not fit the model of ranks {', '.join(map(str, unfit))}")
        different = [rank for rank, (_, theirs) in enumerate(everybody) if theirs != everybody[0][1]]
        if different:
            raise ValueError(
                f"ranks {', '.join(map(str, different))} have another model or another plan than rank 0; build the same "
                "model, with the same fusion, on every rank"
            )
        return messages
