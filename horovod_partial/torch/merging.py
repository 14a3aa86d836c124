"""Measures and plans the buckets of an optimizer of PyTorch: `merging=hvd.MergedGradients`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allgather

from horovod_partial.exchange.merging import FusedTraining
from horovod_partial.merging import MergedGradients
from horovod_partial.merging.planner import Gradient
from horovod_partial.policies import Quorum
from horovod_partial.torch.buckets import kind
from horovod_partial.torch.model_operations import arrive
from horovod_partial.torch.operations import runtime


class Merging(FusedTraining):
    """The gradients of one optimizer of PyTorch, and the measured plan by which they travel.

    Gradient hooks call `gradient` in autograd's threads. The application's thread calls all other methods, and never at
    the same time.

    Args:
        options: the user's argument `merging`.
        names: the trained parameters with their names, in the order of the model.
        process_set: the ranks that take part.
        name: prefix of the buckets' names.
        messages: the parameters of each bucket before there is a plan.
        wire_bytes: returns how many bytes of a parameter's gradient travel.
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
        """The parameters of each bucket, by the name of the bucket."""
        return {name: [self._parameters[i] for i in message] for name, message in self.messages.items()}

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        """Note that backward has made a parameter's gradient. While steps are measured, wait for its device first."""
        if parameter.is_cuda and self._steps.measures():
            torch.cuda.synchronize(parameter.device)
        self._steps.record_gradient(self._positions[parameter], parameter.numel())

    def synchronized(self) -> None:
        """Note that all results of a step are there, so that the step's time ends."""
        self._due = self._steps.step_ended() or self._due

    def is_due(self) -> bool:
        """Return whether a new plan of merged gradients is due: True once for each plan, at the same step on all ranks."""
        due, self._due = self._due, False
        return due


class Collectives:
    """The collectives by which ranks plan merged gradients, in PyTorch.

    Args:
        process_set: the ranks that take part.
        reduce: sums a tensor over the ranks under a name, in the same way as the training, and waits. It returns False
            if the sum does not contain this rank's contribution.
        device: the device of the tensors that measure what a message costs.
    """

    def __init__(
        self, process_set: ProcessSet, reduce: Callable[[str, torch.Tensor], bool], device: torch.device
    ) -> None:
        self._process_set = process_set
        self._reduce = reduce
        self._device = device

    def everybody_is_here(self, name: str) -> bool:
        model = torch.zeros(1)
        handle = arrive(model, model, name, Quorum(1.0), self._process_set)
        handle.synchronize()
        info = handle.info()
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
