"""The policy `hvd.WorkSharing`: any free rank computes the next micro-batch of an update (docs/protocol.md, rule 17)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod_partial.exchange.work_sharing import MicroBatchSharer
from horovod_partial.policies import SharedUpdates
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.gradient_exchange import GradientExchange
from horovod_partial.torch.operations import PartialHandle, runtime
from horovod_partial.torch.wrapping import Exchange


class MicroBatchBucket(GradientBucket):
    """A bucket under `hvd.WorkSharing`: the sum of the gradients of all micro-batches of this rank in the open update.

    If gradients travel in another dtype, one tensor of that dtype is kept over all updates, because for all arrivals
    in an update the core reads the tensor of the first one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made = 0  # how many micro-batches of the unfinished update the bucket's sum contains
        if self.wire_dtype != self.flat.dtype:
            self.wire = torch.empty_like(self.flat, dtype=self.wire_dtype)

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, scale: float) -> bool:
        """Add a gradient, divided by `scale`, to the sum. None counts as zeros. Returns whether the bucket is full."""
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

    def begin_update(self) -> None:
        """Start with an empty sum of gradients, after the result of an update has been taken."""
        self.handle = None
        self.made = 0

    def abandon(self) -> None:
        super().abandon()
        self.made = 0


def _mark_result(parameter: torch.nn.Parameter) -> None:
    """Mark a parameter's `grad` as the result of an update, which the program may read until its next backward pass."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad.detach()  # another object, because the bucket's view will hold other gradients
        parameter.grad.is_result = True  # type: ignore[attr-defined]


def _clear_result(parameter: torch.nn.Parameter, *_: Any) -> None:
    """Set `grad` to None if it is the result of an update, because it must not enter the next micro-batch."""
    if getattr(parameter.grad, "is_result", False):
        parameter.grad = None


def _into(wire: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    if packed.data_ptr() != wire.data_ptr():
        wire.copy_(packed)
    return wire


class WorkSharingExchange(MicroBatchSharer, GradientExchange):
    """Combines an optimizer's gradients under `hvd.WorkSharing`: each backward pass with its step is a micro-batch.

    Gradient hooks run in autograd's threads, and everything else in the application's, never at the same time.
    """

    bucket_class = MicroBatchBucket
    synchronized = property(lambda _: True, lambda *_: None)  # there is nothing to wait for between backward and step
    buckets: list[MicroBatchBucket]  # type: ignore[assignment]
    _bucket_of: dict[torch.nn.Parameter, MicroBatchBucket]  # type: ignore[assignment]
    _runtime = runtime
    family = GradientExchange.family

    def __init__(self, optimizer: torch.optim.Optimizer, *, backward_passes_per_step: int, **arguments: Any) -> None:
        self.updated = 0
        self._applied = 0  # how many updates of work sharing have been applied
        self._told = 0  # how many updates of work sharing had been applied at the end of the last step
        self.begins_in_step = True  # False if a DynamicShardingLoader begins the first micro-batch of each update
        self._passes_in_update = backward_passes_per_step
        arguments["bucket_options"] |= self._policy(grants=False)
        MicroBatchSharer.__init__(self)
        GradientExchange.__init__(self, optimizer, backward_passes_per_step=backward_passes_per_step, **arguments)
        self._is_alone = not self._hooks
        if self._is_alone and self.process_set.included():
            self._register_hooks()
            self.unscales = self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def _use_buckets(self, planned: Mapping[str, Sequence[torch.nn.Parameter]]) -> None:
        # The coordinator counts complete micro-batches by the arrivals at the first bucket, and grants further ones.
        # So the first bucket must be the one that backward completes last.
        super()._use_buckets(dict(reversed(list(planned.items()))))

    def _register_hooks(self) -> None:
        super()._register_hooks()
        # A hook of the tensor runs before backward adds to its `grad`. These are removed with the other hooks.
        self._hooks += [p.register_hook(functools.partial(_clear_result, p)) for p in self._bucket_of]  # type: ignore[no-untyped-call]

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        try:
            with super()._gradients_kept():
                yield
        finally:
            for parameter in self._bucket_of:
                _mark_result(parameter)  # between two steps there are no other gradients

    def _policy(self, *, grants: bool) -> dict[str, Any]:
        return {"sync": SharedUpdates(self._passes_in_update, grants)}

    def _enter(self) -> None:
        if self._is_alone:
            return
        self._become_active()
        if self._tenure.is_current:
            return
        self._updates = 0
        self._number = None  # a micro-batch begun in an earlier generation of Horovod is lost
        super()._enter()
        for bucket in self.buckets:
            bucket.abandon()  # gradients of an earlier generation of Horovod are lost
        self._family.declare(self._policy_of)

    def _policy_of(self, bucket: GradientBucket) -> dict[str, Any]:
        return self._policy(grants=bucket is self.buckets[0])

    def _gradient_is_there(self, parameter: torch.nn.Parameter) -> None:
        self._enter()
        if self._number is None:
            self._begin_in_backward()
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            raise AssertionError(
                f"gradients of {self._names[parameter]} were computed twice before step(). Under hvd.WorkSharing() each backward "
                "pass is a micro-batch, and an update has backward_passes_per_step of them for each rank: call optimizer.step() after "
                "each backward pass. A micro-batch may have several losses if no two have gradients of the same parameter: add them "
                "up, or use detach() and requires_grad_(False), as for a GAN"
            )
        if parameter.grad is not None and parameter.grad.is_sparse and not self._sparse_as_dense:
            raise ValueError("buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full()")
        if not self.is_under_way and self.unscales and self._grad_scaler is not None:
            self._scale = self._grad_scaler.get_scale()
        self._add(bucket, parameter)

    def _add(self, bucket: MicroBatchBucket, parameter: torch.nn.Parameter) -> None:
        is_complete = bucket.add(parameter, parameter.grad, self._scale)
        parameter.grad = bucket.views[parameter]
        if is_complete:
            self._arrive(bucket)

    def _begin_in_backward(self) -> None:
        """Begin a micro-batch after its forward pass, if no update has changed the weights in the meantime."""
        if not self.begins_in_step:
            raise RuntimeError(_NOT_BEGUN)
        if not self._begin(waits=False):
            raise RuntimeError(
                "no micro-batch has begun here, and an update may have been made since the forward pass. step() begins the next "
                "one; where a step or a flush was interrupted, call optimizer.begin_micro_batch() before the next forward pass"
            )

    def _arrive(self, bucket: MicroBatchBucket) -> None:  # type: ignore[override]
        if self._is_alone:
            bucket.made, bucket._version = bucket.made + 1, bucket.flat._version
            return
        self._family.arrive(bucket, **self._policy_of(bucket))

    def begin(self) -> tuple[int, int]:
        """Call `begin_before` without a bound. Returns the number of the update, and of the micro-batch within it."""
        number = self.begin_before(math.inf)
        assert number is not None
        return self.rounds, number

    def begin_before(self, rounds: float) -> int | None:
        self._enter()
        self.thread = this_thread()
        return super().begin_before(rounds)

    def require_begun(self) -> int:
        """Return the begun micro-batch's number, or begin one. If a loader should have begun it, raise RuntimeError."""
        if not self.begins_in_step and self._number is None:
            raise RuntimeError(_NOT_BEGUN)
        return self.begin()[1]

    @property
    def is_under_way(self) -> bool:
        """Whether gradients of a micro-batch wait for its step."""
        return any(bucket.is_begun or not bucket.missing for bucket in self.buckets)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._local_steps += 1
        if not self.process_set.included():
            optimizer._base.step(optimizer)
            self._updates += 1
            self.updated = 1
            return loss
        self._enter()
        self.thread = this_thread()
        self._check_layers(optimizer)
        self._complete_micro_batch()
        if self._is_alone:
            self._micro_batches += 1
            if self._micro_batches == self._passes_in_update:
                self._micro_batches = 0
                self._apply_update(optimizer)
        else:
            self._come_to_next(within_update=True)
        self.updated, self._told = self._applied - self._told, self._applied
        return loss

    def _complete_micro_batch(self) -> None:
        self.require_begun()
        for bucket in reversed(self.buckets):  # the first bucket comes last: its arrivals lead to grants of new work
            for parameter in list(bucket.missing):
                _clear_result(parameter)
                self._add(bucket, parameter)
        same = all(bucket.is_unchanged for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.reset()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._number = None
        if not same:
            raise RuntimeError(
                "gradients were changed after backward, while they travelled. Under hvd.WorkSharing() they are those of several "
                "micro-batches, and of other ranks' too: pass max_grad_norm=, max_grad_value= or grad_transform= to "
                "hvd.DistributedOptimizer, which change those of the update"
            )

    def _come_to_next(self, *, within_update: bool) -> None:
        before = self._applied
        while True:
            begins = self.begins_in_step or (within_update and self._applied == before)
            found = runtime.next_micro_batch(self, begins=begins)
            if found is not None:
                break
            self._apply_all(self.wrapped())
        if begins:
            self._note(found)
        if self._introduction is not None:
            self._introduction.tell(claims=True)

    def _next_micro_batch(self, *, waits: bool) -> tuple[int, int] | None:
        return runtime.next_micro_batch(self, begins=True, waits=waits)

    def _apply_updates(self) -> None:
        with self._gradients_kept():
            self._apply_all(self.wrapped())

    def _take_round(self) -> bool:
        taken = super()._take_round()
        if taken:
            self._updates += 1
            self._steps_in_round = 1.0  # an update of work sharing counts as one step of a learning rate schedule
            for bucket in self.buckets:
                bucket.begin_update()
        return taken

    def _apply_update(self, optimizer: Any) -> None:
        for bucket in self.buckets:
            bucket.show(self._frozen)
            bucket.begin_update()
        self._updates += 1
        self._apply_round(optimizer)

    def _apply_round(self, optimizer: Any) -> None:
        try:
            super()._apply_round(optimizer)
        finally:  # gradients of an applied update must not enter the next micro-batch, even if a hook fails
            self._applied += 1
            for parameter in self._bucket_of:
                _mark_result(parameter)

    def come_back(self) -> None:
        if self.wrapped() is not None and self.family is not None and not self._is_alone and self._is_active:
            with self._gradients_kept():
                self._come_to_next(within_update=False)

    def succeed(self, before: Exchange) -> None:
        super().succeed(before)
        assert isinstance(before, WorkSharingExchange)
        self.begins_in_step = before.begins_in_step

    def synchronize(self) -> None:
        raise RuntimeError(
            "there is nothing to wait for between backward and step under hvd.WorkSharing(): the gradients of an update are "
            "complete in step(). Clip with max_grad_norm= or max_grad_value=, or pass grad_transform="
        )

    def before_zero_grad(self) -> None:
        if self.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step(). This is prohibited: "
                "the gradients are on their way."
            )

    def forget(self) -> None:
        if not runtime.failed and self._family.is_under_way:
            raise AssertionError(
                "optimizer.load_state_dict() was called within an update, of which this rank has made micro-batches: call "
                "optimizer.flush() on every rank before"
            )
        super().forget()
        self._micro_batches = 0

    def set_passes(self, passes: int) -> None:
        if passes != self._passes_in_update:
            raise ValueError("backward_passes_per_step cannot change under hvd.WorkSharing(): wrap a new optimizer")

    def before_state_dict(self) -> None:
        """Do nothing: between two steps, and in hooks after a round, the state is always that of the newest update."""


_NOT_BEGUN = (
    "no micro-batch has begun here. Under DynamicShardingLoader one begins when its loop gives a batch: let each batch have one "
    "backward pass and one step(), in the loop, and flush after step()"
)
