"""When PyTorch's optimizer measures and plans its buckets, and by which collectives: `fusion=hvd.MergedGradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allgather

from horovod_partial.fusion import FusionPlan, MergedGradients
from horovod_partial.fusion.planner import Clock, Gradient, Planner
from horovod_partial.policies import Quorum
from horovod_partial.torch.buckets import kind
from horovod_partial.torch.operations import make_config, submit


class Merging:
    """When to measure, and what to do then; for one optimizer.

    Hooks call `gradient` in autograd's threads, the application's thread all else; never at the same time.

    Args:
        names: of the parameters that are trained, in the order of the model.
        name: of the optimizer's buckets.
        reduce: sums a tensor over the ranks in the way that the training takes, under a name, and waits; False if what
            came back was not made with this rank's contribution, so that its time tells nothing.
        wire_bytes: of a parameter's gradient.
    """

    def __init__(
        self,
        options: MergedGradients,
        names: dict[torch.nn.Parameter, str],
        process_set: ProcessSet,
        name: str,
        reduce: Callable[[str, torch.Tensor], bool],
        wire_bytes: Callable[[torch.nn.Parameter], int],
    ) -> None:
        self._options = options
        self._names = names
        self._parameters = {name: parameter for parameter, name in names.items()}
        gradients = [Gradient(name, kind(p), tuple(p.shape), str(p.dtype), wire_bytes(p)) for p, name in names.items()]
        device = next(iter(names)).device
        self._planner = Planner(options, gradients, name, _Collectives(process_set, reduce, device))
        self._start()

    def _start(self) -> None:
        self._clock = Clock()
        self._measuring = True
        self._steps = 0
        self._next = self._planner.first_due
        self._watched = False  # steps under a new plan, until it has been measured

    @property
    def plan(self) -> FusionPlan | None:
        """Which gradients travel together, and why; None before it has been measured."""
        return self._planner.plan

    def restart(self) -> None:
        """Horovod has been initialised anew, perhaps with other ranks: begin as those that are new."""
        self._planner.restart()
        self._start()

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is there, once its device is through with it."""
        if not self._measuring:
            return
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        self._clock.gradient(self._names[parameter])

    def synchronized(self) -> None:
        """All results are there."""
        self._clock.synchronized()

    def step_ended(self) -> bool:
        """A step is over; True if it is time to plan, on this rank and on all others."""
        self._steps += 1
        if self._measuring:
            self._clock.step_ended()
        if self._watched and self._clock.steps >= self._options.warmup_steps:
            self._planner.measured(self._clock)
            self._watched = self._measuring = False
        if self._steps == self._next:
            return True
        if self._steps == self._next - self._options.warmup_steps - 1 and self._options.replan_every is not None:
            self._clock.forget()
            self._measuring = True
        return False

    def everybody_is_here(self) -> bool:
        """Wait for all ranks; False if one has left: it cannot agree to a plan, so this one stays for good."""
        here = self._planner.everybody_is_here()
        if not here:
            self._next = -1
        return here

    def make_plan(self, current: Sequence[Sequence[torch.nn.Parameter]]) -> list[list[torch.nn.Parameter]] | None:
        """As `Planner.make_plan`, with parameters in place of names."""
        messages = self._planner.make_plan([[self._names[p] for p in bucket] for bucket in current], self._clock)
        self._next = self._steps + self._options.replan_every if self._options.replan_every is not None else -1
        self._clock.forget()
        self._measuring = self._watched = True
        return None if messages is None else [[self._parameters[name] for name in message] for message in messages]


class _Collectives:
    """PyTorch's `horovod_partial.fusion.planner.Collectives`."""

    def __init__(
        self, process_set: ProcessSet, reduce: Callable[[str, torch.Tensor], bool], device: torch.device
    ) -> None:
        self._process_set = process_set
        self._reduce = reduce
        self._device = device

    def everybody_is_here(self, name: str) -> bool:
        size = self._process_set.size()
        config = make_config(
            dtype=torch.float32, shape=(1,), sync=Quorum(1.0), size=size, missed="latest", late="discard"
        )
        handle = submit(torch.zeros(1), torch.zeros(1), name, self._process_set, config)
        handle.synchronize()
        info = handle.info()
        return not info.late and info.fresh == size

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        tensor = torch.zeros(nbytes // 4, device=self._device)
        return lambda: self._reduce(name, tensor)

    def from_rank_0(self, value: Any, name: str) -> Any:
        root = self._process_set.ranks[0] if self._process_set.ranks else 0
        return broadcast_object(value, root, name, process_set=self._process_set)

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        rows: list[list[int]] = allgather(torch.tensor([row]), name=name, process_set=self._process_set).tolist()
        return rows
