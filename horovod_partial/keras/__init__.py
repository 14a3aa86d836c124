"""Horovod for Keras 3 on TensorFlow or PyTorch, and partial collectives beside it.

    import horovod_partial.keras as hvd

The names are those of `horovod.keras`, whose optimizer reduces nothing on Keras 3, and whose callbacks fail there.
"""

import keras

if int(keras.__version__.partition(".")[0]) < 3:
    raise ImportError(
        f"horovod_partial.keras needs Keras 3, and Keras {keras.__version__} is installed: install TensorFlow 2.16 or "
        "newer, or use the tape and the operations of horovod_partial.tensorflow"
    )

from horovod.common.exceptions import HorovodInternalError

from horovod_partial import policies
from horovod_partial.balancing import BalancedBatchSampler
from horovod_partial.keras import callbacks, elastic
from horovod_partial.keras.backend import backend
from horovod_partial.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod_partial.keras.replicas import assert_replicas_equal
from horovod_partial.keras.saving import load_model
from horovod_partial.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horovod_partial.names import modules
from horovod_partial.policies import *

Adasum = backend.horovod.Adasum
Average = backend.horovod.Average
ProcessSet = backend.horovod.ProcessSet
Sum = backend.horovod.Sum
add_process_set = backend.operations.add_process_set
allgather_object = backend.horovod.allgather_object
broadcast_object = backend.horovod.broadcast_object
ccl_built = backend.horovod.ccl_built
cross_rank = backend.horovod.cross_rank
cross_size = backend.horovod.cross_size
cuda_built = backend.horovod.cuda_built
ddl_built = backend.horovod.ddl_built
global_process_set = backend.horovod.global_process_set
gloo_built = backend.horovod.gloo_built
gloo_enabled = backend.horovod.gloo_enabled
is_initialized = backend.horovod.is_initialized
local_rank = backend.horovod.local_rank
local_size = backend.horovod.local_size
mpi_built = backend.horovod.mpi_built
mpi_enabled = backend.horovod.mpi_enabled
mpi_threads_supported = backend.horovod.mpi_threads_supported
nccl_built = backend.horovod.nccl_built
rank = backend.horovod.rank
remove_process_set = backend.operations.remove_process_set
rocm_built = backend.horovod.rocm_built
size = backend.horovod.size
start_timeline = backend.horovod.start_timeline
stop_timeline = backend.horovod.stop_timeline
Compression = backend.horovod.Compression

broadcast_variables = backend.broadcast_variables
flush = backend.operations.flush
init = backend.operations.init
join = backend.operations.join
partial_stats = backend.operations.partial_stats
record = backend.operations.record
shutdown = backend.operations.shutdown
watch = backend.operations.watch

__all__ = [
    "Adasum",
    "Average",
    "BalancedBatchSampler",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "assert_replicas_equal",
    "broadcast",
    "broadcast_global_variables",
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
    "record",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "watch",
]
__all__ += policies.__all__
__getattr__ = policies.of_module(__name__)
__dir__ = modules.listing(__all__)
