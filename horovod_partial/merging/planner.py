"""Measures what messages cost, and plans which gradients travel together: `merging=hvd.MergedGradients`."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from horovod_partial import merging
from horovod_partial.merging import MergedGradients, MergingPlan, MessageCost
from horovod_partial.merging.steps import StepTimes

# Sizes of the messages whose times are measured: 32 KiB to 2 MiB, same as in the released code of MG-WFBP.
_PROBE_BYTES = tuple(2**n for n in range(15, 22))
_PROBES = 20  # how many messages of each size are measured
_ATTEMPTS = 3  # the most attempts to measure what messages cost; an attempt fails if the machine is busy


@dataclass(frozen=True)
class Gradient:
    """What a planner of merged gradients knows of one gradient. The name is the same on every rank.

    `kind` is dtype and device, the same for all gradients in a message. `nbytes` bytes travel for this gradient.
    """

    name: str
    kind: Hashable
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Collectives(Protocol):
    """The collectives by which ranks plan merged gradients together. All ranks make equal calls, with equal names."""

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        """Return a function that sums a tensor of `nbytes` bytes over the ranks, in the same way as the training.

        The function waits for the sum. It returns False if the sum does not contain this rank's contribution. The time
        of such a call says nothing about the cost of a message.
        """

    def from_rank_0(self, value: Any, name: str) -> Any:
        """Send a value of rank 0 to all ranks, and return it. `value` is ignored on the other ranks."""

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        """Return the rows of all ranks, by rank. A row has signed 64-bit integers, the same number on all ranks."""


class Planner:
    """Plans which gradients of one training travel together. The caller counts and measures the steps.

    Under the rule `"measured"` each plan is tried for some steps, and the fastest is kept. `plan` is the plan in use;
    None before there is one. `is_on_trial` is True while plans are tried in turn. `gradients` are in the order of the
    model, and `name` is the prefix of the names of the training's buckets.
    """

    def __init__(self, options: MergedGradients, gradients: Sequence[Gradient], name: str) -> None:
        self.plan: MergingPlan | None = None
        self._options = options
        self._gradients = {gradient.name: gradient for gradient in gradients}
        self._name = name
        self._given = options.plan
        self.is_on_trial = False
        self._untried: list[MergingPlan] = []
        self._tried: list[MergingPlan] = []

    @property
    def meeting(self) -> str:
        """The name of the bucket with which ranks wait for each other.

        A slow rank may wait in a round of gradients while other ranks wait for that rank in this bucket. Rank 0 then
        closes the round of the bucket whose name sorts first (docs/protocol.md, rule 7). This must be the round of
        gradients, so the present name sorts after the names of all buckets of gradients.
        """
        return f"{self._name}.wait"

    @property
    def probes(self) -> dict[str, int]:
        """The names of the buckets that measure what a message costs, with their sizes in bytes."""
        return {f"{self._name}.probe.{nbytes}": nbytes for nbytes in _PROBE_BYTES}

    @property
    def steps_to_next(self) -> int | None:
        """The number of steps to take before the next plan is made or tried; None if the present plan stays."""
        if self.plan is not None and not self.is_on_trial:
            return self._options.replan_every
        # The first step under a merging plan is not measured, because it declares the buckets.
        return self._options.warmup_steps + 1 if self._given is None else 1

    def make_plan(self, current: list[list[str]], times: StepTimes, collectives: Collectives) -> list[list[str]] | None:
        """Make or choose the next plan, the same on all ranks. `times` were measured with the messages in `current`.

        Messages are given by the names of their gradients. The result is None if the present messages stay. If the plan
        does not fit the gradients of some rank, every rank raises ValueError.
        """
        if self.is_on_trial:
            self.plan = self._next_on_trial(times, collectives)
        elif isinstance(self._given, MergingPlan):
            self._check(self._given, collectives)
            self.plan, self._given = replace(self._given, measured=None), None
        else:
            self._agree("", [list(self._gradients.values())], collectives)
            for _ in range(_ATTEMPTS):
                cost = collectives.from_rank_0(self._measure_cost(collectives), f"{self._name}.cost")
                if isinstance(cost, MessageCost):
                    break
            ready, around = self._slowest(times, collectives)
            plans = collectives.from_rank_0(self._plans(current, ready, around, cost), f"{self._name}.plan")
            if plans:
                self.plan, *self._untried = plans
                self.is_on_trial = bool(self._untried)
        assert self.plan is not None
        messages = self.plan.names()
        return messages if messages != current else None

    def measured(self, times: StepTimes) -> None:
        """Record the times of steps whose gradients travelled by the present plan."""
        if self.plan is not None:
            self.plan = replace(self.plan, measured=times.step_seconds())

    def _next_on_trial(self, times: StepTimes, collectives: Collectives) -> MergingPlan:
        """Record how long steps took under the present plan. Returns the next plan to try, or else the fastest plan."""
        assert self.plan is not None
        rows = collectives.gather([round(1e9 * times.step_seconds())], f"{self._name}.seconds")
        seconds = 1e-9 * statistics.fmean(nanoseconds for (nanoseconds,) in rows)
        self._tried.append(replace(self.plan, measured=seconds))
        if self._untried:
            return self._untried.pop(0)
        fastest = min(self._tried, key=lambda plan: plan.measured or 0.0)
        self._tried, self.is_on_trial = [], False
        return fastest

    def _slowest(self, times: StepTimes, collectives: Collectives) -> tuple[dict[str, float], float]:
        """Return when the slowest rank has computed each gradient, earliest first, and the longest time around a step.

        Under `Full()` a message begins when every rank has computed its last gradient. Other policies wait for fewer.
        """
        row = [round(1e9 * seconds) for seconds in (*times.ready(), times.around_seconds())]
        rows = collectives.gather(row, f"{self._name}.times")
        *slowest, around = (1e-9 * max(column) for column in zip(*rows, strict=True))
        ready = sorted(zip(self._gradients, slowest, strict=True), key=lambda item: item[1])
        return dict(ready), around

    def _measure_cost(self, collectives: Collectives) -> MessageCost | str:
        """Measure the cost of a message, or return why it could not be measured. Every rank must call this."""
        seconds: dict[int, list[float]] = {nbytes: [] for nbytes in _PROBE_BYTES}
        probes = {nbytes: collectives.probe(name, nbytes) for name, nbytes in self.probes.items()}
        # A message waits for Horovod's next cycle. Back to back, messages of most sizes would all take one whole cycle.
        # So the messages whose time is measured begin at times that are spread over a cycle.
        cycle = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1e3
        for number in range(_PROBES + 1):
            for nbytes, probe in probes.items():
                time.sleep(cycle * (number + 0.5) / (_PROBES + 1))
                start = time.perf_counter()
                in_time = probe()
                if in_time and number > 0:  # ignore a bucket's first round, in which all ranks wait for each other
                    seconds[nbytes].append(time.perf_counter() - start)
        medians = {nbytes: statistics.median(times) for nbytes, times in seconds.items() if times}
        try:
            return MessageCost.fit(list(medians), list(medians.values()))
        except ValueError as error:
            return str(error)

    def _plans(
        self, current: list[list[str]], ready: dict[str, float], around: float, cost: MessageCost | str
    ) -> list[MergingPlan]:
        """Return the plans to try, no two with the same messages.

        If the cost is not known, and a plan made by a rule is in use, the list is empty, so the plan stays. If the cost
        is not known, and no such plan is in use, the list has a plan with the present messages. Under the rule
        `"measured"` the list then also has the plans that need no cost.
        """
        gradients = self._gradients
        tries = self._options.rule == "measured"
        rules: tuple[str, ...] = merging.TRIED if tries else (self._options.rule,)
        plans = []
        if isinstance(cost, str):
            if self.plan is not None and not self.plan.reason:
                return []
            rules = merging.TRIED_WITHOUT_COST if tries else ()
            names = [name for message in current for name in message]
            unmerged = MergingPlan(
                rule=self._options.rule,
                gradients=tuple(names),
                nbytes=tuple(gradients[name].nbytes for name in names),
                ready=tuple(ready[name] for name in names),
                messages=tuple(map(len, current)),
                around=around,
                reason=cost,
            )
            plans.append(unmerged)
        # Sort gradients by dtype and device, because a message has only one dtype and one device.
        kinds = list(dict.fromkeys(gradients[name].kind for name in ready))
        names = sorted(ready, key=lambda name: kinds.index(gradients[name].kind))
        breaks = [i for i in range(1, len(names)) if gradients[names[i]].kind != gradients[names[i - 1]].kind]
        nbytes = [gradients[name].nbytes for name in names]
        moments = [ready[name] for name in names]
        known = None if isinstance(cost, str) else cost
        plans += [merging.plan(rule, names, nbytes, moments, known, breaks=breaks, around=around) for rule in rules]
        by_messages: dict[str, MergingPlan] = {}
        for plan in plans:
            by_messages.setdefault(repr(plan.names()), plan)
        return list(by_messages.values())

    def _check(self, planned: MergingPlan, collectives: Collectives) -> None:
        """Check that all ranks can follow a plan that the user gave. Every rank must call this.

        Raises ValueError if a rank cannot follow the plan, or ranks have different plans or models.
        """
        gradients = self._gradients
        messages: list[list[Gradient]] = []
        problem = ""
        if sorted(planned.gradients) != sorted(gradients):
            missing = sorted(set(gradients).symmetric_difference(planned.gradients))
            problem = f"the merging plan is for other parameters: {', '.join(missing[:3])} and so on"
        elif planned.reason:
            problem = "the merging plan only repeats buckets, because its times were refused"
        else:
            messages = [[gradients[name] for name in message] for message in planned.names()]
            if any(len({gradient.kind for gradient in message}) > 1 for message in messages):
                problem = "the merging plan mixes dtypes or devices in a message"
        self._agree(problem, messages, collectives)

    def _agree(self, problem: str, plan: list[list[Gradient]], collectives: Collectives) -> None:
        """Raise ValueError on every rank if a rank has a problem, or if `plan` is not equal on all ranks."""
        # Ranks may number their devices differently. So compare which gradients have equal devices and dtypes.
        kinds = list(dict.fromkeys(one.kind for message in plan for one in message))
        shapes = [[(one.name, one.shape, one.dtype, kinds.index(one.kind)) for one in message] for message in plan]
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
