"""One rank's part of `hvd.SlowMomentum`: the momentum of averages over all ranks, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from horovod_partial.policies import SlowMomentum


class SlowMomentumState:
    """The model after the last average over all ranks (the anchor), and how the averages have moved it.

    Each rank adds the momentum to its contribution, not to the average. So all ranks get the same model even if some
    have missed rounds, and each rank computes the momentum from this model and the anchor. Nothing else needs to agree.

    Only the thread that uses the optimizer uses this object. Tensors are flat, in the dtype in which the model travels.
    """

    def __init__(self, policy: SlowMomentum) -> None:
        self._policy = policy
        # The model after the last average over all ranks; None before the first one.
        self._anchor: torch.Tensor | None = None
        self._momentum: torch.Tensor | None = None

    @torch.no_grad()
    def contribute(self, model: torch.Tensor) -> None:
        """Add the momentum to this rank's model, in place. The sum is its contribution to an average over all ranks."""
        if self._anchor is None or self._momentum is None:
            return
        # State from a checkpoint may be on another device than the model. Move it to the model's device.
        self._anchor, self._momentum = self._anchor.to(model), self._momentum.to(model)
        momentum = self._momentum.mul(self._policy.beta).add_(self._anchor).sub_(model)
        torch.sub(self._anchor, momentum, alpha=self._policy.alpha, out=model)

    @torch.no_grad()
    def take(self, average: torch.Tensor) -> None:
        """Take the average of all ranks' contributions: compute the new momentum from it, and make it the anchor."""
        if self._anchor is not None:
            self._momentum = (self._anchor - average).div_(self._policy.alpha)
        self.begin_at(average)

    @torch.no_grad()
    def begin_at(self, model: torch.Tensor) -> None:
        """Use a model, equal on all ranks, as the anchor (the start of the next momentum). Keep the old momentum."""
        self._anchor = model.clone()
        if self._momentum is None:
            self._momentum = torch.zeros_like(self._anchor)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the anchor (the last average over all ranks) and the momentum; None before there is an anchor."""
        return None if self._anchor is None else {"anchor": self._anchor, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the anchor (the last average over all ranks) and the momentum from a saved state. None forgets both."""
        self._anchor = None if state is None else state["anchor"].clone()
        self._momentum = None if state is None else state["momentum"].clone()
