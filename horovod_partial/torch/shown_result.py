"""Notices whether a program changes a round's result by hand between an optimizer's `synchronize` and `step`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod_partial.torch.buckets import GradientBucket


class ShownResult:
    """The gradients that the program sees after `synchronize`, and that `step` applies later.

    Only the thread that takes the optimizer's steps uses this object.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []  # PyTorch's version counters of the shown gradients; empty if none are shown
        self._copies: list[torch.Tensor] = []  # copies of the shown gradients; empty if none were made

    def show(self, buckets: Sequence[GradientBucket], *, copies: bool) -> None:
        """Remember the gradients that the program sees from now on, to notice whether it changes them.

        PyTorch's version counter overlooks some changes. With `copies`, those are found too.
        """
        self._versions = [bucket.flat._version for bucket in buckets]
        self._copies = [bucket.flat.clone() for bucket in buckets] if copies else []

    def forget(self) -> None:
        """Forget the shown gradients: the program sees none from now on."""
        self._versions, self._copies = [], []

    def was_changed(self, buckets: Sequence[GradientBucket]) -> bool:
        """Forget the shown gradients. Returns whether the program has changed them."""
        versions, copies = self._versions, self._copies
        self.forget()
        if not versions:
            return False
        same = versions == [bucket.flat._version for bucket in buckets] and all(b.is_shown() for b in buckets)
        return not (same and all(bucket.holds(copy) for bucket, copy in zip(buckets, copies, strict=False)))
