"""Slow momentum on one rank: momentum of the averages over all ranks, for `hvd.SlowMomentum`."""

from __future__ import annotations

from typing import Any

import torch

from horovod_partial.policies import SlowMomentum


class SlowMomentumState:
    """The model after the last average over all ranks (the anchor), and how the averages have moved it.

    Each rank adds the momentum to its contribution, not to the average. So all ranks get the same model even if some
    have missed rounds, and each rank computes the momentum from this model and the anchor. Nothing else must be equal.

    Only the thread that uses the optimizer uses this. Tensors are flat, in the type in which the model travels.
    """

    def __init__(self, policy: SlowMomentum) -> None:
        self._policy = policy
        self._anchor: torch.Tensor | None = None  # None before the first average
        self._momentum: torch.Tensor | None = None

    @torch.no_grad()
    def contribute(self, model: torch.Tensor) -> None:
        """Change this rank's model in place into its contribution to an average over all ranks."""
        if self._anchor is None or self._momentum is None:
            return
        # A loaded state may be on another device.
        self._anchor, self._momentum = self._anchor.to(model), self._momentum.to(model)
        momentum = self._momentum.mul(self._policy.beta).add_(self._anchor).sub_(model)
        torch.sub(self._anchor, momentum, alpha=self._policy.alpha, out=model)

    @torch.no_grad()
    def take(self, average: torch.Tensor) -> None:
        """Learn the momentum from an average of such contributions over all ranks."""
        if self._anchor is not None:
            self._momentum = (self._anchor - average).div_(self._policy.alpha)
        self.begin_at(average)

    @torch.no_grad()
    def begin_at(self, model: torch.Tensor) -> None:
        """Take this model as the anchor. All ranks have it now, from an average without momentum. The momentum stays."""
        self._anchor = model.clone()
        if self._momentum is None:
            self._momentum = torch.zeros_like(self._anchor)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the anchor and the momentum; None before the first average."""
        return None if self._anchor is None else {"anchor": self._anchor, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load what `state_dict` has returned. None starts from the beginning."""
        self._anchor = None if state is None else state["anchor"].clone()
        self._momentum = None if state is None else state["momentum"].clone()
