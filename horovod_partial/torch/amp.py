"""Lets a GradScaler change its scale and skip steps once for each round, instead of once for each step of this rank."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch

Followers: TypeAlias = "weakref.WeakSet[Any]"  # optimizers whose contributions travel unscaled


def follow_rounds(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler follow the rounds of a wrapped optimizer.

    A contribution is divided by the scale before it travels, because a late contribution may be reduced together with
    contributions of another scale. So results are always unscaled, and the scaler's `unscale_` only waits for them. Its
    `step` calls the optimizer's step, which skips rounds whose result is not finite; these are the same on every rank.
    Its `update` updates the scale once for each round.
    """
    followers: Followers | None = getattr(scaler, "_horovod_partial_followers", None)
    if followers is None:
        followers = weakref.WeakSet()
        scaler._horovod_partial_followers = followers  # type: ignore[attr-defined]
        _take_over(scaler, followers)
    followers.add(optimizer)


def _take_over(scaler: torch.amp.GradScaler, followers: Followers) -> None:
    unscale, step, update = scaler.unscale_, scaler.step, scaler.update

    def unscale_(optimizer: Any) -> None:
        if optimizer not in followers:
            unscale(optimizer)
        elif not optimizer._exchange.synchronized and optimizer.ends_update:
            optimizer.synchronize()

    def step_(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer not in followers:
            return step(optimizer, *args, **kwargs)
        return optimizer.step(*args, **kwargs)

    def update_(new_scale: float | torch.Tensor | None = None) -> None:
        exchanges = [optimizer._exchange for optimizer in followers]
        rounds = [list(exchange.overflows) for exchange in exchanges]
        for exchange in exchanges:
            exchange.overflows.clear()
        if new_scale is not None:
            update(new_scale)
            return
        others = any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())
        for index in range(max(max(map(len, rounds), default=0), int(others))):
            overflow = any(found[index] for found in rounds if index < len(found))
            scale: Any = scaler._scale
            state = scaler._per_optimizer_states[id(followers)]
            state["found_inf_per_device"] = {scale.device: torch.full((), float(overflow), device=scale.device)}
            update()

    scaler.unscale_, scaler.step, scaler.update = unscale_, step_, update_  # type: ignore[method-assign]
