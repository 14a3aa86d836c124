"""Partial allreduce of tensors, and the life cycle of Horovod around it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import mpi_lib_v2, mpi_ops
from horovod.torch.mpi_ops import Average, Sum

from horovod_partial import _attach, bucket_config, round_stats
from horovod_partial.checks import is_int, require
from horovod_partial.exchange.arguments import check_kinds, is_average, of_allreduce
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.policies import Full, Policy
from horovod_partial.runtime import Runtime, library_of
from horovod_partial.torch import horovod_waits
from horovod_partial.torch.devices import check_device, device_number, stream_handle

runtime = Runtime("torch", torch.__version__, mpi_ops, library_of(mpi_lib_v2), waits_are_told=True)
horovod_waits.install(runtime)

# The types that Horovod's PyTorch operations reduce, by the number that its core gives them.
_DTYPES = {torch.int32: 4, torch.int64: 5, torch.float16: 6, torch.float32: 7, torch.float64: 8}


class _InFlight:
    """Operations whose tensors must live, also when their handles do not. Some are never synchronized, as after a failed backward.

    Whenever twice as many are there as the last look has left, the next one looks which have ended. So each operation is
    looked at a few times, however many are in flight. Any thread may call.
    """

    def __init__(self) -> None:
        self._handles: set[PartialHandle] = set()
        self._next_look = 16

    def add(self, handle: PartialHandle) -> None:
        if len(self._handles) >= self._next_look:
            self._handles.difference_update([one for one in list(self._handles) if one.poll()])
            self._next_look = 16 + 2 * len(self._handles)
        self._handles.add(handle)

    def discard(self, handle: PartialHandle) -> None:
        self._handles.discard(handle)


_in_flight = _InFlight()


class PartialHandle:
    """An operation in flight."""

    def __init__(self, handle: Any, source: torch.Tensor, work: torch.Tensor, output: torch.Tensor) -> None:
        self.handle = handle
        self.source = source  # read until the round has run
        self.work = work
        self.output = output
        _in_flight.add(self)

    def poll(self) -> bool:
        return bool(self.handle.poll())

    def synchronize(self) -> torch.Tensor:
        try:
            runtime.wait(self.handle)
        finally:
            if self.handle.poll():  # not if an interrupt has ended the wait
                _in_flight.discard(self)
        if self.work is not self.output:
            self.output.copy_(self.work)
        return self.output

    def info(self) -> RoundInfo:
        info = self.handle.info()
        return RoundInfo(
            info.round, info.late, info.fresh, info.gradients, info.staleness, tuple(info.members), tuple(info.work)
        )


def init(*args: Any, **kwargs: Any) -> None:
    """`horovod.torch.init`, then a handshake that proves on every rank that partial collectives work there.

    Raises:
        ImportError: they do not: a hook does not run.
        ValueError: settings contradict each other; the same on every rank.
    """
    runtime.init(*args, **kwargs)
    make_config.cache_clear()  # rank 0 may have other settings
    _config_of.cache_clear()


def shutdown() -> None:
    """`horovod.torch.shutdown`, after everything pending has been delivered and every rank has come here.

    While an exception is being handled it does not wait, unless that is an exit with status 0. A program that ends without it
    does the same at exit.
    """
    runtime.shutdown()


def join(device: int | None = None) -> int:
    """`horovod.torch.join`, after what this rank has pending has been delivered.

    Args:
        device: of the zeros by which this rank takes part from then on, -1 for the CPU. Without it, where this rank's partial
            collectives are, as Horovod wants it.

    Returns:
        The rank that joined last.
    """
    return runtime.join(device=runtime.device_of_buckets() if device is None else device)


def flush(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank flushes, and all late contributions have been delivered.

    What this rank has missed of the rounds of its thread's optimizers is applied. Other results wait for the next operation of
    their name. Ranks that have joined need not come. One that has used no partial collective in this process set need not come
    either, and does not wait.
    """
    check_kinds({"process_set": process_set})
    check_initialized()
    runtime.flush(process_set.process_set_id)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """`horovod.torch.add_process_set`, after a flush of every process set in use; all ranks come, as with Horovod.

    Args:
        process_set: a `hvd.ProcessSet`, or the ranks of a new one.

    Raises:
        ValueError: there is one of these ranks already.
    """
    return runtime.add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """`horovod.torch.remove_process_set`, after a flush of every process set in use; all ranks come, as with Horovod.

    Returns:
        Whether there was such a process set. The one of all ranks stays.
    """
    return runtime.remove_process_set(process_set)


def partial_stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """What happened to the rounds, as a dictionary by bucket; its keys stand in the reference, under Statistics."""
    check_kinds({"process_set": process_set})
    return round_stats.summarise(runtime.statistics(process_set.process_set_id))


def record(directory: str | os.PathLike[str], megabytes: float = 64.0) -> None:
    """Record from now on what this rank sees: who is slow, and what for. `horovod-partial report` reads it.

    As `HOROVOD_PARTIAL_RECORD`, from the begin of the program on. Call it on every rank, at the same place. It ends with
    Horovod. Nothing is sent; a thread writes once a second.

    Args:
        directory: made where it is not there; each run has a folder of its own in it.
        megabytes: size of this rank's files, 1 or more; of more than that the oldest is dropped.

    Raises:
        RuntimeError: the files cannot be made, or this rank is being recorded already.
        ValueError: an argument is out of range, or Horovod has not been initialised.
    """
    check_initialized()
    runtime.record(directory, megabytes)


@functools.lru_cache(maxsize=4096)  # one for each bucket; called in every round
def make_config(
    *, dtype: torch.dtype, shape: tuple[int, ...], device: int = -1, op: int = Average, **arguments: Any
) -> _attach.BucketConfig:
    """What the core is told of a bucket, after checking it. `dtype` is that of the wire."""
    spec = bucket_config.arguments(
        average=is_average(op, Average, Sum), is_integer=not dtype.is_floating_point, **arguments
    )
    return _attach.BucketConfig(spec, dtype=_DTYPES[dtype], shape=list(shape), device=device)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that travels: bfloat16, which Horovod 0.28.1 lacks, is widened to float32 (twice the bytes).

    Raises:
        ValueError: Horovod does not reduce tensors of this type.
    """
    if dtype == torch.bfloat16:
        return torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"Tensor type {dtype} is not supported.")
    return dtype


def partial_allreduce_async_(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    sync: Policy | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
    missed: str | None = None,
) -> PartialHandle | int:
    """Sum or average a tensor over the ranks that are there in time; in place, without waiting for the result.

    A rank that comes too late for a round gets that round's result (several missed ones are added up) at once, and its
    own contribution travels with the next round (eager-SGD, PPoPP'20, section 4). Over all rounds, and after `flush`,
    every contribution has been delivered exactly once. The result has no gradient.

    Args:
        tensor: what to reduce: contiguous, on the host, int32, int64, float16, float32, float64, or bfloat16, which
            travels as float32 at twice its bytes. Leave it alone until `hvd.synchronize`; it holds the result afterwards.
            One that requires a gradient is refused under a partial policy, except in `torch.no_grad()`: pass
            `tensor.detach()`.
        name: names the bucket; the same on every rank and in every round. Required: rounds follow the name.
        op: `hvd.Average` (divides by the number of ranks, not of contributors) or `hvd.Sum`. Integers need `hvd.Sum`: each round
            of an average would cut their fraction off.
        sync: a policy, or its name; None takes `HOROVOD_PARTIAL_SYNC`. Under `hvd.Full()` this is `hvd.allreduce_async_`.
        prescale_factor: multiplies the tensor before the sum.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        max_staleness: as in `hvd.DistributedOptimizer`.
        grace_ms: as in `hvd.DistributedOptimizer`.
        missed: `"sum"`, the default, or `"latest"`, as in `hvd.DistributedOptimizer`.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`.

    Raises:
        ValueError: an argument is wrong, or the name is bound to another shape, dtype or policy, or in use.
        HorovodInternalError: Horovod has failed or was shut down, or the ranks disagree about the bucket.
    """
    return _submit(
        tensor,
        tensor,
        name,
        op,
        sync,
        prescale_factor,
        postscale_factor,
        process_set,
        _Options(max_staleness, grace_ms, missed),
    )


def partial_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    sync: Policy | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
    missed: str | None = None,
) -> PartialHandle | int:
    """As `partial_allreduce_async_`, with the result in a new tensor."""
    output = empty_like(tensor)
    return _submit(
        tensor,
        output,
        name,
        op,
        sync,
        prescale_factor,
        postscale_factor,
        process_set,
        _Options(max_staleness, grace_ms, missed),
    )


def partial_allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `partial_allreduce_async_`, and waits for the result."""
    return synchronize(partial_allreduce_async_(tensor, *args, **kwargs))


def partial_allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `partial_allreduce_async`, and waits for the result."""
    return synchronize(partial_allreduce_async(tensor, *args, **kwargs))


def check_initialized() -> None:
    """Raise ValueError where Horovod is not up."""
    if not mpi_ops.is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")


class _Options(NamedTuple):
    max_staleness: int | None
    grace_ms: float | str | None
    missed: str | None


def _submit(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    sync: Policy | str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    options: _Options,
) -> PartialHandle | int:
    require_tensor(tensor)
    if not isinstance(process_set, ProcessSet):
        check_kinds({"process_set": process_set})
    size = runtime.size_of(process_set) if mpi_ops.is_initialized() else None
    # Under a mode, as torch.set_default_device enters one, each look at a tensor would run Python.
    with torch.DisableTorchFunction():
        what = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.device,
            size,
            op,
            sync,
            prescale_factor,
            postscale_factor,
            options,
        )
        try:
            config = _config_of(*what)
        except TypeError:  # an argument has no hash, and so is a wrong one
            config = _config_of.__wrapped__(*what)
        if config is not None:
            return submit(tensor, output, _check_call(tensor, name), process_set, config)
    check_kinds({"name": name})
    check_initialized()
    return mpi_ops._allreduce_async(tensor, output, name, op, prescale_factor, postscale_factor, process_set)


@functools.lru_cache(maxsize=4096, typed=True)  # checks cost more than all the rest; a program repeats its arguments
def _config_of(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    size: int | None,
    op: int,
    sync: Policy | str | None,
    prescale_factor: float,
    postscale_factor: float,
    options: _Options,
) -> _attach.BucketConfig | None:
    """What the core is told of a tensor, after checking it; None under `Full()`."""
    arguments = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    policy, missed = of_allreduce(sync, arguments | options._asdict())
    if isinstance(policy, Full):
        return None
    check_initialized()
    check_device(device)
    return make_config(
        dtype=wire_dtype(dtype),
        shape=shape,
        device=device_number(device),
        sync=policy,
        size=size,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        max_staleness=options.max_staleness,
        grace_ms=options.grace_ms,
        missed=missed,
    )


def require_tensor(tensor: Any) -> None:
    """Refuse what is no tensor."""
    require(isinstance(tensor, torch.Tensor), "tensor", "a torch.Tensor", tensor)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Where the result of a tensor goes that is not to be changed."""
    require_tensor(tensor)
    return torch.empty_like(tensor)


def check_arguments(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> str:
    """Refuse what no partial collective takes; returns the name."""
    check_kinds({"name": name, "process_set": process_set})
    require_tensor(tensor)
    check_initialized()
    check_device(tensor.device)
    return _check_call(tensor, name)


def _check_call(tensor: torch.Tensor, name: str | None) -> str:
    """The part of `check_arguments` that another call with such a tensor does not spare."""
    if not isinstance(name, str) or not name:
        check_kinds({"name": name})
        raise ValueError("a partial collective needs a name, the same in every round: pass name=")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("partial collectives are not differentiable; pass tensor.detach(), or use hvd.allreduce")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return name


def submit(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str,
    process_set: ProcessSet,
    config: _attach.BucketConfig,
    work: int = 0,
) -> PartialHandle:
    """Arrive at a bucket's open round with a contiguous tensor, widened if its type does not travel."""
    wire = wire_dtype(tensor.dtype)
    source = tensor if wire == tensor.dtype else tensor.to(wire)
    target = output if wire == output.dtype else torch.empty_like(source)
    stream = stream_handle(source.device)
    handle = runtime.submit(
        process_set.process_set_id, name, config, source.data_ptr(), target.data_ptr(), work, stream
    )
    return PartialHandle(handle, source, target, output)


def _require_handle(handle: Any) -> None:
    require(is_int(handle), "handle", "what an asynchronous operation has returned", handle)


def synchronize(handle: PartialHandle | int) -> torch.Tensor:
    """Wait for an operation of either kind, and return its result."""
    if isinstance(handle, PartialHandle):
        return handle.synchronize()
    _require_handle(handle)
    return mpi_ops.synchronize(handle)


def poll(handle: PartialHandle | int) -> bool:
    """Whether an operation of either kind has finished, so that `synchronize` would not block."""
    if isinstance(handle, PartialHandle):
        return handle.poll()
    _require_handle(handle)
    return mpi_ops.poll(handle)


def round_info(handle: PartialHandle | int) -> RoundInfo:
    """What became of a finished operation. Under `hvd.Full()` there are no rounds: numbers are -1.

    Raises:
        ValueError: it has not finished; synchronize it first.
    """
    if isinstance(handle, PartialHandle):
        return handle.info()
    _require_handle(handle)
    return RoundInfo(round=-1, late=False, fresh=-1, gradients=-1, staleness=0)
