"""Measures and plans the buckets of an optimizer of PyTorch: `merging=hvd.MergedGradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allgather

from horovod_partial import _attach
from horovod_partial.merging import MergedGradients, MergingPlan
from horovod_partial.merging.planner import Gradient, Planner
from horovod_partial.merging.steps import Steps
from horovod_partial.policies import Quorum
from horovod_partial.torch.buckets import kind
from horovod_partial.torch.model_operations import arrive
from horovod_partial.torch.operations import runtime


class Merging:
    """The gradients of one optimizer, and the plan by which they travel. A new plan may come between two steps.

    Each optimizer makes a new object after each `hvd.init()`. Gradient hooks call `gradient` in autograd's threads. The
    application's thread calls all other methods, and never at the same time.

    `names` has the trained parameters in the order of the model. `messages` has the parameters of each bucket before
    the first plan. `buckets` has those of the present buckets, by the bucket's name, which begins with `name`.
    `wire_bytes` returns how many bytes of a parameter's gradient travel.
    """

    def __init__(
        self,
        options: MergedGradients,
        names: dict[torch.nn.Parameter, str],
        process_set: ProcessSet,
        name: str,
        messages: Sequence[Sequence[torch.nn.Parameter]],
        wire_bytes: Callable[[torch.nn.Parameter], int],
    ) -> None:
        self._options = options
        self._process_set = process_set
        self._name = name
        self._names = names
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._positions = {parameter: position for position, parameter in enumerate(names)}
        gradients = [Gradient(name, kind(p), tuple(p.shape), str(p.dtype), wire_bytes(p)) for p, name in names.items()]
        self._planner = Planner(options, gradients, name)
        self._steps = Steps(len(names), self._planner.steps_to_next, options.warmup_steps)
        self._due = False
        self._plans = 0
        self._rounds_before = 0  # the number of rounds that this rank took in the buckets of earlier plans
        self._use(name, messages)

    def _use(self, prefix: str, messages: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.buckets = {f"{prefix}.{index}": message for index, message in enumerate(messages)}
        owner = _attach.Owner()
        runtime.family(self._process_set, [*self.buckets, self._planner.meeting]).own(owner)
        self._owner = owner  # the previous plan's buckets end, because this drops their owner

    @property
    def plan(self) -> MergingPlan | None:
        """The plan by which gradients travel now; None before the first plan."""
        plan = self._planner.plan
        if plan is not None and plan.measured is None:
            times = self._steps.first()
            if times.steps == self._options.warmup_steps:
                self._planner.measured(times)
        return self._planner.plan

    @property
    def rounds(self) -> int:
        """How many rounds this rank has taken, including the rounds of earlier plans."""
        return self._rounds_before + runtime.family(self._process_set, self.buckets).taken

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        """Record when backward has made a parameter's gradient. While gradients are timed, wait for the GPU first."""
        if parameter.is_cuda and self._steps.is_measured and not self._planner.is_on_trial:
            torch.cuda.synchronize(parameter.device)
        self._steps.record(self._positions[parameter])

    def synchronized(self) -> None:
        """Note that this rank has received all results of a step: the measured time of the step ends here."""
        self._due = self._steps.end_step() or self._due

    def is_due(self) -> bool:
        """Return whether a new plan of merged gradients is due: True once for each, at the same step on all ranks."""
        due, self._due = self._due, False
        return due

    def replan(self, collectives: Collectives, flush: Callable[[], None]) -> bool:
        """Decide anew, between two steps, which gradients travel together in one message.

        Returns whether `buckets` changed. Calls `flush` before it makes the new plan. If some rank does not train now,
        for example because it waits in a flush or a join, this makes no plan and does not call `flush`. Then the
        present plan stays for `replan_every` further steps, or for ever if `replan_every` is None.
        """
        if not collectives.everybody_is_here(self._planner.meeting):
            self._steps.begin_plan(self._options.replan_every)
            return False
        flush()
        current = [[self._names[parameter] for parameter in message] for message in self.buckets.values()]
        probes = _attach.Owner()
        runtime.family(self._process_set, self._planner.probes).own(probes)
        messages = self._planner.make_plan(current, self._steps.last(), collectives)
        del probes
        self._plans += 1
        if messages is not None:
            self._rounds_before = self.rounds  # this number is equal on all ranks, because they have just flushed
            parameters = [[self._parameters[name] for name in message] for message in messages]
            self._use(f"{self._name}.plan{self._plans}", parameters)
        self._steps.begin_plan(self._planner.steps_to_next)
        return messages is not None


@dataclass
class Collectives:
    """The collectives by which ranks plan merged gradients, in PyTorch.

    `reduce` sums a tensor under a name over the ranks, in the same way as the training, and waits. It returns False if
    the sum lacks this rank's contribution. The tensors by which ranks measure the cost of a message lie on `device`.
    """

    process_set: ProcessSet
    reduce: Callable[[str, torch.Tensor], bool]
    device: torch.device

    def everybody_is_here(self, name: str) -> bool:
        """Wait for all ranks that train. Returns False if some rank does not train, for example in a flush or a join.

        So call this before a flush of all ranks. Raises HorovodInternalError if the absent rank has never called this.
        """
        model = torch.zeros(1, device="cpu")
        handle = arrive(model, model, name, Quorum(1.0), self.process_set)
        handle.synchronize()
        info = handle.info()
        return not info.late and info.fresh == runtime.size_of(self.process_set)

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        tensor = torch.zeros(nbytes // 4, device=self.device)
        return lambda: self.reduce(name, tensor)

    def from_rank_0(self, value: Any, name: str) -> Any:
        root = self.process_set.ranks[0] if self.process_set.ranks else 0
        return broadcast_object(value, root, name, process_set=self.process_set)

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        rows: list[list[int]] = allgather(
            torch.tensor([row], device="cpu"), name=name, process_set=self.process_set
        ).tolist()
        return rows
