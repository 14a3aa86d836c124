"""Horovod for Keras 3 on TensorFlow, and partial collectives beside it.

    import horovod_partial.keras as hvd

The names are those of `horovod.keras`, whose optimizer reduces nothing on Keras 3, and whose callbacks fail there.
"""

from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import (
    Adasum,
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    allgather_object,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.compression import Compression

from horovod_partial.keras import callbacks, elastic
from horovod_partial.keras.callbacks import FlushCallback, ModelSyncCallback, PartialStatsCallback
from horovod_partial.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod_partial.keras.saving import load_model
from horovod_partial.keras.values import allgather, allreduce, broadcast, reducescatter
from horovod_partial.policies import (
    Butterfly,
    Full,
    GroupAverage,
    Majority,
    PartialReduce,
    Quorum,
    Ring,
    Schedule,
    Solo,
    WeightedAverage,
)
from horovod_partial.tensorflow.operations import broadcast_variables, flush, init, join, partial_stats, shutdown

__all__ = [
    "Adasum",
    "Average",
    "Butterfly",
    "Compression",
    "DistributedOptimizer",
    "FlushCallback",
    "Full",
    "GroupAverage",
    "HorovodInternalError",
    "Majority",
    "ModelSyncCallback",
    "PartialDistributedOptimizer",
    "PartialReduce",
    "PartialStatsCallback",
    "ProcessSet",
    "Quorum",
    "Ring",
    "Schedule",
    "Solo",
    "Sum",
    "WeightedAverage",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "flush",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "partial_stats",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
