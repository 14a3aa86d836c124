"""Partial allreduces of PyTorch's tensors. Extends Horovod's `init`, `shutdown`, `join` and process sets for them."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average

from horovod_partial import _attach, _core
from horovod_partial.checks import is_int, require
from horovod_partial.exchange.arguments import check_kinds, is_average, is_name, of_allreduce
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.policies import Full, Policy
from horovod_partial.runtime import bucket_config, round_stats
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.settings import settings
from horovod_partial.torch.devices import check_device, device_number, stream_handle

__all__ = [
    "add_process_set",
    "flush",
    "init",
    "join",
    "partial_allreduce",
    "partial_allreduce_",
    "partial_allreduce_async",
    "partial_allreduce_async_",
    "partial_stats",
    "poll",
    "record",
    "remove_process_set",
    "round_info",
    "shutdown",
    "synchronize",
    "watch",
]

runtime = Runtime(mpi_ops, torch.from_numpy, waits_are_told=True)

_wait, _poll = mpi_ops.mpi_lib.horovod_torch_wait_and_clear, mpi_ops.mpi_lib.horovod_torch_poll
_LEAST_NS = 50_000  # shorter waits for Horovod's operations are not recorded: the operation was nearly over


def _wait_and_clear(handle: int) -> None:
    """Replace Horovod's wait: let this thread's optimizers apply missed rounds, and note how long the wait took."""
    if _poll(handle):
        _wait(handle)
        return
    begin = time.monotonic_ns()
    try:
        with runtime.in_horovods_wait(lambda: bool(_poll(handle))):
            _wait(handle)
    finally:
        end = time.monotonic_ns()
        if end - begin > _LEAST_NS:
            runtime.core.record_wait(begin, end)  # times of time.monotonic_ns; ignored if this rank is not timed


def _is_over(handle: int) -> int:
    """Replace Horovod's question whether an operation is over: this thread's optimizers may apply missed rounds."""
    over: int = _poll(handle)
    runtime.asks_horovod(over=bool(over))
    return over


mpi_ops.mpi_lib.horovod_torch_wait_and_clear, mpi_ops.mpi_lib.horovod_torch_poll = _wait_and_clear, _is_over

add_process_set = runtime.add_process_set
init = runtime.init
remove_process_set = runtime.remove_process_set
record = runtime.record
shutdown = runtime.shutdown
watch = runtime.watch

_DTYPES = {getattr(torch, name): number for name, number in bucket_config.DTYPES.items()}


class _InFlight(set["PartialHandle"]):
    """Keeps the tensors of operations alive until the operations have ended, even if the program drops the handles.

    Some handles are never synchronized, for example after a failed backward pass. `add` removes ended operations, but
    only when the set has doubled, so the cost per operation stays small. Any thread may use this object.
    """

    _next_look = 16

    def add(self, handle: PartialHandle) -> None:
        if len(self) >= self._next_look:
            self.difference_update([one for one in list(self) if one.poll()])
            self._next_look = 16 + 2 * len(self)
        super().add(handle)


_in_flight = _InFlight()


class PartialHandle:
    """A partial collective in flight. It keeps the tensors alive that the core reads and writes."""

    def __init__(self, handle: Any, source: torch.Tensor, work: torch.Tensor, output: torch.Tensor) -> None:
        self.handle = handle
        self.source = source  # the operation reads this tensor until the round has ended
        self.work = work
        self.output = output
        _in_flight.add(self)

    def poll(self) -> bool:
        return bool(self.handle.poll())

    def synchronize(self) -> torch.Tensor:
        try:
            runtime.wait(self.handle)
        finally:
            if self.handle.poll():  # after an interrupted wait the operation may still use its tensors: keep them
                _in_flight.discard(self)
        if self.work is not self.output:
            self.output.copy_(self.work)
        return self.output

    def info(self) -> RoundInfo:
        info = self.handle.info()
        return RoundInfo(
            info.round, info.late, info.fresh, info.gradients, info.staleness, tuple(info.members), tuple(info.work)
        )


def join(device: int | None = None) -> int:
    """Deliver this rank's late contributions, call `horovod.torch.join`, then flush: all ranks have one model afterwards.

    Policies of models average nothing here: call `optimizer.flush()` of such an optimizer.

    Args:
        device: number of the GPU that holds the zeros which this rank contributes from then on; -1 is the CPU. None,
            the default, takes the device of this rank's partial collectives, because Horovod wants the same device.

    Returns:
        The rank that joined last.
    """
    return runtime.join(device=runtime.device_of_buckets() if device is None else device)


def flush(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank flushes, and all late contributions have been delivered.

    This applies missed rounds, for optimizers whose last step was taken by the calling thread, or by a thread that has
    ended. If an optimizer of another, idle thread has missed rounds, a warning says so. Outside optimizers a missed
    result comes with the next operation of the same name. Ranks that have joined, or have used no partial collective in
    this process set, need not call this. Threads that call this at the same time take turns.

    Raises:
        AssertionError: an optimizer applies a round, as in a round hook, or a micro-batch of `hvd.WorkSharing` lacks its
            step.
        ValueError: Horovod is not initialised.
    """
    check_kinds({"process_set": process_set})
    runtime.check_initialized()
    runtime.flush(process_set.process_set_id)


def partial_stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """Return what happened to the rounds of each bucket. `docs/api.md` explains the keys, under Statistics."""
    check_kinds({"process_set": process_set})
    return round_stats.summarise(runtime.statistics(process_set.process_set_id))


@functools.lru_cache(maxsize=4096)  # cached, because it is called in every round of each bucket
def make_config(
    *, dtype: torch.dtype, shape: tuple[int, ...], device: int = -1, op: int = Average, **arguments: Any
) -> _attach.BucketConfig:
    """Check the arguments of a bucket, and build its declaration for the core. `dtype` is that of the data sent."""
    spec = bucket_config.arguments(average=is_average(op), is_integer=not dtype.is_floating_point, **arguments)
    return _attach.BucketConfig(spec, dtype=_DTYPES[dtype], shape=list(shape), device=device)


def config_of(spec: _core.BucketSpec, dtype: torch.dtype, tensor: torch.Tensor) -> _attach.BucketConfig:
    """Build a bucket's declaration for the core. Contributions have the shape of `tensor`, and travel as `dtype`."""
    return _attach.BucketConfig(
        spec, dtype=_DTYPES[dtype], shape=list(tensor.shape), device=device_number(tensor.device)
    )


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that travels: float32 for bfloat16. Raises ValueError for others that Horovod 0.28.1 lacks."""
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
) -> PartialHandle | int:
    """Sum or average a tensor over the ranks that are there in time; in place, without waiting for the result.

    A rank that comes too late for a round gets the result of that round at once. If it has missed several, it gets their
    sum, or the newest if the policy says `missed="latest"`. Its own contribution travels with the next round (eager-SGD,
    PPoPP'20, section 4). Over all rounds, and after `flush`, every contribution has been delivered exactly once. The
    result has no gradient.

    Args:
        tensor: the contribution, and afterwards the result; contiguous, on the CPU or a GPU that Horovod reduces on;
            int32, int64, float16, float32, float64, or bfloat16, which travels as float32 at twice its bytes. Do not
            touch it before `hvd.synchronize`. Under a partial policy a tensor that requires a gradient is refused
            outside of `torch.no_grad()`: pass `tensor.detach()`.
        name: name of the bucket, the same on every rank and in every round. A partial policy needs it.
        op: `hvd.Average` (divides by the number of ranks, not of contributors) or `hvd.Sum`. Integers need `hvd.Sum`,
            because an average would cut off their fraction in each round.
        sync: a policy, or its name; None takes `HOROVOD_PARTIAL_SYNC`. Under `hvd.Full()` this is `hvd.allreduce_async_`.
        prescale_factor: multiplies the tensor before the sum.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`.

    Raises:
        ValueError: an argument is wrong, or the name is bound to another shape, dtype or policy, or in use.
        HorovodInternalError: Horovod has failed or was shut down, or the ranks disagree about the bucket.
    """
    return _submit(tensor, tensor, name, op, sync, prescale_factor, postscale_factor, process_set)


def partial_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    sync: Policy | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle | int:
    """Same as `hvd.partial_allreduce_async_`, but the result is a new tensor."""
    output = empty_like(tensor)
    return _submit(tensor, output, name, op, sync, prescale_factor, postscale_factor, process_set)


def partial_allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `hvd.partial_allreduce_async_`, but waits for the result and returns it."""
    return synchronize(partial_allreduce_async_(tensor, *args, **kwargs))


def partial_allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `hvd.partial_allreduce_async`, but waits for the result and returns it."""
    return synchronize(partial_allreduce_async(tensor, *args, **kwargs))


def _submit(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    sync: Policy | str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> PartialHandle | int:
    require_tensor(tensor)
    if not isinstance(process_set, ProcessSet):
        check_kinds({"process_set": process_set})
    size = runtime.size_of(process_set) if mpi_ops.is_initialized() else None
    sync = settings().sync if sync is None else sync  # `init` may take another default policy from rank 0
    # Leave the mode of torch.set_default_device and its like, in which each access to a tensor runs slow Python code.
    with torch.DisableTorchFunction():
        what = (tensor.dtype, tuple(tensor.shape), tensor.device, size, op, sync, prescale_factor, postscale_factor)
        try:
            config = _config_of(*what)
        except TypeError:  # an argument that cannot be hashed is wrong: checks without the cache say why
            config = _config_of.__wrapped__(*what)
        if config is not None:
            return submit(tensor, output, check_call(tensor, name), process_set, config)
    check_kinds({"name": name})
    runtime.check_initialized()
    return mpi_ops._allreduce_async(tensor, output, name, op, prescale_factor, postscale_factor, process_set)


@functools.lru_cache(maxsize=4096, typed=True)  # cached: the checks take longer than the rest of an operation
def _config_of(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    size: int | None,
    op: int,
    sync: Policy | str | None,
    prescale_factor: float,
    postscale_factor: float,
) -> _attach.BucketConfig | None:
    """Check the arguments of an operation, and build the bucket's declaration for the core; None under `Full()`."""
    arguments: dict[str, Any] = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    policy = of_allreduce(sync, arguments)
    if isinstance(policy, Full):
        return None
    runtime.check_initialized()
    check_device(device)
    return make_config(
        dtype=wire_dtype(dtype),
        shape=shape,
        device=device_number(device),
        sync=policy,
        size=size,
        missed=bucket_config.missed_by(policy, replays=False),
        **arguments,
    )


def require_tensor(tensor: Any) -> None:
    """Raise ValueError if an argument is not a `torch.Tensor`."""
    require(isinstance(tensor, torch.Tensor), "tensor", "a torch.Tensor", tensor)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor for the result of an operation, of the argument's shape, dtype and device."""
    require_tensor(tensor)
    return torch.empty_like(tensor)


def check_call(tensor: torch.Tensor, name: str | None) -> str:
    """Raise ValueError if the name is wrong, or the tensor is not contiguous or needs a gradient. Returns the name."""
    if not is_name(name) or not name:
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
    """Arrive at a bucket with a contiguous tensor. `work`, in steps or iterations, decides the weight of a model."""
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
    if handle not in mpi_ops._handle_map:
        runtime.check_initialized()


def synchronize(handle: PartialHandle | int) -> torch.Tensor:
    """Wait for a partial collective or an operation of Horovod's, and return its result.

    Raises:
        HorovodInternalError: Horovod has failed or was shut down.
        ValueError: Horovod has not been initialised.
    """
    if isinstance(handle, PartialHandle):
        return handle.synchronize()
    _require_handle(handle)
    return mpi_ops.synchronize(handle)


def poll(handle: PartialHandle | int) -> bool:
    """Return whether a partial collective or an operation of Horovod's has ended: `synchronize` would not block."""
    if isinstance(handle, PartialHandle):
        return handle.poll()
    _require_handle(handle)
    return mpi_ops.poll(handle)


def round_info(handle: PartialHandle | int) -> RoundInfo:
    """Return what became of a finished operation. Under `hvd.Full()` there are no rounds, and the numbers are -1.

    Raises:
        ValueError: the operation has not finished; synchronize it first. Or Horovod has not been initialised.
    """
    if isinstance(handle, PartialHandle):
        return handle.info()
    _require_handle(handle)
    return RoundInfo(round=-1, late=False, fresh=-1, gradients=-1, staleness=0)
