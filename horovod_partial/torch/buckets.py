"""Packs gradients of PyTorch into buckets, submits each bucket to a round, and takes the results of rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from horovod_partial import _attach
from horovod_partial.exchange.arguments import warn_of_float32
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.torch.devices import check_device, device_number, stream_handle
from horovod_partial.torch.operations import PartialHandle, config_of, runtime, submit, wire_dtype

Scale: TypeAlias = float | torch.Tensor | None  # by what gradients are divided before they travel; None for nothing


class Widened:
    """A `hvd.Compression` that widens to float32, for dtypes that Horovod 0.28.1 cannot reduce, such as bfloat16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class GradientBucket:
    """A bucket: gradients of one dtype in one flat tensor, in the order in which backward computes them.

    After `take` a parameter's `grad` is a view of the flat tensor, so a round's result needs no copy back. If `grad`
    was None before backward, backward has made a new tensor, and `take` copies it. All parameters are on one device.
    Ranks compare `members` (texts of `bucket_config.member`) in round 0, and errors name them. If `options.unscaled`,
    gradients travel without their loss scale. Float16 travels as float32 then, because small gradients would become 0
    in float16.
    """

    def __init__(
        self, name: str, parameters: Sequence[torch.nn.Parameter], options: BucketOptions, members: Sequence[str]
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
        # Compress an empty tensor to find out which dtype the compression makes.
        self.compression: Any = Widened if first.dtype == torch.bfloat16 else options.compression
        self.wire_dtype = wire_dtype(self.compression.compress(self.flat[:0])[0].dtype)
        if options.unscaled and self.wire_dtype == torch.float16:
            warn_of_float32()
            self.compression, self.wire_dtype = Widened, torch.float32
        self.missing = set(self.parameters)
        self.handle: PartialHandle | None = None
        self.empty = False  # whether the round has no result, because no rank gave a gradient
        self.had_late = False  # whether this rank was late for the last round, or the round had a late gradient
        self.wire = self.flat  # the tensor that Horovod reduces: `flat`, or a compressed copy of it
        self._sparse: set[torch.nn.Parameter] = set()
        self._streams: set[torch.cuda.Stream] = set()  # the CUDA streams on which gradients were put into the bucket
        self._context: Any = None
        self._version = 0  # PyTorch's version counter of the flat tensor at the arrival
        # What `watch` has noted: the version counter of `flat`, and a copy of `flat` or None. None before `watch`.
        self.watched: tuple[int, torch.Tensor | None] | None = None

    def views_of(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return each parameter's part of a flat tensor, as a view with the parameter's shape."""
        views, offset = {}, 0
        for parameter in self.parameters:
            # Keep the parameter's strides: fused optimizers read parameter and gradient in the same memory order.
            views[parameter] = flat.as_strided(parameter.size(), parameter.stride(), offset)
            offset += parameter.numel()
        return views

    def put(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Copy a parameter's gradient into the bucket, unless it lies there already. None counts as zeros."""
        self._follow_stream()
        view = self.views[parameter]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.detach().to_dense())
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())  # leave out the autograd graph that gradients have with `create_graph=True`

    def _follow_stream(self) -> None:
        """Let `arrive` wait for what is put into the bucket on the current CUDA stream."""
        if self.flat.is_cuda:
            self._streams.add(torch.cuda.current_stream(self.flat.device))

    def take(self, parameter: torch.nn.Parameter) -> bool:
        """Move a parameter's `grad` into the bucket; None counts as zeros. Returns whether the bucket is complete."""
        gradient = parameter.grad
        self.put(parameter, gradient)
        if gradient is not None and gradient.is_sparse:
            self._sparse.add(parameter)
        parameter.grad = self.views[parameter]
        self.missing.discard(parameter)
        return not self.missing

    def arrive(self, start: Callable[[torch.Tensor], PartialHandle], scale: Scale = None) -> None:
        """Compress the gradients, divide them by `scale`, and call `start` with them.

        Compression may change only the dtype. Gradients with a scale never travel in float16, so they are divided in the
        dtype that travels.
        """
        for stream in self._streams:  # wait for copies of gradients, which run on the CUDA streams of forward passes
            torch.cuda.current_stream(self.flat.device).wait_stream(stream)
        self._streams.clear()
        wire, self._context = self.compression.compress(self.flat)
        if wire.shape != self.flat.shape or not wire.is_contiguous() or wire.dtype != self.wire_dtype:
            raise ValueError(
                "buckets need a compression that changes the dtype only; use Full() without merging for others"
            )
        if scale is not None:
            wire.div_(scale)
        self.wire = wire
        self._version = self.flat._version
        self.handle = start(wire)

    def wait(self) -> bool:
        """Wait until the operation that `arrive` has started has ended.

        Returns `is_unchanged`: False if the program has changed the gradients since the arrival. Under policies with
        `missed="replay"`, the caller then gets the results of rounds from `take_round`, oldest first. Otherwise the
        result of this rank's arrival is in `wire` when this method returns.
        """
        assert self.handle is not None
        self.handle.synchronize()
        info = self.handle.handle.info()
        self.empty = info.empty
        self.had_late = info.late or info.gradients > info.fresh
        return self.is_unchanged

    @property
    def is_unchanged(self) -> bool:
        """Whether the gradients are unchanged since the arrival. (The application may have changed them.)"""
        return self.flat._version == self._version

    def unpack(self) -> None:
        """Copy the result of a round from `wire` to `flat`, unless both are the same memory."""
        if self.wire.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(self.compression.decompress(self.wire, self._context))

    def show(self, frozen: Collection[torch.nn.Parameter]) -> None:
        """Set each parameter's `grad` to its view of the bucket; to None if it is frozen, or if there is no result."""
        for parameter, view in self.views.items():
            gradient = None if self.empty or parameter in frozen else view
            parameter.grad = view.to_sparse() if gradient is not None and parameter in self._sparse else gradient

    def watch(self, *, copies: bool) -> None:
        """Remember the gradients that `show` has shown to the program, to notice whether it changes them.

        PyTorch's version counter overlooks some changes. With `copies`, a copy of the gradients shows these changes.
        """
        self.watched = self.flat._version, self.flat.clone() if copies else None

    def was_changed(self) -> bool:
        """Return whether the program has changed the gradients since `watch`. Sparse gradients are ignored."""
        if self.watched is None:
            return False
        version, copy = self.watched
        shown = all(p.grad is None or p.grad is view or p.grad.is_sparse for p, view in self.views.items())
        if version != self.flat._version or not shown:
            return True
        # Compare the gradients' bits, because NaN never equals itself.
        return copy is not None and not torch.equal(self.flat.view(torch.uint8), copy.view(torch.uint8))

    @property
    def is_begun(self) -> bool:
        """Whether some gradients of this step are in the bucket."""
        return len(self.missing) < len(self.parameters)

    @property
    def is_under_way(self) -> bool:
        """Whether Horovod may still read and write the bucket's tensor, because its operation has not ended."""
        return self.handle is not None and runtime.is_initialized() and not self.handle.poll()

    def abandon(self) -> None:
        """Forget an arrival that has failed, or that will fail because Horovod shuts down."""
        if self.is_under_way:
            # Make a new tensor: Horovod may use the old one until it shuts down. The handle keeps the old one alive.
            self.flat = torch.zeros_like(self.flat)
            self.wire = self.flat if self.wire_dtype == self.flat.dtype else self.flat.to(self.wire_dtype)
            self.views = self.views_of(self.flat)
        self.handle = None
        self.reset()

    def reset(self) -> None:
        """Expect new gradients of all parameters, for the next step, and forget what `watch` has noted."""
        self.missing = set(self.parameters)
        self.watched = None


class MicroBatchBucket(GradientBucket):
    """A bucket under `hvd.WorkSharing`: the sum of the gradients of all micro-batches of this rank in the open update.

    In an update the core reads only the tensor of the first arrival. So if gradients travel in another dtype, this
    object keeps one tensor of that dtype, and all arrivals use it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made = 0  # how many micro-batches of the open update the bucket's sum contains
        # Behind the last micro-batch's use of `flat`. The next one may come on another CUDA stream. None on the CPU.
        self._used = torch.cuda.Event() if self.flat.is_cuda else None  # type: ignore[no-untyped-call]
        if self.wire_dtype != self.flat.dtype:
            self.wire = torch.empty_like(self.flat, dtype=self.wire_dtype)

    def _follow_stream(self) -> None:
        if self._used is not None and (stream := torch.cuda.current_stream(self.flat.device)) not in self._streams:
            stream.wait_event(self._used)
        super()._follow_stream()

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, scale: float) -> bool:
        """Add a gradient, divided by `scale`, to the sum; None is zeros. Returns whether all gradients are in."""
        view = self.views[parameter]
        if self.made == 0:
            self.put(parameter, gradient)
            if scale != 1.0:
                view.div_(scale)
        elif gradient is not None:
            self._follow_stream()
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            view.add_(dense, alpha=1.0 / scale)
        self.missing.discard(parameter)
        return not self.missing

    def arrive(self, start: Callable[[torch.Tensor], PartialHandle], scale: Scale = None) -> None:
        """Arrive with the sum of this rank's gradients in the open update. Call this once in each micro-batch."""
        if self.handle is not None and self.handle.poll():
            # No update ends before this rank's micro-batch. So an operation that has ended has failed: raise its error.
            self.handle.synchronize()
        wire = self.wire
        super().arrive(lambda packed: start(_into(wire, packed)), scale)
        self.wire = wire
        self._made_another()

    def stay(self) -> None:
        """Count a micro-batch whose gradients stay on this rank, because there are no other ranks."""
        self._made_another()
        self._version = self.flat._version

    def _made_another(self) -> None:
        self.made += 1
        if self._used is not None:
            self._used.record(torch.cuda.current_stream(self.flat.device))

    def begin_update(self) -> None:
        """Start with an empty sum of gradients, after the result of an update has been taken."""
        self.handle = None
        self.made = 0

    def abandon(self) -> None:
        super().abandon()
        self.made = 0


class GradientFamily(_attach.Family):
    """The buckets of one optimizer's gradients. A rank arrives at them one by one, and takes their results together.

    `hvd.DistributedOptimizer` arrives at a bucket during backward, as soon as the bucket has all of its gradients.
    Keras arrives at all buckets after backward. Under work sharing the first bucket grants micro-batches.
    """

    def __init__(self, options: BucketOptions, buckets: Sequence[GradientBucket]) -> None:
        super().__init__(runtime.core, options.process_set, [bucket.name for bucket in buckets])
        self.buckets = list(buckets)
        self._options = options
        # Declarations, by bucket and number of ranks, because an elastic job may change the number of ranks.
        self._configs: dict[tuple[GradientBucket, int], _attach.BucketConfig] = {}
        for bucket in buckets:
            self._config(bucket)  # called to raise errors about wrong options before backward

    def _config(self, bucket: GradientBucket) -> _attach.BucketConfig:
        key = bucket, runtime.size_of(self.process_set)
        if key not in self._configs:
            grants = self._options.shares_work and bucket is self.buckets[0]
            is_integer = not bucket.wire_dtype.is_floating_point
            spec = self._options.spec(bucket.members, grants=grants, is_integer=is_integer)
            self._configs[key] = config_of(spec, bucket.wire_dtype, bucket.flat)
        return self._configs[key]

    def declare(self) -> None:
        """Declare the buckets before the first arrival."""
        for bucket in self.buckets:
            runtime.declare(self.process_set.process_set_id, bucket.name, self._config(bucket))

    def arrive(self, bucket: GradientBucket, scale: Scale = None) -> None:
        """Arrive at a bucket with the gradients that it holds, divided by `scale`."""
        config = self._config(bucket)
        bucket.arrive(lambda wire: submit(wire, wire, bucket.name, self.process_set, config), scale)

    def reduce_probe(self, name: str, tensor: torch.Tensor) -> bool:
        """Sum a tensor over the ranks, in place, in the bucket `name`. Returns whether this rank was on time."""
        spec = self._options.spec(missed="sum")
        handle = submit(tensor, tensor, name, self.process_set, config_of(spec, tensor.dtype, tensor))
        handle.synchronize()
        return not handle.info().late

    @property
    def is_under_way(self) -> bool:
        """Whether Horovod may still read and write the tensor of a bucket."""
        return any(bucket.is_under_way for bucket in self.buckets)

    def wait(self) -> list[bool]:
        """Wait until all rounds have ended, and expect the next gradients. Returns each bucket's `is_unchanged`."""
        unchanged = [bucket.wait() for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.handle = None
            bucket.reset()
        return unchanged

    def take_into_buckets(self) -> int:
        """Take the oldest round not taken yet: write its results into the buckets, and return its number of gradients.

        The number is a sum over the buckets; 0 if there is no round. Rounds without any gradient, which a flush may
        make, are skipped: a step with zeros would move weights by momentum and decay. If only some buckets have
        gradients, those of the other buckets are zeros, on every rank.
        """
        wires = [bucket.wire for bucket in self.buckets]
        addresses = [wire.data_ptr() for wire in wires]
        streams = list({(device_number(wire.device), stream_handle(wire.device)) for wire in wires})
        while (gradients := self.take_round(addresses, streams)) is not None:
            if gradients > 0:
                for bucket in self.buckets:
                    bucket.empty = False
                    bucket.unpack()
                return gradients
        return 0

    def take_results(self) -> bool:
        """Write the results of this step's arrivals into the buckets. Returns whether there are any."""
        for bucket in self.buckets:
            bucket.unpack()
        return any(not bucket.empty for bucket in self.buckets)

    def collect(self) -> bool:
        """Write missed results into the buckets, without an arrival. Returns whether there were any."""
        for bucket in self.buckets:
            if bucket.wire.is_cuda:  # `collect` does not wait for queued CUDA kernels that use the tensor
                torch.cuda.current_stream(bucket.wire.device).synchronize()
            handle = runtime.core.collect(self.process_set.process_set_id, bucket.name, bucket.wire.data_ptr())
            bucket.empty = handle is None or handle.info().empty
        return self.take_results()

    def abandon(self) -> None:
        """Forget arrivals that have failed, and arrivals that will fail because Horovod shuts down."""
        for bucket in self.buckets:
            bucket.abandon()


def _into(wire: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    if packed.data_ptr() != wire.data_ptr():
        wire.copy_(packed)
    return wire


def _is_dense(tensor: torch.Tensor) -> bool:
    # `empty_like` keeps a tensor's strides only if its elements neither overlap nor have gaps between them.
    return tensor.numel() == 0 or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of a tensor, which all tensors of one bucket must have in common."""
    return tensor.dtype, tensor.device
