"""Measures a training, and plans which gradients travel together: `merging=hvd.MergedGradients`, in every framework."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from horovod_partial import merging
from horovod_partial.merging import MergedGradients, MergingPlan, MessageCost

# Sizes of the messages whose times are measured: 32 KiB to 2 MiB, same as in the released code of MG-WFBP.
_PROBE_BYTES = tuple(2**n for n in range(15, 22))
_PROBES = 20  # how many messages of each size are measured
_ATTEMPTS = 3  # how often to try to measure, because a machine may be busy for a moment
# A new plan must take at most this share of the old plan's time, because replacing buckets costs a round of all ranks.
_WORTH_IT = 0.95


@dataclass(frozen=True)
class Gradient:
    """What a planner of merged gradients knows of one gradient.

    Attributes:
        name: the name of the gradient, the same on every rank.
        kind: the gradient's dtype and device. All gradients in a message have the same.
        shape: the shape of the gradient.
        dtype: the name of the dtype.
        nbytes: the number of bytes that travel for this gradient.
    """

    name: str
    kind: Hashable
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Collectives(Protocol):
    """The collectives by which ranks plan merged gradients together. All ranks make the same calls, by the same names."""

    def everybody_is_here(self, name: str) -> bool:
        """Wait for all ranks. Returns False if a rank has left.

        Call it before a flush, because ranks that have stopped training may be in another flush.

        Raises:
            HorovodInternalError: a rank has left without ever calling this.
        """

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        """Return a function that sums a tensor of `nbytes` bytes over the ranks, in the same way as the training.

        The function waits for the sum. It returns False if the sum does not contain this rank's contribution; then its
        time says nothing about the cost of a message.
        """

    def from_rank_0(self, value: Any, name: str) -> Any:
        """Send a value of rank 0 to all ranks, and return it. `value` is ignored on the other ranks."""

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        """Return the rows of all ranks, by rank. A row is a list of signed 64-bit integers, equally long on all ranks."""


class StepTimes:
    """The times of successive steps on one rank: when each gradient was computed, and when the last result was there.

    Args:
        names: names of the gradients.
        rows: one row for each step, in seconds on one clock: the time of each gradient (NaN for a gradient that the step
            did not compute), then the time of the last result. A step begins when the step before has ended, so the
            first step is not measured.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
        self._steps: list[float] = []
        self._around: list[float] = []
        self._behind: dict[str, list[float]] = {}  # for each gradient, its seconds after the step's first gradient
        for (*_, begin), (*moments, end) in itertools.pairwise(rows):
            came = {name: at for name, at in zip(names, moments, strict=True) if not math.isnan(at)}
            if not came:
                continue
            first = min(came.values())
            self._steps.append(end - begin)
            self._around.append(first - begin)
            for name, at in came.items():
                self._behind.setdefault(name, []).append(at - first)

    @property
    def steps(self) -> int:
        """How many steps have been measured."""
        return len(self._steps)

    def step_seconds(self) -> float:
        """Return the median time of the measured steps."""
        return statistics.median(self._steps)

    def around_seconds(self) -> float:
        """Return the median time from the last result of a step to the first gradient of the next step."""
        return statistics.median(self._around)

    def ready(self, names: Sequence[str]) -> dict[str, float]:
        """Return the median time at which each gradient is computed, in seconds after the first one, earliest first.

        A gradient that was never computed gets the latest time.
        """
        medians = {name: statistics.median(values) for name, values in self._behind.items()}
        latest = max(medians.values(), default=0.0)
        ready = {name: medians.get(name, latest) for name in names}
        return dict(sorted(ready.items(), key=lambda item: item[1]))


class Planner:
    """Plans which gradients of one training travel together. The caller counts and measures the steps.

    Args:
        options: the user's argument `merging`.
        gradients: the gradients in the order of the model.
        name: prefix of the names of the training's buckets.

    Attributes:
        plan: the plan in use; None before there is one.
    """

    def __init__(self, options: MergedGradients, gradients: Sequence[Gradient], name: str) -> None:
        self.plan: MergingPlan | None = None
        self._options = options
        self._gradients = {gradient.name: gradient for gradient in gradients}
        self._name = name
        self._given = options.plan

    @property
    def meeting(self) -> str:
        """The name of the bucket with which ranks wait for each other."""
        return f"{self._name}.everybody"

    @property
    def probes(self) -> dict[str, int]:
        """The names of the buckets that measure what a message costs, with their sizes in bytes."""
        return {f"{self._name}.probe.{nbytes}": nbytes for nbytes in _PROBE_BYTES}

    @property
    def first_due(self) -> int:
        """The number of steps to take before the first plan is made."""
        return self._options.warmup_steps + 1 if self._given is None else 1

    def restart(self) -> None:
        """Forget the plan, because a new generation of Horovod may have new ranks, which do not know it."""
        self.plan, self._given = None, self._options.plan

    def make_plan(self, current: list[list[str]], times: StepTimes, collectives: Collectives) -> list[list[str]] | None:
        """Plan on rank 0 which gradients travel together, and give the plan to all ranks.

        Args:
            current: the names of the gradients in each message that is in use.
            times: the times that were measured with these messages.
            collectives: the front end's collectives.

        Returns:
            The names of the gradients in each new message; None if the present messages stay.

        Raises:
            ValueError: the plan does not fit the gradients of some rank. Every rank raises it.
        """
        planned, self._given = self._given, None
        if not isinstance(planned, MergingPlan):
            for _ in range(_ATTEMPTS):
                cost = collectives.from_rank_0(self._measure_cost(collectives), f"{self._name}.cost")
                if isinstance(cost, MessageCost):
                    break
            planned = collectives.from_rank_0(self._plan(current, times, cost), f"{self._name}.plan")
        messages = self._check(planned, collectives)
        self.plan = planned
        return messages if not planned.reason and messages != current else None

    def measured(self, times: StepTimes) -> None:
        """Note the times of steps whose gradients travelled by the present plan."""
        if self.plan is not None:
            self.plan = replace(self.plan, measured=times.step_seconds())

    def _measure_cost(self, collectives: Collectives) -> MessageCost | str:
        """Measure the cost of a message, or return why it could not be measured. Every rank must call this."""
        seconds: dict[int, list[float]] = {nbytes: [] for nbytes in _PROBE_BYTES}
        probes = {nbytes: collectives.probe(name, nbytes) for name, nbytes in self.probes.items()}
        # A message waits for Horovod's next cycle. If each probe began just after the one before, all would wait for a
        # whole cycle, and most sizes would take the same time. So probes begin at times spread evenly over a cycle.
        cycle = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1e3
        for number in range(_PROBES + 1):
            for nbytes, probe in probes.items():
                time.sleep(cycle * (number + 0.5) / (_PROBES + 1))
                start = time.perf_counter()
                in_time = probe()
                if in_time and number > 0:  # not a bucket's first round, in which ranks wait for each other
                    seconds[nbytes].append(time.perf_counter() - start)
        medians = {nbytes: statistics.median(times) for nbytes, times in seconds.items() if times}
        try:
            return MessageCost.fit(list(medians), list(medians.values()))
        except ValueError as error:
            return str(error)

    def _plan(self, current: list[list[str]], times: StepTimes, cost: MessageCost | str) -> MergingPlan:
        gradients = self._gradients
        ready = times.ready(list(gradients))
        if isinstance(cost, str):
            names = [name for message in current for name in message]
            return MergingPlan(
                rule=self._options.rule,
                gradients=tuple(names),
                nbytes=tuple(gradients[name].nbytes for name in names),
                ready=tuple(ready[name] for name in names),
                messages=tuple(map(len, current)),
                around=times.around_seconds(),
                reason=cost,
            )
        # Sort by dtype and device, because a message can only have one of each.
        kinds = list(dict.fromkeys(gradients[name].kind for name in ready))
        names = sorted(ready, key=lambda name: kinds.index(gradients[name].kind))
        breaks = [i for i in range(1, len(names)) if gradients[names[i]].kind != gradients[names[i - 1]].kind]
        made = merging.plan(
            self._options.rule,
            names,
            [gradients[name].nbytes for name in names],
            [ready[name] for name in names],
            cost,
            breaks=breaks,
            around=times.around_seconds(),
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

    def _check(self, planned: MergingPlan, collectives: Collectives) -> list[list[str]]:
        """Check that all ranks can follow a plan. Returns the names of the gradients in each message.

        Every rank must call this.

        Raises:
            ValueError: a rank cannot follow the plan, or ranks have different plans or models.
        """
        gradients = self._gradients
        messages: list[list[str]] = []
        problem = ""
        if sorted(planned.gradients) != sorted(gradients):
            missing = sorted(set(gradients).symmetric_difference(planned.gradients))
            problem = f"the merging plan is for other parameters: {', '.join(missing[:3])} and so on"
        else:
            messages = planned.names()
            if any(len({gradients[name].kind for name in message}) > 1 for message in messages):
                problem = "the merging plan mixes dtypes or devices in a message"
        shapes = [[(name, gradients[name].shape, gradients[name].dtype) for name in message] for message in messages]
        digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
        everybody = collectives.gather([int(bool(problem)), digest], f"{self._name}.check")
        if problem:
            raise ValueError(f"{problem}; measure a new one")
        unfit = [rank for rank, (failed, _) in enumerate(everybody) if failed]
        if unfit:
            raise ValueError(f"the merging plan does not fit the model of ranks {', '.join(map(str, unfit))}")
        different = [rank for rank, (_, theirs) in enumerate(everybody) if theirs != everybody[0][1]]
        if different:
            raise ValueError(
                f"ranks {', '.join(map(str, different))} have another model or another plan than rank 0; build the same "
                "model, with the same merging, on every rank"
            )
        return messages
