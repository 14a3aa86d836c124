"""Applies the rounds of an optimizer's gradients, each by one step of the user's optimizer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod_partial.runtime.appliers import this_thread
from horovod_partial.torch.bucket_set import BucketSet, remove_hooks
from horovod_partial.torch.buckets import GradientBucket, GradientFamily
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replica import ReplicaState
from horovod_partial.torch.round_steps import RoundSteps
from horovod_partial.torch.wrapping import Exchange


class RoundApplier(Exchange, ABC):
    """Base class of `LateGradients` and `SharedGradients`: combines an optimizer's gradients over the ranks in rounds.

    Only the thread that takes the optimizer's steps uses this object, apart from gradient hooks (see `BucketSet`).
    `unscales` says whether contributions are divided by the scale of `grad_scaler`. If so, rounds with gradients that
    are not finite are skipped, and `overflows` has an entry for each round: True if it was skipped. `passes` is the
    number of backward passes before a step.
    """

    def __init__(
        self,
        buckets: BucketSet,
        round_steps: RoundSteps,
        grad_scaler: torch.amp.GradScaler | None,
        passes: int,
    ) -> None:
        self.process_set = buckets.process_set
        self.round_steps = round_steps
        self.overflows: list[bool] = []
        self.unscales = buckets.options.unscaled
        self.is_applying = False  # whether a round is being applied or waited for; if so, waits apply no rounds
        self._set = buckets
        self._grad_scaler = grad_scaler
        self._passes = passes
        self._steps_in_round = 1.0  # how many steps per rank, on average, the result of the newest round contains
        self._came_from: int | None = None  # the rank that has broadcast all parameters since the last round, if any
        self._has_warned = False  # whether the warning about `state_dict` without a flush was given
        # By CUDA device, an event behind what the last step, or the last rounds outside of a step, have queued.
        self._queued: dict[torch.device, torch.cuda.Event] = {}

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        return self._set.buckets

    @property
    def family(self) -> GradientFamily | None:
        """The optimizer's buckets. None if they were not named since the last `hvd.init()`, or have no process set."""
        is_there = self._set.is_current and self.process_set.process_set_id is not None
        return self._set.family if is_there and self.buckets else None

    @property
    def replica(self) -> ReplicaState | None:
        optimizer = self.wrapped
        if optimizer is None or not self._set.options.replays:
            return None
        return ReplicaState(optimizer, self._set.names, self.round_steps.followers)

    @abstractmethod
    def _take_round(self) -> bool:
        """Put the result of the oldest round not applied yet into the gradients. Returns False if there is none."""

    def _take_into_gradients(self) -> bool:
        family = self._set.family
        gradients = family.take_into_buckets()
        return gradients > 0 and self._show(True, steps=runtime.steps_of(family, gradients))

    def _show(self, has_result: bool, *, steps: float) -> bool:
        """Let `grad` show the result of a round of `steps` steps per rank, on average. Returns `has_result`."""
        self._steps_in_round = steps
        self._set.show()
        return has_result

    def _apply_round(self, optimizer: Any) -> None:
        """Take one step of the user's optimizer with the gradients of a round."""
        overflow = self.unscales and not self._is_finite()
        if not overflow:
            self._came_from = None
            with self._applying():
                self.round_steps.before(optimizer, self._steps_in_round)
                optimizer._base.step(optimizer)
                self.round_steps.after(optimizer)
        if self.unscales:
            self.overflows.append(overflow)

    def _note_queued(self) -> None:
        """Note what is queued on the current CUDA streams now. Call this at the end of a step."""
        for device in {bucket.flat.device for bucket in self.buckets if bucket.flat.is_cuda}:
            if device not in self._queued:
                self._queued[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._queued[device].record(torch.cuda.current_stream(device))

    @contextmanager
    def _outside_of_steps(self) -> Iterator[None]:
        """Context for rounds that come outside of a step, maybe on another CUDA stream than the program's steps.

        At its beginning the host waits until the last step is done on the device, and at its end until the rounds are.
        """
        self._wait_for_queued()
        try:
            yield
        finally:
            self._note_queued()
            self._wait_for_queued()

    def _wait_for_queued(self) -> None:
        for event in self._queued.values():
            event.synchronize()

    def _is_finite(self) -> bool:
        """Return whether the result of a round is finite. On a GPU the host waits once for the answer."""
        finite = [torch.isfinite(bucket.flat).all() for bucket in self.buckets]
        return not finite or bool(torch.stack([each.to(finite[0].device) for each in finite]).all())

    @contextmanager
    def _applying(self) -> Iterator[None]:
        before, self.is_applying = self.is_applying, True
        try:
            yield
        finally:
            self.is_applying = before

    def _apply_all(self, optimizer: Any) -> None:
        """Apply all rounds that have ended and were not applied yet, oldest first."""
        while self._take_round():
            self._apply_round(optimizer)

    def apply_rounds(self) -> None:
        """Apply all rounds that have ended and were not applied yet. Call this only between two steps."""
        optimizer = self.wrapped
        if self.family is None or optimizer is None:
            return
        with self._outside_of_steps(), self._gradients_kept():
            self._apply_all(optimizer)
            if self.overflows and self._grad_scaler is not None:
                self._grad_scaler.update()

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Context that restores the parameters' gradients at its end, so that backward passes can add to them."""
        gradients = {p: None if p.grad is None else p.grad.clone() for p in self._set.bucket_of}
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def stop_reducing(self) -> None:
        remove_hooks(self._set.hooks)

    def succeed(self, before: Exchange) -> None:
        super().succeed(before)
        assert isinstance(before, RoundApplier)
        self.overflows = before.overflows
        self._queued = before._queued
        self.thread = before.thread
        self.synchronizes_in_step = before.synchronizes_in_step

    def parameters_came(self, sent: Container[int], root: int) -> None:
        """Note that the tensors at the addresses `sent` have come from rank `root`, in a broadcast."""
        if self.family is None or not all(parameter.data_ptr() in sent for parameter in self._set.all_names):
            return
        self._came_from = root
        optimizer = self.wrapped
        if optimizer is not None and not optimizer.state:
            self.state_came(root)

    def state_came(self, root: int) -> None:
        """Note that the optimizer's state came from rank `root`.

        If the parameters came from `root` too, this replica equals the others, so no round counts as lost any more.
        """
        if self.family is not None and self._came_from == root:
            self.family.count_anew()

    def flush_optimizer(self, optimizer: Any) -> None:
        if self.is_under_way:
            raise AssertionError("optimizer.flush() was called after loss.backward() but before optimizer.step().")
        if self._set.hooks:
            self.thread = this_thread()
            runtime.flush(self.process_set.process_set_id)
        self._flushed_at = self._local_steps

    @property
    def is_flushed(self) -> bool:
        family = self.family
        if family is None or self._flushed_at == self._local_steps:
            return True
        return runtime.unsettled(self.process_set.process_set_id).isdisjoint(family.names)

    def before_state_dict(self) -> None:
        if self._has_warned or self.is_flushed:
            return
        self._has_warned = True
        warnings.warn(
            "optimizer.state_dict() was called while this rank has late gradients pending, or results that it has missed: "
            "call optimizer.flush() on every rank before, or the replicas that are saved differ",
            stacklevel=3,
        )
