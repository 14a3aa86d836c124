"""Checks whether a program changes a round's result by hand between an optimizer's `synchronize` and `step`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from horovod_partial.torch.buckets import GradientBucket


class ShownResult:
    """The result of a round that the program sees after `synchronize`. `step` applies it later.

    The program may change this result by hand, for example to clip it, or may leave it out. If this rank has missed more
    rounds, their results would not be changed alike, and the model would differ from those of other ranks. That is an
    error. Only the thread that takes the optimizer's steps uses this object.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []  # PyTorch's version counters of the shown gradients; empty if none are shown
        # Copies of the gradients that the program sees, if further missed rounds wait to be applied.
        self._copies: list[torch.Tensor] = []
        self._misses_more = False
        self._is_by_hand = False  # whether the program has changed a round's result by hand, or has skipped one
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._versions)

    def show(self, buckets: Sequence[GradientBucket], *, misses_more: bool) -> None:
        """Remember the gradients that the program sees from now on, to notice whether it changes them.

        PyTorch's version counter overlooks some changes. If the rank `misses_more` rounds, copies find those, too.
        """
        self._versions = [bucket.flat._version for bucket in buckets]
        self._misses_more = misses_more
        self._copies = [bucket.flat.clone() for bucket in buckets] if misses_more else []

    def forget(self) -> None:
        """Forget the shown result of a round: the program sees none from now on."""
        self._versions, self._copies = [], []

    def was_changed(self, buckets: Sequence[GradientBucket]) -> bool:
        """Forget the shown result; return if it was changed. A change raises RuntimeError if more rounds are missed."""
        versions, copies = self._versions, self._copies
        self.forget()
        if not versions:
            return False
        same = versions == [bucket.flat._version for bucket in buckets] and all(b.is_shown() for b in buckets)
        if same and all(bucket.holds(copy) for bucket, copy in zip(buckets, copies, strict=False)):
            return False
        self._is_by_hand = True
        if self._misses_more:
            raise RuntimeError(_CHANGED_BY_HAND)
        return True

    def leave_out(self, *, had_late: bool) -> None:
        """Forget the shown result: no step has used it. Raises RuntimeError if gradients of other steps are concerned.

        They are if this rank has missed more rounds, or `had_late`: the step's gradients are late, or late ones are in it.
        """
        is_left_out = bool(self)
        self.forget()
        if not is_left_out:
            return
        self._is_by_hand = True
        if self._misses_more or had_late:
            raise RuntimeError(_LEFT_OUT)

    def warn_of_missed_round(self) -> None:
        """Warn once, when a missed round is applied, if the program has changed a result by hand before."""
        if self._is_by_hand and not self._has_warned:
            self._has_warned = True
            warnings.warn(_CHANGED_BY_HAND, stacklevel=2)


_CHANGED_BY_HAND = (
    "gradients were changed by hand after optimizer.synchronize(), and this rank has missed rounds, whose gradients are not "
    "changed so: replicas may part. Let the optimizer do it for each round: "
    "hvd.DistributedOptimizer(..., max_grad_norm=1.0), or max_grad_value= or grad_transform="
)

_LEFT_OUT = (
    "the result of a round was shown by optimizer.synchronize(), and zero_grad() or another backward pass came before a step with "
    "it. But a rank was late: its gradients of this step will be in a later round, or its gradients of an earlier step were in this one, "
    "and are lost. To accumulate several backward passes, pass backward_passes_per_step= to hvd.DistributedOptimizer, and synchronize "
    "after the last pass only. If these gradients were made by the loss of another optimizer, as with a GAN, call "
    "requires_grad_(False) on this optimizer's model around that backward pass (examples/torch/cookbook/gan.py). To leave gradients "
    "out by their values, pass grad_transform="
)
