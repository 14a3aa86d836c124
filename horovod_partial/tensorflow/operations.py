"""Partial and group collectives of TensorFlow's tensors, and the life cycle of Horovod around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import horovod.tensorflow as horovods
import tensorflow as tf
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, Sum

from horovod_partial.checks import require
from horovod_partial.exchange.arguments import check_kinds, is_average, of_allreduce, of_average
from horovod_partial.policies import Full, ModelPolicy, Policy, Quorum
from horovod_partial.runtime import bucket_config, round_stats
from horovod_partial.tensorflow.graph import arrive, runtime, wire_dtype

Tensors: TypeAlias = "tf.Tensor | Sequence[tf.Tensor]"


def init(*args: Any, **kwargs: Any) -> None:
    """`horovod.tensorflow.init`, then a handshake that proves on every rank that partial collectives work there.

    Raises:
        ImportError: they do not: a hook does not run.
        ValueError: settings contradict each other; the same on every rank.
    """
    runtime.init(*args, **kwargs)


def shutdown() -> None:
    """`horovod.tensorflow.shutdown`, after everything pending has been delivered and every rank has come here."""
    runtime.shutdown()


def join(*args: Any, **kwargs: Any) -> Any:
    """`horovod.tensorflow.join`, after what this rank has pending has been delivered. In eager code."""
    if not tf.executing_eagerly():
        raise ValueError("call join outside of graphs: what is pending is delivered when it is called")
    return runtime.join(*args, **kwargs)


def flush(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank flushes, and all late contributions have been delivered. In eager code.

    What this rank has missed of the rounds of its thread's optimizers is applied. Other results wait for the next operation of
    their name. Ranks that have joined need not come. One that has used no partial collective in this process set need not come
    either, and does not wait.
    """
    check_kinds({"process_set": process_set})
    check_initialized()
    if not tf.executing_eagerly():
        raise ValueError("call flush outside of graphs: it delivers when it is called")
    runtime.flush(process_set.process_set_id)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """`horovod.tensorflow.add_process_set`, after a flush of every process set in use; all ranks come, as with Horovod.

    Args:
        process_set: a `hvd.ProcessSet`, or the ranks of a new one.

    Raises:
        ValueError: there is one of these ranks already.
    """
    return runtime.add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """`horovod.tensorflow.remove_process_set`, after a flush of every process set in use; all ranks come, as with Horovod.

    Returns:
        Whether there was such a process set. The one of all ranks stays.
    """
    return runtime.remove_process_set(process_set)


def partial_stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """What happened to the rounds, as a dictionary by bucket; its keys stand in the reference, under Statistics. In eager code."""
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


def check_initialized() -> None:
    """Raise ValueError where Horovod is not up."""
    if not mpi_ops.is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")


@tf.autograph.experimental.do_not_convert
def partial_allreduce(
    tensor: Tensors,
    name: str | None = None,
    op: int = Average,
    sync: Policy | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    return_info: bool = False,
) -> Any:
    """Sum or average tensors over the ranks that are there in time, in eager code or in a graph.

    A rank that comes too late for a round gets the result of that round at once. If it has missed several, it gets their
    sum, or the newest if the policy says `missed="latest"`. Its own contribution travels with the next round (eager-SGD,
    PPoPP'20, section 4). Over all rounds, and after `flush`,
    every contribution has been delivered exactly once.

    Args:
        tensor: a tensor, or several of one dtype, which travel as one message: int32, int64, float16, float32, float64,
            or bfloat16, which travels as float32 at twice its bytes.
            Those on a GPU travel through the host's memory, or are refused: see `docs/tensorflow.md`.
        name: names the bucket; the same on every rank and in every round. Required: rounds follow the name.
        op: `hvd.Average` (divides by the number of ranks, not of contributors) or `hvd.Sum`.
        sync: a policy, or its name; None takes `HOROVOD_PARTIAL_SYNC`. Under `hvd.Full()` this is `hvd.allreduce`,
            or `hvd.grouped_allreduce` of several.
        prescale_factor: multiplies the tensors before the sum.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.
        return_info: also return what became of the arrival, a `RoundInfo` of tensors; not under `hvd.Full()`.

    Returns:
        As `tensor`: the result, or several; with `return_info` a pair of that and the `RoundInfo`.

    Raises:
        ValueError: an argument is wrong, or the name is bound to another shape, dtype or policy, or in use, or XLA is to
            compile the function around.
        HorovodInternalError: Horovod has failed or was shut down, or the ranks disagree about the bucket.

        A graph that runs raises `tf.errors.InvalidArgumentError` and `tf.errors.UnknownError` instead.
    """
    arguments = {
        "name": name,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
        "return_info": return_info,
    }
    policy = of_allreduce(sync, arguments)
    if isinstance(policy, Full):
        if return_info:
            raise ValueError("there are no rounds under Full(), so there is no RoundInfo")
        return _full_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)
    options = {
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "missed": bucket_config.missed_by(policy, replays=False),
    }
    return _reduce(tensor, name, op, policy, process_set, options, return_info=return_info)


def _full_allreduce(
    tensor: Tensors, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> Any:
    options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale, "process_set": process_set}
    check_initialized()
    if isinstance(tensor, (list, tuple)):
        return horovods.grouped_allreduce(list(tensor), name=name, **options)
    return horovods.allreduce(tensor, name=name, **options)


@tf.autograph.experimental.do_not_convert
def average(
    tensor: Tensors,
    policy: ModelPolicy | str,
    name: str | None = None,
    *,
    steps: tf.Tensor | int | None = None,
    process_set: ProcessSet = global_process_set,
    return_info: bool = False,
) -> Any:
    """Average a model with the models of other ranks. The policy says which ranks, and how much each model counts.

    This is `horovod_partial.torch.average` for TensorFlow, in eager code or in a graph: the policies do the same here.

    Args:
        tensor: the model: a tensor of any shape, or several of one dtype, which travel as one message. The dtype is float16,
            float32, float64, or bfloat16, which travels as float32. Shapes and dtype are the same on every rank.
        policy: what to average with whom, a policy or its text; the same on every rank. The fields `average`, `overlap`
            and `slow_momentum` are for optimizers.
        name: name of the bucket, the same on every rank and in every round. Required.
        steps: the steps that this rank has taken since the last average, 0 or more; it may be an int32 scalar.
            `hvd.WeightedAverage` needs it; no other policy takes it.
        process_set: the ranks that take part.
        return_info: also return what became of the arrival, a `RoundInfo` of tensors.

    Returns:
        The average, of the same shapes and dtype as `tensor`; with `return_info` a pair of it and the `RoundInfo`.

    The errors are those of `partial_allreduce`, and of `horovod_partial.torch.average`.
    """
    count = steps
    if isinstance(steps, tf.Tensor):
        require(steps.dtype == tf.int32, "steps", "an int, or an int32 tensor", steps)
        count = 0  # a tensor has no number before the graph runs
    policy = of_average(policy, count)
    work = 0 if steps is None else steps
    return reduce_models(tensor, name, policy, process_set, work=work, return_info=return_info)


def reduce_models(
    tensor: Tensors,
    name: str | None,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    *,
    work: tf.Tensor | int = 0,
    return_info: bool = False,
) -> Any:
    """Arrive with a model at the bucket of a policy. `work` is the steps that the model's weight follows from."""
    several = isinstance(tensor, (list, tuple))
    tensors = [tf.convert_to_tensor(one) for one in (tensor if several else [tensor])]
    for one in tensors:
        if not one.dtype.is_floating:
            raise ValueError(f"an average of models needs floating-point tensors, not {one.dtype.name}")
    options = bucket_config.of_models(policy)
    model = tensors if several else tensors[0]
    return _reduce(model, name, Average, policy, process_set, options, work=work, return_info=return_info)


def _reduce(
    tensor: Tensors,
    name: str | None,
    op: int,
    policy: Policy,
    process_set: ProcessSet,
    options: dict[str, Any],
    *,
    work: tf.Tensor | int = 0,
    return_info: bool,
) -> Any:
    check_kinds({"name": name, "op": op, "process_set": process_set, "return_info": return_info})
    check_initialized()
    divides = is_average(op, Average, Sum)
    if not name:
        raise ValueError("a partial collective needs a name, the same in every round: pass name=")
    several = isinstance(tensor, (list, tuple))
    tensors = [tf.convert_to_tensor(one) for one in (tensor if several else [tensor])]
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"tensors that travel together must have one dtype, not {sorted(d.name for d in dtypes)}")
    dtype = dtypes.pop()
    wire = wire_dtype(dtype)
    size = runtime.size_of(process_set)
    spec = bucket_config.arguments(sync=policy, size=size, average=divides, is_integer=dtype.is_integer, **options)
    results, info = arrive([tf.cast(one, wire) for one in tensors], name, process_set, spec, work=work)
    results = [tf.cast(one, dtype) for one in results]
    result = results if several else results[0]
    return (result, info) if return_info else result
