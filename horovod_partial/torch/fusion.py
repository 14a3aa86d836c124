"""When PyTorch's optimizer measures and plans its buckets, and by which collectives: `fusion=hvd.MergedGradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allgather

from horovod_partial.exchange.fusion import FusedTraining
from horovod_partial.fusion import MergedGradients
from horovod_partial.fusion.planner import Gradient
from horovod_partial.torch.buckets import kind
from horovod_partial.torch.model_operations import average_over_all_
from horovod_partial.torch.operations import runtime


class Fusion(FusedTraining):
    """The gradients of one optimizer that travel by a plan.

    Hooks call `gradient` in autograd's threads, the application's thread all else; never at the same time.

    Args:
        options: the user's.
        names: of the parameters that are trained, in the order of the model.
        process_set: the ranks that take part.
        name: prefix of the buckets' names.
        messages: the parameters of each bucket before there is a plan.
        wire_bytes: of a parameter's gradient.
    """

    runtime = runtime

    def __init__(
        self,
        options: MergedGradients,
        names: dict[torch.nn.Parameter, str],
        process_set: ProcessSet,
        name: str,
        messages: Sequence[Sequence[torch.nn.Parameter]],
        wire_bytes: Callable[[torch.nn.Parameter], int],
    ) -> None:
        self._parameters = list(names)
        self._positions = {parameter: position for position, parameter in enumerate(names)}
        self._due = False
        gradients = [Gradient(name, kind(p), tuple(p.shape), str(p.dtype), wire_bytes(p)) for p, name in names.items()]
        positions = [[self._positions[parameter] for parameter in message] for message in messages]
        super().__init__(name, options, process_set, gradients, positions)
        runtime.enter(self._steps, process_set.process_set_id)

    @property
    def buckets(self) -> dict[str, list[torch.nn.Parameter]]:
        """The parameters of each bucket, by its name."""
        return {name: [self._parameters[i] for i in message] for name, message in self.messages.items()}

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is there, once its device is through with it."""
        if parameter.is_cuda and self._steps.measures():
            torch.cuda.synchronize(parameter.device)
        self._steps.record_gradient(self._positions[parameter], parameter.numel())

    def synchronized(self) -> None:
        """All results of a step are there."""
        self._due = self._steps.step_ended() or self._due

    def is_due(self) -> bool:
        """Whether it is time to plan, on this rank and on all others; once for each time."""
        due, self._due = self._due, False
        return due


class Collectives:
    """PyTorch's `horovod_partial.fusion.planner.Collectives`, made when it is time to plan.

    Args:
        process_set: the ranks that take part.
        reduce: sums a tensor over the ranks in the way that the training takes, under a name, and waits; False if what
            came back was not made with this rank's contribution, so that its time tells nothing.
        device: of the tensors that measure what a message costs.
    """

    def __init__(
        self, process_set: ProcessSet, reduce: Callable[[str, torch.Tensor], bool], device: torch.device
    ) -> None:
        self._process_set = process_set
        self._reduce = reduce
        self._device = device

    def everybody_is_here(self, name: str) -> bool:
        info = average_over_all_(torch.zeros(1), name, self._process_set).info()
        return not info.late and info.fresh == runtime.size_of(self._process_set)

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        tensor = torch.zeros(nbytes // 4, device=self._device)
        return lambda: self._reduce(name, tensor)

    def from_rank_0(self, value: Any, name: str) -> Any:
        root = self._process_set.ranks[0] if self._process_set.ranks else 0
        return broadcast_object(value, root, name, process_set=self._process_set)

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        rows: list[list[int]] = allgather(torch.tensor([row]), name=name, process_set=self._process_set).tolist()
        return rows
