"""What the wrapped optimizers have in common: each is an instance of a subclass of the optimizer's own class."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet

_instances: Counter[str] = Counter()  # by what makes optimizers alike; the ranks make those in one order


def wrapper(optimizer: torch.optim.Optimizer, methods: type, **members: Any) -> Any:
    """An instance of a subclass of the optimizer's class, with `methods` in it, that shares its state and groups.

    The class has the members given, and `_base`: the optimizer's class.
    """
    base = type(optimizer)
    # Horovod's broadcast_optimizer_state knows a wrapper, whose step would reduce, by this module's name.
    body = {**vars(methods), "__module__": "horovod.torch.optimizer", "_base": base, **members}
    instance: Any = object.__new__(type(base.__name__, (base,), body))
    # A scheduler that was made before has put its own `step` on the instance, and would go on calling the bare one.
    instance.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    return instance


def bucket_name(process_set: ProcessSet, members: Any) -> str:
    """A name that is the same on all ranks whatever other optimizers they make, and another where the members differ."""
    digest = hashlib.sha256(f"{process_set.process_set_id} {members}".encode()).hexdigest()[:8]
    _instances[digest] += 1
    return f"DistributedOptimizer.{digest}.{_instances[digest]}"


def load_shared(optimizer: Any, base: type, state_dict: dict[str, Any]) -> None:
    """The base's `load_state_dict`, into the objects that the wrapped optimizer and its schedulers share."""
    state, groups = optimizer.state, optimizer.param_groups
    base.load_state_dict(optimizer, state_dict)  # type: ignore[attr-defined]
    state.clear()
    state.update(optimizer.state)
    groups[:] = optimizer.param_groups
    optimizer.state, optimizer.param_groups = state, groups


def unwrapped(optimizer: torch.optim.Optimizer, base: type) -> tuple[Any, ...]:
    """For `__reduce__`: the optimizer as an instance of its own class; hooks and handles do not travel."""
    state = {"defaults": optimizer.defaults, "state": optimizer.state, "param_groups": optimizer.param_groups}
    return base.__new__, (base,), state


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Horovod's checks of `named_parameters`, with its messages. Returns the names, which may be positions."""
    if named_parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {parameter: str(index) for index, parameter in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    return {parameter: name for name, parameter in named}
