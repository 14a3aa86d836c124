"""One model on all ranks: the check, the checkpoint, and what Horovod leaves different."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import functions, mpi_ops

from horovod_partial.checks import require
from horovod_partial.exchange import replicas
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.torch.model_buckets import ModelBucket
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replica import bytes_of

# Keys by which the state of a learning rate schedule, or of a scaler, is known. Both follow rounds.
_MOVED_BY_ROUNDS = ({"last_epoch", "_step_count"}, {"scale", "growth_factor", "_growth_tracker"})


def assert_replicas_equal(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Compare parameters, and the optimizer's state, over all ranks, bit for bit; every rank must come.

    Costs a hash of each tensor and one small collective. Call `optimizer.flush()` before. Buffers, as BatchNorm's, are each
    rank's own, and are left out.

    Args:
        model: whose parameters are compared.
        optimizer: whose state is compared too; None leaves it out.
        process_set: the ranks that take part.

    Raises:
        ValueError: an argument is wrong.
        AssertionError: replicas differ; on every rank, with the first tensor that does, and the ranks.
    """
    check_kinds({"process_set": process_set})
    require(isinstance(model, torch.nn.Module), "model", "a torch.nn.Module", model)
    fits = optimizer is None or isinstance(getattr(optimizer, "param_groups", None), list)
    require(fits, "optimizer", "an optimizer of PyTorch", optimizer)
    if not process_set.included():
        return
    hashes = {f"parameter {name}": _digest(parameter) for name, parameter in model.named_parameters()}
    if optimizer is not None:
        hashes.update((name, _digest(value)) for name, value in _state(model, optimizer))
    ranks = process_set.ranks if process_set.ranks is not None else range(mpi_ops.size())
    replicas.check_equal(hashes, lambda data: gather_bytes(data, "assert_replicas_equal", process_set), ranks)


def save_checkpoint(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Any, **more: Any) -> None:
    """Flush the optimizer, then write a checkpoint on the first rank of its process set; every rank must come.

    Under `hvd.WorkSharing()` it does not flush, since a rank's model is that of its newest update between any two steps. Call it
    in a round hook there, which sees each update once: `optimizer.register_round_hook`.

    The file appears whole or not at all. `torch.load` gives a dictionary with `model` and `optimizer`, which are state
    dictionaries, and `more`. Buffers are those of the rank that writes: call `hvd.average_buffers` before if that matters.

    Args:
        path: of the file.
        model: the model.
        optimizer: a `hvd.DistributedOptimizer`.
        more: further entries, such as an epoch. Of a learning rate schedule, a scaler or anything else that has a `state_dict`
            method, its state is saved: give the object itself, since the flush may move it.

    Raises:
        ValueError: the optimizer is not wrapped, or another argument is wrong; the state of a schedule or a scaler is given in
            place of the object.
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
    if not getattr(getattr(optimizer, "_exchange", None), "shares_work", False):
        optimizer.flush()
    if not optimizer.process_set.included() or optimizer.process_set.rank() != 0:
        return
    whole = Path(path)
    part = whole.with_name(f"{whole.name}.part")
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in more.items()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **states}, part)
    part.replace(whole)


def average_buffers(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Let a model's floating-point buffers be their average over all ranks, in place; every rank must come.

    Running statistics, as BatchNorm's, are of each rank's own batches, as with Horovod. Call this on every rank after
    `optimizer.flush()`, before an evaluation or a checkpoint. Counters and other integers stay each rank's own.

    Args:
        model: whose buffers are averaged.
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
    """`horovod.torch.broadcast_parameters`, after a flush: what is late belongs to the model before. All ranks come."""
    _flush()
    functions.broadcast_parameters(params, root_rank)


def _flush() -> None:
    """Replicas may have parted: they are about to get one rank's values."""
    if runtime.is_initialized():
        runtime.flush(global_process_set.process_set_id, compares=False)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """`horovod.torch.broadcast_optimizer_state` after a flush, also for an optimizer without state, such as plain SGD.

    Horovod sends nothing then, so a learning rate that one rank has resumed would be its own. All ranks come.
    """
    _flush()
    functions.broadcast_optimizer_state(optimizer, root_rank, model)
    if optimizer.state:
        return
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    sent = functions.broadcast_object(own, root_rank, name="broadcast_optimizer_state")
    for group, values in zip(optimizer.param_groups, sent, strict=True):
        group.update(values)


def gather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
    """The bytes of every rank, of any length, by rank."""
    sizes = mpi_ops.allgather(torch.tensor([len(data)]), name=f"{name}.sizes", process_set=process_set)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everything = mpi_ops.allgather(tensor, name=name, process_set=process_set)
    return [part.numpy().tobytes() for part in everything.split(sizes.tolist())]


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"state {key} of parameter {names.get(id(parameter), index)}", value


def _digest(value: Any) -> str:
    if not torch.is_tensor(value):
        return replicas.digest(repr(value).encode())
    return replicas.digest(bytes_of(value))
