"""Buckets of gradients: what travels together, in one round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from horovod_partial.exchange import bucket_plan
from horovod_partial.exchange.arguments import warn_of_float32
from horovod_partial.torch.devices import check_device
from horovod_partial.torch.operations import PartialHandle, poll, runtime, synchronize, wire_dtype


class Widened:
    """Compression's counterpart for what travels as float32, such as bfloat16, which Horovod 0.28.1 cannot reduce."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class GradientBucket:
    """Gradients of parameters with one dtype, flat in one tensor, in the order in which backward makes them.

    After `take` a parameter's `grad` is a view of the flat tensor: a round's result needs no copy back. Backward makes
    new gradients when `grad` is None, so `take` copies then, as Horovod's fusion buffer does.

    Args:
        name: of the bucket.
        parameters: whose gradients these are.
        compression: as in `hvd.DistributedOptimizer`.
        members: what ranks compare in round 0, and errors name: see `bucket_config.member`.
        unscaled: the gradients travel without their loss scale. In float16 small ones would be 0, so none travels so.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        compression: Any,
        members: Sequence[str] = (),
        *,
        unscaled: bool = False,
    ) -> None:
        first = parameters[0]
        for parameter in parameters:
            check_device(parameter.device)
            if not _is_dense(parameter):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} overlaps or has gaps "
                    "in memory; call .contiguous() on it, or use sync=hvd.Full()"
                )
        self.name = name
        self.parameters = list(parameters)
        self.members = tuple(members)
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views = self.views_of(self.flat)
        # What travels has this type and shape; asking the compressor with a tensor of no elements costs nothing.
        self.compression = Widened if first.dtype == torch.bfloat16 else compression
        self.wire_dtype = wire_dtype(self.compression.compress(self.flat[:0])[0].dtype)
        if unscaled and self.wire_dtype == torch.float16:
            warn_of_float32()
            self.compression, self.wire_dtype = Widened, torch.float32
        self.missing = set(self.parameters)
        self.handle: PartialHandle | int | None = None
        self.empty = False  # there was no result: what was missed had no gradient
        self.wire = self.flat  # the tensor that travels
        self._sparse: set[torch.nn.Parameter] = set()
        self._streams: set[torch.cuda.Stream] = set()  # of a device, on which the gradients were taken
        self._context: Any = None
        self._version = 0  # of the flat tensor, when it began to travel

    def views_of(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The parts of a flat tensor that belong to each parameter."""
        views, offset = {}, 0
        for parameter in self.parameters:
            # With the parameter's own strides: fused optimizers walk parameter and gradient side by side in memory.
            views[parameter] = flat.as_strided(parameter.size(), parameter.stride(), offset)
            offset += parameter.numel()
        return views

    def put(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Copy a parameter's gradient into the bucket, zeros for None; not where it is there already."""
        view = self.views[parameter]
        if view.is_cuda:
            self._streams.add(torch.cuda.current_stream(view.device))
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.detach().to_dense())
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())  # with `create_graph=True` it has a history, which the view must not get

    def take(self, parameter: torch.nn.Parameter) -> bool:
        """Take a parameter's `grad` into the bucket; zeros if it has none. True if the bucket is complete now."""
        gradient = parameter.grad
        self.put(parameter, gradient)
        if gradient is not None and gradient.is_sparse:
            self._sparse.add(parameter)
        parameter.grad = self.views[parameter]
        self.missing.discard(parameter)
        return not self.missing

    def arrive(self, start: Callable[[torch.Tensor], PartialHandle | int], scale: float) -> None:
        """Start the reduction of the gradients divided by `scale`, in place in the tensor that travels."""
        for stream in self._streams:  # hooks run on the streams of the forward pass
            torch.cuda.current_stream(self.flat.device).wait_stream(stream)
        self._streams.clear()
        if scale != 1.0:
            self.flat.div_(scale)
        wire, self._context = self.compression.compress(self.flat)
        if wire.shape != self.flat.shape or not wire.is_contiguous() or wire.dtype != self.wire_dtype:
            raise ValueError(
                "buckets need a compression that changes the dtype only; use Full() without fusion for others"
            )
        self.wire = wire
        self._version = self.flat._version
        self.handle = start(wire)

    def wait(self) -> bool:
        """Wait for the round. The result is in the tensor that travels, unless it is to be taken with others.

        Returns whether the gradients are those that have arrived: the application may have changed them meanwhile.
        """
        assert self.handle is not None
        synchronize(self.handle)
        if isinstance(self.handle, PartialHandle):
            self.empty = self.handle.handle.info().empty
        return self.is_unchanged

    @property
    def is_unchanged(self) -> bool:
        """Whether the gradients are those that have arrived: the application may have changed them since."""
        return self.flat._version == self._version

    def unpack(self) -> None:
        """Let the views have what has come back."""
        if self.wire.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(self.compression.decompress(self.wire, self._context))

    def show(self, frozen: Collection[torch.nn.Parameter]) -> None:
        """Let the parameters' `grad` be the views; None where there is no result, and of those that are frozen."""
        for parameter, view in self.views.items():
            gradient = None if self.empty or parameter in frozen else view
            parameter.grad = view.to_sparse() if gradient is not None and parameter in self._sparse else gradient

    def is_shown(self) -> bool:
        """Whether the parameters' `grad` are still what `show` has put there; sparse ones may be others."""
        return all(p.grad is None or p.grad is view or p.grad.is_sparse for p, view in self.views.items())

    def holds(self, seen: torch.Tensor) -> bool:
        """Whether a copy that was made has the same bits still: what is not a number never equals itself."""
        return torch.equal(self.flat.view(torch.uint8), seen.view(torch.uint8))

    @property
    def is_begun(self) -> bool:
        """Whether gradients of a step have been taken, but not all of them yet."""
        return len(self.missing) < len(self.parameters)

    @property
    def is_under_way(self) -> bool:
        """Whether Horovod may read and write the tensor: an arrival has neither ended, nor failed with Horovod."""
        return self.handle is not None and runtime.is_initialized() and not poll(self.handle)

    def abandon(self) -> None:
        """Forget an arrival that has failed, or whose Horovod is gone or about to go."""
        if self.is_under_way:
            # Horovod may go on with the old one until it shuts down; the handle keeps that alive.
            self.flat = torch.zeros_like(self.flat)
            self.wire = self.flat if self.wire_dtype == self.flat.dtype else self.flat.to(self.wire_dtype)
            self.views = self.views_of(self.flat)
        self.handle = None
        self.reset()

    def collect(self, process_set: int) -> None:
        """Let the views have the sum of what this rank has missed, without an arrival; `empty` if that is nothing."""
        handle = runtime.collect(process_set, self.name, self.wire_address())
        self.empty = handle is None or handle.info().empty

    def wire_address(self) -> int:
        """Where a result may be written, on the host's time."""
        if self.wire.is_cuda:  # what is queued may still use its memory, and the core does not know of that
            torch.cuda.current_stream(self.wire.device).synchronize()
        return self.wire.data_ptr()

    def reset(self) -> None:
        """Be ready for the next step's gradients."""
        self.missing = set(self.parameters)


def take_round(buckets: Sequence[GradientBucket], process_set: int) -> int:
    """Let the views have the oldest round of a family that this rank has not taken.

    Returns how many gradients are in it, in all its buckets together; 0 if there is none.

    A round without any gradient, as a flush may have, is passed over: a step with zeros would move weights by momentum and
    decay. A bucket without a result of its own counts as zeros, on every rank.
    """
    names = [bucket.name for bucket in buckets]
    addresses = [bucket.wire_address() for bucket in buckets]
    while (gradients := runtime.take_round(process_set, names, addresses)) is not None:
        if gradients > 0:
            for bucket in buckets:
                bucket.empty = False
                bucket.unpack()
            return gradients
    return 0


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """What tensors in one bucket have in common."""
    return tensor.dtype, tensor.device


def plan(
    parameters: Iterable[torch.nn.Parameter], groups: Sequence[Sequence[torch.nn.Parameter]] | None, bucket_bytes: float
) -> list[list[torch.nn.Parameter]]:
    """Which gradients travel together: see `horovod_partial.exchange.bucket_plan`.

    Args:
        parameters: those that need gradients, in the order of the model.
        groups: buckets asked for by the user; what they leave out is packed by size.
        bucket_bytes: a bucket is closed when it has reached this size.
    """
    listed = list(parameters)
    positions = {parameter: index for index, parameter in enumerate(listed)}
    planned = bucket_plan.plan(
        [kind(p) for p in listed],
        [p.numel() * p.element_size() for p in listed],
        [[positions[p] for p in group if p in positions] for group in groups or ()],
        bucket_bytes,
    )
    return [[listed[index] for index in bucket] for bucket in planned]
