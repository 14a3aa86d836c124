"""The policy `hvd.WorkSharing`: any free rank computes the next micro-batch of an update (docs/protocol.md, rule 17)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod_partial.exchange.work_sharing import SharedWork
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.torch.buckets import GradientFamily, MicroBatchBucket
from horovod_partial.torch.micro_batches import evaluate
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.round_applier import RoundApplier


class SharedGradients(RoundApplier):
    """Combines an optimizer's gradients under `hvd.WorkSharing`. A backward pass and a `step` make one micro-batch.

    `work` decides which micro-batch this rank makes.
    """

    shares_work = True
    buckets: list[MicroBatchBucket]
    work: SharedWork

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.work = SharedWork(runtime, self.process_set, self._passes, self)
        self.work.is_alone = not self._set.travels
        self._applied = 0  # how many updates have been applied since the end of the last step
        self._scale = 1.0
        if not self.process_set.included():
            return
        self._set.register_hooks(self)
        for parameter in self._set.bucket_of:
            # A hook of the tensor runs before backward adds to its `grad`.
            self._set.hooks.append(parameter.register_hook(functools.partial(_clear_result, parameter)))  # type: ignore[no-untyped-call]
        if self.work.is_alone:
            self.unscales = self._grad_scaler is not None and self._grad_scaler.is_enabled()
        else:
            runtime.take_part_in_flushes(self)

    @property
    def rounds(self) -> int:
        return self.work.rounds

    @property
    def family(self) -> GradientFamily | None:
        # Without its optimizer, no update can be applied.
        return super().family if self.wrapped is not None and self.work.is_current else None

    def declare_buckets(self) -> None:
        self._set.enter(self.replica)
        for bucket in self.buckets:
            bucket.abandon()  # gradients of an earlier generation of Horovod are lost
        self._set.family.declare()

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        self.work.enter()
        if self.work.begun is None:
            self.work.require_loader()
            if not self.work.begin(waits=False):
                raise RuntimeError(
                    "no micro-batch has begun here, and an update may have been made since the forward pass. step() begins the next "
                    "one; where a step or a flush was interrupted, call optimizer.begin_micro_batch() before the next forward pass"
                )
        if parameter not in self._set.bucket_of[parameter].missing:
            raise AssertionError(
                f"gradients of {self._set.names[parameter]} were computed twice before step(). Under hvd.WorkSharing() each backward "
                "pass is a micro-batch, and an update has backward_passes_per_step of them for each rank: call optimizer.step() after "
                "each backward pass. A micro-batch may have several losses if no two have gradients of the same parameter: add them "
                "up, or use detach() and requires_grad_(False), as for a GAN"
            )
        self._set.check_sparse(parameter)
        if self.unscales and self._grad_scaler is not None and not self.is_under_way:
            self._scale = self._grad_scaler.get_scale()
        self._add(parameter)

    def _add(self, parameter: torch.nn.Parameter) -> None:
        bucket: Any = self._set.bucket_of[parameter]
        is_complete = bucket.add(parameter, parameter.grad, self._scale)
        parameter.grad = bucket.views[parameter]
        if is_complete and self.work.is_alone:
            bucket.stay()
        elif is_complete:
            self._set.family.arrive(bucket)

    @property
    def is_under_way(self) -> bool:
        """Whether gradients of a micro-batch wait for its step."""
        return any(bucket.is_begun for bucket in self.buckets)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        loss = evaluate(closure)
        self._local_steps += 1
        if not self.process_set.included():
            optimizer._base.step(optimizer)
            self.work.applied()
            self.work.updated = 1
            return loss
        self.work.enter()
        self.thread = this_thread()
        self._set.check_layers(optimizer)
        self._complete_micro_batch()
        while self.work.must_apply():
            self._apply_all(optimizer)
        self._note_queued()
        self._set.tell()
        self.work.updated, self._applied = self._applied, 0
        return loss

    def _complete_micro_batch(self) -> None:
        self.work.require_loader()
        self.work.begin_before(math.inf)
        for bucket in reversed(self.buckets):  # arrive at the first bucket last: this arrival ends the micro-batch
            for parameter in list(bucket.missing):
                _clear_result(parameter)
                self._add(parameter)
        same = all(bucket.is_unchanged for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.reset()
            for parameter in bucket.parameters:
                parameter.grad = None
        self.work.begun = None
        if not same:
            raise RuntimeError(
                "gradients were changed after backward, while they travelled. Under hvd.WorkSharing() they are those of several "
                "micro-batches, and of other ranks' too: pass max_grad_norm=, max_grad_value= or grad_transform= to "
                "hvd.DistributedOptimizer, which change those of the update"
            )
        self.work.complete()

    def _take_round(self) -> bool:
        if self.work.is_alone:
            taken = self.work.is_complete and self._show(True, steps=1.0)
        else:
            taken = self._take_into_gradients()
        if taken:
            self.work.applied()
            self._steps_in_round = 1.0  # an update of work sharing counts as one step of a learning rate schedule
            for bucket in self.buckets:
                bucket.begin_update()
        return taken

    def _apply_round(self, optimizer: Any) -> None:
        try:
            super()._apply_round(optimizer)
        finally:  # gradients of an applied update must not enter the next micro-batch, even if a hook fails
            self._applied += 1
            self._mark_results()

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        try:
            with super()._gradients_kept():
                yield
        finally:
            self._mark_results()  # between two steps each `grad` is the result of an update, if it is not None

    def _mark_results(self) -> None:
        """Mark each `grad` as the result of an update, which the program may read until its next backward pass."""
        for parameter in self._set.bucket_of:
            if parameter.grad is not None:
                # Make another object, because the bucket's view will hold other gradients.
                parameter.grad = parameter.grad.detach()
                parameter.grad.is_result = True  # type: ignore[attr-defined]

    def apply_updates(self) -> None:
        with self._outside_of_steps(), self._gradients_kept():
            self._apply_all(self.wrapped)

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
        if not runtime.failed and self._set.family.is_under_way:
            raise AssertionError(
                "optimizer.load_state_dict() was called within an update, of which this rank has made micro-batches: call "
                "optimizer.flush() on every rank before"
            )
        self._set.forget()
        self._flushed_at = self._local_steps

    def before_state_dict(self) -> None:
        """Do nothing: between two steps, and in round hooks, the state always contains this rank's newest update."""


def _clear_result(parameter: torch.nn.Parameter, *_: Any) -> None:
    """Set a parameter's `grad` to None if it still holds the result of an update.

    This result stays in `grad` after a step, so that the program can read it. It must be gone before the next
    micro-batch, because backward adds gradients to `grad`. PyTorch also calls this function as a hook, with a gradient
    that is ignored.
    """
    if getattr(parameter.grad, "is_result", False):
        parameter.grad = None
