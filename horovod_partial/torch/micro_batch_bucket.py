"""A bucket under `hvd.WorkSharing`: the sum of the gradients of a rank's micro-batches, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.operations import PartialHandle


class MicroBatchBucket(GradientBucket):
    """A bucket under `hvd.WorkSharing`: the sum of the gradients of all micro-batches of this rank in the open update.

    In an update the core reads only the tensor of the first arrival. So if gradients travel in another dtype, this
    object keeps one tensor of that dtype, and all arrivals use it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made = 0  # how many micro-batches of the open update the bucket's sum contains
        if self.wire_dtype != self.flat.dtype:
            self.wire = torch.empty_like(self.flat, dtype=self.wire_dtype)

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, scale: float) -> bool:
        """Add a gradient, divided by `scale`, to the sum; None is zeros. Returns whether all gradients are in."""
        view = self.views[parameter]
        if view.is_cuda:
            self._streams.add(torch.cuda.current_stream(view.device))
        if self.made == 0:
            self.put(parameter, gradient)
            if scale != 1.0:
                view.div_(scale)
        elif gradient is not None:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            view.add_(dense, alpha=1.0 / scale)
        self.missing.discard(parameter)
        return not self.missing

    def arrive(self, start: Callable[[torch.Tensor], PartialHandle], scale: float) -> None:
        """Arrive with the sum of this rank's gradients in the open update. Call this once in each micro-batch."""
        if self.handle is not None and self.handle.poll():
            # No update ends before this rank's micro-batch. So an operation that has ended has failed: raise its error.
            self.handle.synchronize()
        wire = self.wire
        super().arrive(lambda packed: start(_into(wire, packed)), scale)
        self.wire = wire
        self.made += 1

    def stay(self) -> None:
        """Count a micro-batch whose gradients stay on this rank, because there are no other ranks."""
        self.made += 1
        self._version = self.flat._version

    def begin_update(self) -> None:
        """Start with an empty sum of gradients, after the result of an update has been taken."""
        self.handle = None
        self.made = 0

    def abandon(self) -> None:
        super().abandon()
        self.made = 0


def _into(wire: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    if packed.data_ptr() != wire.data_ptr():
        wire.copy_(packed)
    return wire
