"""Which wrapped optimizer a parameter belongs to: the one that was wrapped last.

Each wrapper reduces a parameter's gradient as soon as backward has made it. Two of them would write the gradient while the
other one reduces it.
"""

from __future__ import annotations

import weakref
from typing import Any

from horovod.common.process_sets import ProcessSet
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_partial.torch.operations import runtime

# By parameter a weak reference to the wrapped optimizer. Only the application's threads, which wrap optimizers, use it.
_owners: Any = WeakTensorKeyDictionary()


def take_over(optimizer: Any, process_set: ProcessSet) -> None:
    """Let all parameters that need gradients belong to a new wrapper. Earlier wrappers of any of them reduce nothing from now on.

    A wrapper of a process set without this rank reduces nothing here, and takes nothing over.

    Raises:
        ValueError: an earlier wrapper is in the middle of a step.
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
    """Refuse a step with gradients that another wrapper reduces.

    Raises:
        RuntimeError: a later wrapper has taken parameters of this one.
    """
    if optimizer.gives_way:
        raise RuntimeError(
            "a later hvd.DistributedOptimizer was made for parameters of this one, and reduces their gradients: take steps with "
            "the later one only, and make learning rate schedules for it"
        )


def _owner(parameter: Any) -> Any:
    reference = _owners.get(parameter)
    return None if reference is None else reference()
