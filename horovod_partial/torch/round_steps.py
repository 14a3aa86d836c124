"""Clipping, transforms and hooks that every rank applies to each round, around the optimizer's own step."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from horovod_partial.checks import is_number, require, require_count

GradTransform = Callable[[list[torch.Tensor]], None]
RoundHook = Callable[[torch.optim.Optimizer], None]


class RoundSteps:
    """Clips and transforms the gradients of a round before the optimizer's own step, and calls hooks after it.

    A late rank applies several rounds in one call of `step`, and every rank must treat a round alike. Code that the
    user puts around `step` runs only once per call. Code that is given to this class runs for each round.

    The arguments are those of `hvd.DistributedOptimizer`; None means no clipping, or no transform. A bound of 0 or
    less, or a wrong type, raises ValueError. The newest round contains `steps` steps per rank, on average.
    """

    def __init__(
        self, max_grad_norm: float | None, max_grad_value: float | None, grad_transform: GradTransform | None
    ) -> None:
        for name, value in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            require(value is None or (is_number(value) and value > 0), name, "a number above 0", value)
        fits = grad_transform is None or callable(grad_transform)
        require(fits, "grad_transform", "a function of a list of tensors", grad_transform)
        self._max_norm = max_grad_norm
        self._max_value = max_grad_value
        self._transform = grad_transform
        self.steps = 1.0
        self._hooks: OrderedDict[int, RoundHook] = OrderedDict()
        self._states: OrderedDict[int, Any] = OrderedDict()

    @property
    def changes_gradients(self) -> bool:
        """Whether the user has asked for clipping, or for a transform of gradients."""
        return not (self._transform is None and self._max_norm is None and self._max_value is None)

    @property
    def hooks_wait(self) -> bool:
        """Whether the user's functions for each round may contain a collective, which waits for all ranks."""
        hooks = self._hooks.values()
        return self._transform is not None or not all(getattr(hook, "never_waits", False) for hook in hooks)

    @property
    def agreed(self) -> dict[str, Any]:
        """The arguments that must be the same on all ranks, by name; None for arguments that were not given."""
        return {
            "max_grad_norm": None if self._max_norm is None else float(self._max_norm),
            "max_grad_value": None if self._max_value is None else float(self._max_value),
            "grad_transform": None if self._transform is None else "a function",
        }

    def before(self, optimizer: torch.optim.Optimizer, steps: float = 1.0) -> None:
        """Transform and clip the gradients of a round. The round contains `steps` steps per rank, on average."""
        self.steps = steps
        if not self.changes_gradients:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:  # PyTorch cannot clip sparse gradients
                parameter.grad = parameter.grad.to_dense()
        if self._transform is not None:
            with torch.no_grad():
                self._transform([p.grad for p in parameters if p.grad is not None])
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        if self._max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._max_value)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the user's hooks, after a round has been applied."""
        for hook in list(self._hooks.values()):
            hook(optimizer)

    @property
    def followers(self) -> list[Any]:
        """The states that the user's hooks were registered with, such as moving averages and schedules."""
        return list(self._states.values())

    def register(self, hook: RoundHook, state: Any = None) -> RemovableHandle:
        """Register a round hook, which is called after each round. Hooks run in the order of registration."""
        require(callable(hook), "hook", "a function of an optimizer", hook)
        fits = state is None or all(callable(getattr(state, name, None)) for name in ("state_dict", "load_state_dict"))
        require(fits, "state", "something with state_dict and load_state_dict", state)
        handle = RemovableHandle(self._hooks, extra_dict=self._states)
        self._hooks[handle.id] = hook
        if state is not None:
            self._states[handle.id] = state
        return handle


def follow_rounds(scheduler: LRScheduler, every: int = 1) -> LRScheduler:
    """Let a learning rate schedule move with the rounds that its optimizer applies, instead of the steps of this rank.

    Under a partial policy a late rank applies several rounds in one step, and each must have the rate that it had on
    the other ranks. There are more rounds than steps, because a round may lack the gradients of some ranks. So each
    round moves the schedule by a part of a step: its number of gradients over the number of ranks
    (`optimizer.steps_in_round`). At the end of a training the schedule has made as many steps as a rank, under every
    policy. Under `hvd.Full()`, and where models are averaged, the schedule moves with this rank's steps. With
    `missed="latest"` it does too, because there no rank applies each round.

    Args:
        scheduler: made with the `hvd.DistributedOptimizer` itself. From now on its `step` without an argument does
            nothing, so existing training loops need no change.
        every: steps of training for each step of the schedule, 1 or more. A schedule by epochs needs
            `every=steps_per_epoch`. If ranks take different numbers of steps, their mean counts.

    Returns:
        The same schedule.

    Raises:
        ValueError: the schedule belongs to another optimizer, is a `ReduceLROnPlateau`, or follows rounds already, or
            `every` is not a positive integer.
    """
    require(isinstance(scheduler, LRScheduler), "scheduler", "a schedule of torch.optim.lr_scheduler", scheduler)
    optimizer: Any = scheduler.optimizer
    if not getattr(optimizer, "is_horovod_partial", False):
        raise ValueError(
            "make the schedule with the optimizer that hvd.DistributedOptimizer returns, not with the one within"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau follows a metric, not rounds: give its step the same metric on all ranks (hvd.allreduce), after "
            "optimizer.flush()"
        )
    require_count("every", every, 1)
    if getattr(scheduler, "_follows_rounds", False):
        raise ValueError("the schedule follows rounds already")
    base: Any = type(scheduler)

    def step(self: Any, epoch: int | None = None) -> None:
        if epoch is not None:
            base.step(self, epoch)

    def after_round(optimizer: Any) -> None:
        before = _whole(follower._steps / every)
        follower._steps += optimizer.steps_in_round
        for _ in range(before, _whole(follower._steps / every)):
            base.step(follower)

    after_round.never_waits = True  # type: ignore[attr-defined]
    # Replace `step` by a subclass. A function in an attribute of the schedule would be saved in its state_dict.
    follower: Any = scheduler
    follower.__class__ = type(base.__name__, (base,), {"step": step, "_follows_rounds": True})
    follower._steps = 0.0  # PyTorch saves and loads this attribute with the schedule's state
    optimizer.register_round_hook(after_round, state=follower)
    return scheduler


def _whole(steps: float) -> int:
    """Return the number of complete steps; 1e-6 makes up for rounding in the sum of parts of steps."""
    return math.floor(steps + 1e-6)
