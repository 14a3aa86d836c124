"""Gradients that travel by a measured plan (`merging=hvd.MergedGradients`): the part that all frameworks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.exchange.family import Family
from horovod_partial.merging import MergedGradients, MergingPlan
from horovod_partial.merging.planner import Collectives, Gradient, Planner, StepTimes
from horovod_partial.runtime.runtime import Runtime


class FusedTraining:
    """The gradients of one optimizer or tape, and the plan by which they travel. A new plan may come between two steps.

    C++ counts the steps and keeps their times (`cpp/core/merging/merging_steps.h`), because a graph of TensorFlow runs
    without Python until the next plan is due. Each framework has a subclass that sets `runtime`.

    Args:
        name: prefix of the buckets' names; the same on every rank.
        options: the user's argument `merging`.
        process_set: the ranks that take part.
        gradients: name, shape and type of each gradient.
        messages: which gradients travel together before there is a plan: for each message, positions in `gradients`.
    """

    runtime: Runtime

    def __init__(
        self,
        name: str,
        options: MergedGradients,
        process_set: ProcessSet,
        gradients: Sequence[Gradient],
        messages: list[list[int]],
    ) -> None:
        self.name = name
        self.options = options
        self.process_set = process_set
        self._names = [gradient.name for gradient in gradients]
        self._default = messages
        self._planner = Planner(options, gradients, name)
        elements = [math.prod(gradient.shape) for gradient in gradients]
        self._steps = _attach.SharedSteps(name, elements, messages, self._planner.first_due, options.warmup_steps)
        self._plans = 0  # number of plans made in this generation of Horovod
        self._rounds_before = 0  # number of rounds in the buckets of earlier plans
        self._use(name, messages)

    def _use(self, prefix: str, messages: list[list[int]]) -> None:
        # For the name of each bucket, the positions of the gradients that travel in it.
        self.messages = {f"{prefix}.{index}": message for index, message in enumerate(messages)}
        owner = _attach.Owner()
        self._own(owner, [*self.messages, self._planner.meeting])
        # Drop the owner of the old buckets. So they end, except the one in which ranks wait for each other.
        self._owner = owner

    def _own(self, owner: _attach.Owner, names: Iterable[str]) -> None:
        self.runtime.own(owner, self.process_set.process_set_id, names)

    @property
    def plan(self) -> MergingPlan | None:
        """The plan by which gradients travel now; None before there is one."""
        plan = self._planner.plan if self._steps.plans > 0 else None
        if plan is not None and plan.measured is None:
            times = self._measured(first=True)
            if times.steps == self.options.warmup_steps:
                self._planner.measured(times)
                plan = self._planner.plan
        return plan

    @property
    def rounds(self) -> int:
        """How many rounds have ended on this rank in all buckets, including buckets of earlier plans."""
        self.forget_an_old_plan()
        return self._rounds_before + Family(self.runtime, self.process_set, self.messages).taken

    def forget_an_old_plan(self) -> None:
        """Drop a plan of an earlier generation, because ranks that are new in an elastic job do not know it."""
        if self._steps.plans < self._plans:
            self._planner.restart()
            self._plans = self._rounds_before = 0
            self._use(self.name, self._default)

    def everybody_is_here(self, collectives: Collectives) -> bool:
        """Wait for all ranks before a new plan. Returns False if a rank has left: then the present plan stays."""
        return collectives.everybody_is_here(self._planner.meeting)

    def replan(self, collectives: Collectives) -> bool:
        """Make a new plan, between two steps, after all ranks have flushed. Returns whether `messages` have changed."""
        current = [[self._names[i] for i in message] for message in self.messages.values()]
        probes = _attach.Owner()
        self._own(probes, self._planner.probes)
        names = self._planner.make_plan(current, self._measured(first=False), collectives)
        del probes
        messages = None
        if names is not None:
            positions = {name: position for position, name in enumerate(self._names)}
            messages = [[positions[name] for name in message] for message in names]
            self._rounds_before = self.rounds  # a number equal on all ranks, because they have just flushed
            self._use(f"{self.name}.plan{self._plans + 1}", messages)
        self._steps.plan(messages, self.options.replan_every)
        self._plans += 1
        return names is not None

    def _measured(self, *, first: bool) -> StepTimes:
        return StepTimes(self._names, self._steps.times(first=first))
