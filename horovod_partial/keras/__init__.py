"""Horovod for Keras 3 on TensorFlow or PyTorch, and partial collectives beside it.

    import horovod_partial.keras as hvd

The names are those of `horovod.keras`. On Keras 3, Horovod's own optimizer reduces nothing, and its callbacks fail.
"""

import keras

if int(keras.__version__.partition(".")[0]) < 3:
    raise ImportError(
        f"horovod_partial.keras needs Keras 3, and Keras {keras.__version__} is installed: install TensorFlow 2.16 or "
        "newer, or use the tape and the operations of horovod_partial.tensorflow"
    )

from horovod.common.exceptions import HorovodInternalError

from horovod_partial import policies
from horovod_partial.keras import callbacks, elastic
from horovod_partial.keras.backend import backend
from horovod_partial.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from horovod_partial.keras.replica import assert_replicas_equal
from horovod_partial.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horovod_partial.names import modules
from horovod_partial.policies import *

# Names from Horovod's module for the backend's framework, and names from our front end for this framework.
_OF_HOROVOD = [
    "Adasum",
    "Average",
    "Compression",
    "ProcessSet",
    "Sum",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
    "start_timeline",
    "stop_timeline",
]
_OF_OPERATIONS = [
    "add_process_set",
    "flush",
    "init",
    "join",
    "partial_stats",
    "record",
    "remove_process_set",
    "shutdown",
    "watch",
]
globals().update({name: getattr(backend.horovod, name) for name in _OF_HOROVOD})
globals().update({name: getattr(backend.operations, name) for name in _OF_OPERATIONS})
BalancedBatchSampler = backend.BalancedBatchSampler
broadcast_variables = backend.broadcast_variables

__all__ = [
    "BalancedBatchSampler",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "assert_replicas_equal",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += policies.__all__
__all__.extend(_OF_HOROVOD + _OF_OPERATIONS)
__dir__ = modules.listing(__all__)
