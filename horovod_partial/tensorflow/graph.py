"""Loads the TensorFlow operations of cpp/tf, which contribute tensors to buckets, in eager code and in graphs."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph, WhileBodyFuncGraph

from horovod_partial import _core
from horovod_partial.exchange.devices import gpu_refusal
from horovod_partial.runtime import bucket_config
from horovod_partial.runtime.runtime import Runtime

runtime = Runtime(mpi_ops, tf.constant, waits_are_told=False)

_OPERATIONS = str(Path(__file__).resolve().parent.parent / "_tensorflow_ops.so")
graph_operations = tf.load_op_library(_OPERATIONS)
library = ctypes.CDLL(_OPERATIONS)  # its functions throw no C++ exceptions. Calls release Python's lock (GIL)
library.horovod_partial_set_library(runtime.library.encode())  # the same text: attached libraries are found by it
library.horovod_partial_has_gpu_kernels.restype = ctypes.c_bool

_ADVICE = "use sync=hvd.Full(), or compute and train under tf.device('/CPU:0')"


class RoundInfo(NamedTuple):
    """What became of an arrival, as tensors, because a graph has no numbers before it runs.

    Attributes:
        round: int64 scalar, the number of the newest round whose result this rank got.
        late: int64 scalar, 1 if the contribution was too late for that round, otherwise 0.
        fresh: int64 scalar, the number of ranks that were on time for that round.
        gradients: int64 scalar, the number of contributions in the result.
        staleness: int64 scalar, the number of rounds that this rank had missed when it arrived.
        empty: int64 scalar, 1 if the result contains no contribution. Then the result is 0, and must not be applied.
        members: int32 vector, the ranks whose contributions are in the result.
        work: int32 vector, the steps or the iteration that gave each member its weight.
    """

    round: tf.Tensor
    late: tf.Tensor
    fresh: tf.Tensor
    gradients: tf.Tensor
    staleness: tf.Tensor
    empty: tf.Tensor
    members: tf.Tensor
    work: tf.Tensor


def wire_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype in which tensors of `dtype` travel: float32 for bfloat16, which Horovod 0.28.1 lacks.

    Raises ValueError if Horovod does not reduce tensors of this dtype.
    """
    if dtype == tf.bfloat16:
        return tf.float32
    if dtype.name not in bucket_config.DTYPES:
        raise ValueError(f"Tensor type {dtype.name} is not supported.")
    return dtype


def native(variable: Any) -> Any:
    """Return the `tf.Variable` within a variable of Keras. Anything else is returned unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def bucket_resource(name: str) -> tf.Tensor:
    """Return the TensorFlow resource that stands for a bucket in the function that is being traced.

    A function has one such resource for each bucket, so TensorFlow keeps the order of operations on the bucket.
    """
    if tf.executing_eagerly():
        return graph_operations.horovod_partial_bucket(bucket=name)
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, (CondBranchFuncGraph, WhileBodyFuncGraph)):
        graph = graph.outer_graph
    buckets = graph.get_collection_ref(f"horovod_partial/{name}")
    for bucket in buckets:  # skip buckets of the function around this graph: they are in the same collection
        if bucket.graph is graph:
            return bucket
    with graph.as_default():
        buckets.append(graph_operations.horovod_partial_bucket(bucket=name))
    return buckets[-1]


def _plain(message: str) -> str:
    """Return an error's message without the text that TensorFlow puts around it."""
    return re.sub(r"^\{\{.*?\}\} | \[Op:.*$", "", message)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Context that turns TensorFlow's errors in eager code into `ValueError` and `HorovodInternalError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(_plain(error.message)) from None
    except tf.errors.UnknownError as error:
        raise HorovodInternalError(_plain(error.message)) from None


def placed() -> contextlib.AbstractContextManager[None]:
    """Context that places the operations of buckets on the CPU, if this build has no GPU kernels for them."""
    return contextlib.nullcontext() if library.horovod_partial_has_gpu_kernels() else tf.device("/CPU:0")


def refuse_xla() -> None:
    """Raise ValueError if XLA is going to compile the function that is being traced."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError("XLA cannot compile collectives: pass jit_compile=False, to model.compile or to tf.function")


def arrive(
    tensors: Sequence[tf.Tensor],
    name: str,
    process_set: ProcessSet,
    spec: _core.BucketSpec,
    *,
    work: tf.Tensor | int = 0,
) -> tuple[list[tf.Tensor], RoundInfo]:
    """Contribute tensors to a bucket's open round (arrive), in eager code or in a graph.

    All tensors have one dtype, which Horovod can reduce. They travel in one message. `spec` comes from
    `bucket_config.arguments`. `work`, a number of steps or an iteration, decides the weight of this rank's model.
    Returns a result for each tensor, and what became of the arrival.

    Raises ValueError if an argument is wrong, or XLA is going to compile the calling function. Raises
    HorovodInternalError if Horovod has failed or was shut down, or the ranks disagree about the bucket. A running graph
    raises `tf.errors.InvalidArgumentError` and `tf.errors.UnknownError` instead.
    """
    runtime.use(process_set.process_set_id)
    refuse_xla()
    # Look up `HOROVOD_PARTIAL_EXPERIMENTAL_GPU` here, not at import, because `init` may copy its value from rank 0.
    refusal = gpu_refusal("TensorFlow's tensors", _ADVICE, mpi_ops, experimental=True)
    library.horovod_partial_refuse_gpus(refusal.encode())
    with plain_errors(), placed():
        results, numbers, members, member_work = graph_operations.horovod_partial_arrive(
            handle=bucket_resource(name),
            tensors=tensors,
            work=work,
            bucket=name,
            graph=not tf.executing_eagerly(),
            process_set=process_set.process_set_id,
            size=runtime.size_of(process_set),
            spec=spec.encode(),
        )
    return results, RoundInfo._make([*tf.unstack(numbers, 6), members, member_work])
