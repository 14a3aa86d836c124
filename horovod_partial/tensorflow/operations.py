"""Partial collectives on TensorFlow tensors, and the `init`, `shutdown`, `join` and process sets that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import horovod.tensorflow as horovods
import tensorflow as tf
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import Average

from horovod_partial.checks import require
from horovod_partial.exchange.arguments import check_kinds, is_average, of_allreduce, of_average
from horovod_partial.policies import Full, ModelPolicy, Policy
from horovod_partial.runtime import bucket_config, round_stats
from horovod_partial.tensorflow.graph import arrive, runtime, wire_dtype

__all__ = [
    "add_process_set",
    "average",
    "flush",
    "init",
    "join",
    "partial_allreduce",
    "partial_stats",
    "record",
    "remove_process_set",
    "shutdown",
    "watch",
]

Tensors: TypeAlias = "tf.Tensor | Sequence[tf.Tensor]"

add_process_set = runtime.add_process_set
init = runtime.init
remove_process_set = runtime.remove_process_set
record = runtime.record
shutdown = runtime.shutdown
watch = runtime.watch


def join(*args: Any, **kwargs: Any) -> Any:
    """Same as `horovod_partial.torch.join`, but around `horovod.tensorflow.join`. Only for eager code."""
    if not tf.executing_eagerly():
        raise ValueError("call join outside of graphs: it delivers late contributions when Python calls it")
    return runtime.join(*args, **kwargs)


def flush(process_set: ProcessSet = global_process_set) -> None:
    """Same as `horovod_partial.torch.flush`. Only for eager code: raises ValueError in a graph."""
    check_kinds({"process_set": process_set})
    runtime.check_initialized()
    if not tf.executing_eagerly():
        raise ValueError("call flush outside of graphs: it delivers late contributions when Python calls it")
    runtime.flush(process_set.process_set_id)


def partial_stats(process_set: ProcessSet = global_process_set) -> dict[str, dict[str, Any]]:
    """Return what happened to the rounds of each bucket. `docs/api.md` explains the keys. Only for eager code."""
    check_kinds({"process_set": process_set})
    return round_stats.summarise(runtime.statistics(process_set.process_set_id))


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
    """Sum or average tensors over the ranks that arrive in time, in eager code or in a graph.

    A rank that comes too late for a round gets the result of that round at once. If the rank has missed several rounds,
    it gets the sum of their results, or the newest result if the policy says `missed="latest"`. The rank's own tensors
    travel with the next round (eager-SGD, PPoPP'20, section 4). After `flush`, all tensors have travelled exactly once.

    Args:
        tensor: a tensor, or several of one dtype, which travel as one message: int32, int64, float16, float32, float64,
            or bfloat16, which travels as float32 at twice its bytes. Tensors on a GPU travel through the host's memory,
            or are refused (`docs/tensorflow.md`).
        name: name of the bucket, the same on every rank and in every round. A partial policy needs it.
        op: `hvd.Average` (divides by the number of ranks, not of contributors) or `hvd.Sum`.
        sync: a policy, or its name; None takes `HOROVOD_PARTIAL_SYNC`. Under `hvd.Full()` this is `hvd.allreduce`,
            or `hvd.grouped_allreduce` for several tensors.
        prescale_factor: multiplies the tensors before the sum.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.
        return_info: also return what became of the arrival, a `RoundInfo` of tensors; not under `hvd.Full()`.

    Returns:
        The result, or a list of results for several tensors; with `return_info` a pair of this and the `RoundInfo`.

    Raises:
        ValueError: an argument is wrong; the name belongs to another shape, dtype or policy, or is in use; or XLA is to
            compile the calling function. A running graph raises `tf.errors.InvalidArgumentError` instead.
        HorovodInternalError: Horovod has failed or was shut down, or ranks disagree about the bucket. A running graph
            raises `tf.errors.UnknownError` instead.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    arguments = {"name": name, "op": op, "process_set": process_set, **factors}
    policy = of_allreduce(sync, {**arguments, "return_info": return_info})
    if not isinstance(policy, Full):
        options = {**factors, "missed": bucket_config.missed_by(policy, replays=False)}
        return reduce(tensor, name, op, policy, process_set, options, return_info=return_info)
    if return_info:
        raise ValueError("there are no rounds under Full(), so there is no RoundInfo")
    runtime.check_initialized()
    if isinstance(tensor, (list, tuple)):
        return horovods.grouped_allreduce(list(tensor), **arguments)
    return horovods.allreduce(tensor, **arguments)


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

    The policies work in the same way as in `horovod_partial.torch.average`, in eager code or in a graph.

    Args:
        tensor: the model: a tensor of any shape, or several of one dtype, which travel as one message. The dtype is
            float16, float32, float64, or bfloat16 (travels as float32). Shapes and dtype are the same on every rank.
        policy: which models to average, a policy or its text; the same on every rank. The policy's fields `average`
            and `overlap` must keep their defaults.
        name: name of the bucket, the same on every rank and in every round. Required.
        steps: the steps that this rank has taken since the last average, 0 or more; it may be an int32 scalar.
            `hvd.WeightedAverage` needs it; no other policy takes it.
        process_set: the ranks that take part.
        return_info: also return what became of the arrival, a `RoundInfo` of tensors.

    Returns:
        The average, of the same shapes and dtype as `tensor`; with `return_info` a pair of it and the `RoundInfo`.

    Raises:
        ValueError: same as in `partial_allreduce`.
        HorovodInternalError: same as in `partial_allreduce`; also if Horovod's way to reduce does not support groups.
    """
    count = steps
    if isinstance(steps, tf.Tensor):
        require(steps.dtype == tf.int32, "steps", "an int, or an int32 tensor", steps)
        count = 0  # checks get 0 in place of `steps`, because a tensor has no value before its graph runs
    policy = of_average(policy, count)
    work = 0 if steps is None else steps
    options = bucket_config.of_models(policy)
    return reduce(tensor, name, Average, policy, process_set, options, work=work, return_info=return_info)


def reduce(
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
    """Reduce one tensor or several in the bucket `name`. `options` are further arguments of `bucket_config.arguments`.

    `work` is the steps, or the iteration, that decide the weight of a model. Returns the result; with `return_info` a
    pair of the result and a `RoundInfo`.
    """
    check_kinds({"name": name, "op": op, "process_set": process_set, "return_info": return_info})
    runtime.check_initialized()
    divides = is_average(op)
    if not name:
        raise ValueError("a partial collective needs a name, the same in every round: pass name=")
    several = isinstance(tensor, (list, tuple))
    tensors = [tf.convert_to_tensor(one) for one in (tensor if several else [tensor])]
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"tensors that travel together must have one dtype, not {sorted(d.name for d in dtypes)}")
    dtype = dtypes.pop()
    if isinstance(policy, ModelPolicy) and not dtype.is_floating:
        raise ValueError(f"an average of models needs floating-point tensors, not {dtype.name}")
    wire = wire_dtype(dtype)
    size = runtime.size_of(process_set)
    spec = bucket_config.arguments(sync=policy, size=size, average=divides, is_integer=dtype.is_integer, **options)
    results, info = arrive([tf.cast(one, wire) for one in tensors], name, process_set, spec, work=work)
    results = [tf.cast(one, dtype) for one in results]
    result = results if several else results[0]
    return (result, info) if return_info else result
