"""Keeps track of which wrapped optimizer a parameter belongs to: the one that was wrapped last.

A wrapper reduces a parameter's gradient as soon as backward has made it. If a parameter had two wrappers, one would
write the gradient while the other reduces it.
"""

from __future__ import annotations

import weakref
from typing import Any

from horovod.common.process_sets import ProcessSet
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_partial.torch.operations import runtime

# For each parameter, a weak reference to the wrapped optimizer that owns it.
# The table of owners needs no lock, because only threads that wrap or use optimizers read and write it.
_owners: Any = WeakTensorKeyDictionary()


def take_over(optimizer: Any, process_set: ProcessSet) -> None:
    """Make a wrapped optimizer the owner of its parameters, except those that require no gradient.

    An earlier wrapper of any of these parameters reduces nothing from now on. If it is in the middle of a step, this
    raises ValueError. On a rank outside the process set nothing changes, because the new wrapper reduces nothing here.
    """
    if runtime.is_initialized() and not process_set.included():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    earlier = {id(owner): owner for owner in map(_owner, parameters) if owner is not None and owner is not optimizer}
    for owner in earlier.values():
        if owner.is_under_way():
            raise ValueError(
                "this optimizer shares parameters with an earlier hvd.DistributedOptimizer, whose gradients are under way: call "
                "its step() or zero_grad() first"
            )
    for owner in earlier.values():
        owner.gives_way = True
        owner.stop_reducing()
    for parameter in parameters:
        _owners[parameter] = weakref.ref(optimizer)


def require_ownership(optimizer: Any) -> None:
    """Raise RuntimeError if a later wrapper has taken over parameters of this optimizer."""
    if optimizer.gives_way:
        raise RuntimeError(
            "a later hvd.DistributedOptimizer was made for parameters of this one, and reduces their gradients: take steps with "
            "the later one only, and make learning rate schedules for it"
        )


def _owner(parameter: Any) -> Any:
    reference = _owners.get(parameter)
    return None if reference is None else reference()
