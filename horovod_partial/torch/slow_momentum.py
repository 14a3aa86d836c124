"""Momentum of the averages over all ranks, on one rank: what `hvd.SlowMomentum` asks for."""

from __future__ import annotations

from typing import Any

import torch

from horovod_partial.policies import SlowMomentum


class SlowMomentumState:
    """The model after the last average over all ranks, and how the averages have moved it.

    The momentum is put into what a rank contributes, not onto the average. So all ranks get one model, whatever single
    ranks have missed, and each finds the momentum from that model and the one before: nothing else has to be the same.

    Used by the thread that uses the optimizer. Tensors are flat, of the type in which the model travels.
    """

    def __init__(self, policy: SlowMomentum) -> None:
        self._policy = policy
        self._anchor: torch.Tensor | None = None  # None before the first average
        self._momentum: torch.Tensor | None = None

    @torch.no_grad()
    def contribute(self, model: torch.Tensor) -> None:
        """Turn this rank's model, in place, into what it contributes to an average over all ranks."""
        if self._anchor is None or self._momentum is None:
            return
        # A state that was loaded may lie on another device.
        self._anchor, self._momentum = self._anchor.to(model), self._momentum.to(model)
        momentum = self._momentum.mul(self._policy.beta).add_(self._anchor).sub_(model)
        torch.sub(self._anchor, momentum, alpha=self._policy.alpha, out=model)

    @torch.no_grad()
    def take(self, average: torch.Tensor) -> None:
        """Learn the momentum from an average over all ranks of what they have contributed."""
        if self._anchor is not None:
            self._momentum = (self._anchor - average).div_(self._policy.alpha)
        self.begin_at(average)

    @torch.no_grad()
    def begin_at(self, model: torch.Tensor) -> None:
        """All ranks have this model now, from an average without momentum; the momentum stays."""
        self._anchor = model.clone()
        if self._momentum is None:
            self._momentum = torch.zeros_like(self._anchor)

    def state_dict(self) -> dict[str, Any] | None:
        """The two tensors, or None before the first average."""
        return None if self._anchor is None else {"anchor": self._anchor, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state_dict` gave; from None it begins anew."""
        self._anchor = None if state is None else state["anchor"].clone()
        self._momentum = None if state is None else state["momentum"].clone()
