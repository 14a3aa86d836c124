"""The buckets of one optimizer's gradients in PyTorch, and what a step does with them: arrive, wait, take rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.devices import device_number
from horovod_partial.torch.operations import PartialHandle, make_config, runtime, submit


class GradientFamily(_attach.Family):
    """The buckets of one optimizer's gradients. A rank arrives at them one by one, and takes their results together.

    `hvd.DistributedOptimizer` arrives at a bucket during backward, as soon as the bucket has all of its gradients.
    Keras arrives at all buckets after backward. Wrong `options` (arguments of `make_config`) raise ValueError.
    """

    def __init__(self, process_set: ProcessSet, buckets: Sequence[GradientBucket], options: dict[str, Any]) -> None:
        super().__init__(runtime.core, process_set, [bucket.name for bucket in buckets])
        self.buckets = list(buckets)
        self._options = options
        for bucket in buckets:
            self.config(bucket.flat, bucket.wire_dtype)  # called to raise errors about wrong options before backward

    def config(self, tensor: torch.Tensor, dtype: torch.dtype, **options: Any) -> _attach.BucketConfig:
        """Return the declaration of a bucket whose tensor travels as `dtype`. `options` replace those of the family."""
        # Ask for the number of ranks in each step, because an elastic job may change it. make_config is cached.
        return make_config(
            dtype=dtype,
            shape=tuple(tensor.shape),
            device=device_number(tensor.device),
            size=runtime.size_of(self.process_set),
            **(self._options | options),
        )

    def declare(self, options_of: Callable[[GradientBucket], dict[str, Any]] = lambda _: {}) -> None:
        """Declare the buckets before the first arrival. `options_of` replaces options of the family for a bucket."""
        for bucket in self.buckets:
            config = self.config(bucket.flat, bucket.wire_dtype, members=bucket.members, **options_of(bucket))
            runtime.declare(self.process_set.process_set_id, bucket.name, config)

    def arrive(self, bucket: GradientBucket, scale: float = 1.0, **options: Any) -> None:
        """Arrive at a bucket with the gradients that it holds, divided by `scale`."""
        bucket.arrive(lambda wire: self.submit(bucket.name, wire, members=bucket.members, **options), scale)

    def submit(self, name: str, wire: torch.Tensor, **options: Any) -> PartialHandle:
        """Begin to reduce a tensor over the ranks, in place, in the bucket `name`."""
        return submit(wire, wire, name, self.process_set, self.config(wire, wire.dtype, **options))

    @property
    def have_arrived(self) -> bool:
        """Whether this step's gradients have arrived in all buckets."""
        return all(bucket.handle is not None for bucket in self.buckets)

    @property
    def is_begun(self) -> bool:
        """Whether some gradients of this step are in a bucket, or have arrived."""
        return any(bucket.handle is not None or bucket.is_begun for bucket in self.buckets)

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

    @property
    def had_late(self) -> bool:
        """Whether this rank was late for a round of the last `wait`, or the round had a late gradient of another rank."""
        return any(bucket.had_late for bucket in self.buckets)

    def take_into_buckets(self) -> int:
        """Write the oldest round that this rank has not taken into the buckets. Returns its number of gradients, or 0.

        The number is a sum over the buckets. It is 0 if there is no round. A round without any gradient is skipped (a
        flush may make one), because a step with zeros would move weights by momentum and decay. If only some buckets
        have gradients, the others count as zeros, on every rank.
        """
        addresses = [bucket.wire_address() for bucket in self.buckets]
        while (gradients := self.take_round(addresses)) is not None:
            if gradients > 0:
                for bucket in self.buckets:
                    bucket.empty = False
                    bucket.unpack()
                return gradients
        return 0

    def take_results(self) -> bool:
        """Write the arrivals' results into the buckets. Returns whether any bucket has one, or there are no buckets."""
        for bucket in self.buckets:
            bucket.unpack()
        return any(not bucket.empty for bucket in self.buckets) or not self.buckets

    def collect(self) -> bool:
        """Write missed results into the buckets, without an arrival. Returns whether there were any."""
        for bucket in self.buckets:
            bucket.collect(self.process_set.process_set_id)
        return self.take_results()

    def show(self, frozen: Collection[torch.nn.Parameter]) -> None:
        """Let each parameter's `grad` be its part of a round's result; None for the parameters in `frozen`."""
        for bucket in self.buckets:
            bucket.show(frozen)

    def reset(self) -> None:
        """Expect the gradients of the next step, and forget gradients of this step that have not arrived."""
        for bucket in self.buckets:
            bucket.reset()

    def abandon(self) -> None:
        """Forget arrivals that have failed, and arrivals that will fail because Horovod shuts down."""
        for bucket in self.buckets:
            bucket.abandon()
