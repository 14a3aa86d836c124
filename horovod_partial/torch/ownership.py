"""Keeps track of which wrapped optimizer a parameter belongs to: the one that was wrapped last.

A wrapper reduces a parameter's gradient as soon as backward has made it. If a parameter had two wrappers, one would
write the gradient while the other reduces it. If the only wrapper was deleted, nobody would reduce the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from horovod.common.process_sets import ProcessSet
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_partial.torch.operations import runtime

# For each parameter, the `_Ownership` of the wrapped optimizer that owns it, even if that optimizer was deleted.
# The table of owners needs no lock, because only threads that wrap or use optimizers read and write it.
_owners: Any = WeakTensorKeyDictionary()


class _Ownership:
    """Records which wrapped optimizer owns some parameters. Refers weakly to that wrapper, which may be deleted.

    Until the wrapper is used for the first time, each parameter has a hook which checks that the wrapper still exists.
    """

    def __init__(self, optimizer: Any, process_set: ProcessSet) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._process_set = process_set
        self._hooks: list[Any] = []

    def begin(self, parameters: Iterable[Any]) -> None:
        """Check in each backward pass that the wrapper exists, until `rest` is called."""
        self._hooks += [p.register_post_accumulate_grad_hook(self._check) for p in parameters if p.is_leaf]

    def rest(self) -> None:
        """Check no more, because the wrapper has been used, or another one has taken its place."""
        while self._hooks:
            self._hooks.pop().remove()

    def _check(self, _: Any) -> None:
        """Raise RuntimeError in backward if the wrapper was deleted, and other ranks need this rank's gradients."""
        if self.optimizer() is not None or not runtime.is_initialized():
            return
        if self._process_set.included() and not runtime.is_alone(self._process_set):
            raise RuntimeError(
                "the object that hvd.DistributedOptimizer has returned was deleted before it took a step, so nobody combines these "
                "gradients over the ranks, and this rank would train alone. Keep that object, and take steps with it: optimizer = "
                "hvd.DistributedOptimizer(optimizer, ...)"
            )


def take_over(optimizer: Any, process_set: ProcessSet) -> None:
    """Make a wrapped optimizer the owner of its parameters, except those that require no gradient.

    An earlier wrapper of any of these parameters reduces nothing from now on. If it is in the middle of a step, this
    raises ValueError. On a rank outside the process set nothing changes, because the new wrapper reduces nothing here.
    """
    is_new = optimizer.ownership is None
    if is_new:
        optimizer.ownership = _Ownership(optimizer, process_set)
    if runtime.is_initialized() and not process_set.included():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    earlier = {owner for owner in map(_owners.get, parameters) if owner not in (None, optimizer.ownership)}
    alive = [wrapped for owner in earlier if (wrapped := owner.optimizer()) is not None]
    for wrapped in alive:
        if wrapped._exchange.is_under_way:
            raise ValueError(
                "this optimizer shares parameters with an earlier hvd.DistributedOptimizer, whose gradients are under way: call "
                "its step() or zero_grad() first"
            )
    for owner in earlier:
        owner.rest()
    for wrapped in alive:
        wrapped.gives_way = True
        wrapped._exchange.stop_reducing()
    for parameter in parameters:
        _owners[parameter] = optimizer.ownership
    if is_new:
        optimizer.ownership.begin(parameters)


def require_ownership(optimizer: Any) -> None:
    """Raise RuntimeError if a later wrapper has taken over parameters of this optimizer. Else end the hooks' checks."""
    if optimizer.gives_way:
        raise RuntimeError(
            "a later hvd.DistributedOptimizer was made for parameters of this one, and reduces their gradients: take steps with "
            "the later one only, and make learning rate schedules for it"
        )
    optimizer.ownership.rest()
