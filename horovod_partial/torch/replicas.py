"""Functions of `hvd` that check, save and equalise replicas: comparisons, checkpoints, averages and broadcasts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import functions, mpi_ops

from horovod_partial.checks import require
from horovod_partial.exchange import replicas
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.torch.model_operations import ModelBucket
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replica import ReplicaState
from horovod_partial.torch.round_applier import RoundApplier
from horovod_partial.torch.shared_gradients import SharedGradients

_NO_OPTIMIZER = SimpleNamespace(state={}, param_groups=[])

# Keys by which the state of a learning rate schedule, or of a GradScaler, is recognised. A flush may change both.
_MOVED_BY_ROUNDS = ({"last_epoch", "_step_count"}, {"scale", "growth_factor", "_growth_tracker"})


def assert_replicas_equal(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Compare parameters, and the optimizer's state, over the ranks of `process_set`, bit for bit.

    Every rank of `process_set` must call this.

    The comparison costs a hash of each tensor and one small collective. Call `optimizer.flush()` before. Buffers, such
    as those of BatchNorm, are not compared, because each rank has its own.

    Args:
        model: the model whose parameters are compared.
        optimizer: the optimizer whose state is compared; None compares no state.
        process_set: the ranks that take part.

    Raises:
        ValueError: an argument is wrong.
        AssertionError: replicas differ. Every rank raises it, and the message names the first tensor that
            differs, and the ranks where it differs.
    """
    check_kinds({"process_set": process_set})
    require(isinstance(model, torch.nn.Module), "model", "a torch.nn.Module", model)
    fits = optimizer is None or isinstance(getattr(optimizer, "param_groups", None), list)
    require(fits, "optimizer", "an optimizer of PyTorch", optimizer)
    if not process_set.included():
        return
    groups = [] if optimizer is None else optimizer.param_groups
    names = {parameter: f"number {i}" for i, parameter in enumerate(p for group in groups for p in group["params"])}
    names |= {parameter: name for name, parameter in model.named_parameters()}
    replicas.check_equal(ReplicaState(optimizer or _NO_OPTIMIZER, names, ()), runtime, process_set)


def save_checkpoint(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Any, **more: Any) -> None:
    """Flush the optimizer, then write a checkpoint on the first rank of its process set; every rank must call this.

    Under `hvd.WorkSharing()` this does not flush, because between two steps a rank's model is always that of its newest
    update. Call it from a round hook there (`optimizer.register_round_hook`): a hook sees each update once.

    The file appears whole or not at all. `torch.load` returns a dictionary with the state dictionaries `model` and
    `optimizer`, and the entries of `more`. Numbers of NumPy are saved as Python's. Buffers come from the rank that
    writes: if that matters, call `hvd.average_buffers` before.

    Args:
        path: path of the file.
        model: the model.
        optimizer: a `hvd.DistributedOptimizer`.
        more: further entries, such as an epoch. If an entry has a `state_dict` method (a learning rate schedule, a
            scaler), its state is saved. Pass the object, not its state, because the flush may change it.

    Raises:
        ValueError: the optimizer is not wrapped, or an argument is wrong, such as the state of a schedule or a scaler
            instead of the object.
        AssertionError: gradients are under way; call it after `step`.
    """
    require(isinstance(path, str | os.PathLike), "path", "that of a file", path)
    require(isinstance(model, torch.nn.Module), "model", "a torch.nn.Module", model)
    if not hasattr(optimizer, "flush"):
        raise ValueError("optimizer must be a hvd.DistributedOptimizer; save others with torch.save")
    for name, value in more.items():
        if isinstance(value, Mapping) and any(keys <= value.keys() for keys in _MOVED_BY_ROUNDS):
            raise ValueError(
                f"{name} was taken before the flush, which may move it: give save_checkpoint the object itself, {name}={name}, and "
                "not its state_dict()"
            )
    if not isinstance(getattr(optimizer, "_exchange", None), SharedGradients):
        optimizer.flush()
    if not optimizer.process_set.included() or optimizer.process_set.rank() != 0:
        return
    whole = Path(path)
    part = whole.with_name(f"{whole.name}.part")
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in more.items()}
    torch.save({"model": model.state_dict(), **_without_numpy({"optimizer": optimizer.state_dict(), **states})}, part)
    part.replace(whole)


def _without_numpy(value: Any) -> Any:
    """Return nested dictionaries, lists and tuples without NumPy's numbers, which `torch.load` refuses."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
    return type(value)(map(_without_numpy, value)) if type(value) in (list, tuple) else value


def average_buffers(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Average a model's floating-point buffers over the ranks of `process_set`, in place. All of them must call this.

    Running statistics, such as those of BatchNorm, come from each rank's own batches, same as with Horovod. Call this
    on every rank after `optimizer.flush()`, before an evaluation or a checkpoint. Counters and other integers are not
    changed.

    Args:
        model: the model whose buffers are averaged.
        process_set: the ranks that take part.

    Raises:
        ValueError: an argument is wrong.
    """
    check_kinds({"process_set": process_set})
    require(isinstance(model, torch.nn.Module), "model", "a torch.nn.Module", model)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers or not process_set.included():
        return
    packed = ModelBucket(buffers)
    packed.pack()
    mpi_ops.allreduce_(packed.flat, name="average_buffers", op=mpi_ops.Average, process_set=process_set)
    packed.unpack()


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Flush, because late gradients belong to the old model; then call `horovod.torch.broadcast_parameters`.

    All ranks must call this.
    """
    _flush()
    functions.broadcast_parameters(params, root_rank)
    tensors = params.values() if isinstance(params, Mapping) else [tensor for _, tensor in params]
    sent = {tensor.data_ptr() for tensor in tensors if torch.is_tensor(tensor)}
    for replica in [exchange.replica for exchange in runtime.exchanges()]:
        if isinstance(replica, ReplicaState):
            replica.optimizer._exchange.parameters_came(sent, root_rank)


def _flush() -> None:
    """Flush without a comparison of replicas, because a broadcast will give all of them the values of one rank."""
    if runtime.is_initialized():
        runtime.flush(global_process_set.process_set_id, compares=False)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Flush, then call `horovod.torch.broadcast_optimizer_state`. All ranks must call this.

    For an optimizer without state, such as plain SGD, Horovod sends nothing, and a resumed learning rate would stay on
    one rank. In this case the function sends the options of the parameter groups itself.
    """
    _flush()
    functions.broadcast_optimizer_state(optimizer, root_rank, model)
    exchange = getattr(optimizer, "_exchange", None)
    if isinstance(exchange, RoundApplier):
        exchange.state_came(root_rank)
    if optimizer.state:
        return
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    sent = functions.broadcast_object(own, root_rank, name="broadcast_optimizer_state")
    for group, values in zip(optimizer.param_groups, sent, strict=True):
        group.update(values)
