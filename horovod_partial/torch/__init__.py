"""All of `horovod.torch`, and beside it partial collectives, which need not wait for all ranks.

    import horovod_partial.torch as hvd

Names of `horovod.torch` mean what they mean there, except that `init`, `shutdown` and `join` also take care of partial
collectives, `poll` and `synchronize` take handles of both kinds, and `DistributedOptimizer` takes a `sync` policy.
"""

import sys

from horovod_partial.runtime.build import check_versions

check_versions("torch")  # before Horovod's library is loaded

import horovod.torch
from horovod.torch import *
from horovod.torch import Adasum, Average, Max, Min, Product, Sum  # noqa: F401
from horovod.torch.compression import Compression as Compression
from horovod.torch.mpi_ops import HorovodInternalError as HorovodInternalError

import horovod_partial.torch.elastic as elastic  # noqa: PLR0402 (`from ... import elastic` would give Horovod's)
from horovod_partial import policies
from horovod_partial.merging import MergedGradients
from horovod_partial.names import modules
from horovod_partial.policies import *
from horovod_partial.torch import operations
from horovod_partial.torch.balancing import BalancedBatchSampler
from horovod_partial.torch.model_operations import average, average_async
from horovod_partial.torch.operations import *
from horovod_partial.torch.optimizer import DistributedOptimizer
from horovod_partial.torch.replicas import (
    assert_replicas_equal,
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
    save_checkpoint,
)
from horovod_partial.torch.round_steps import follow_rounds

__all__ = [
    "BalancedBatchSampler",
    "DistributedOptimizer",
    "MergedGradients",
    "assert_replicas_equal",
    "average",
    "average_async",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "follow_rounds",
    "save_checkpoint",
]
__all__ += operations.__all__
__all__ += policies.__all__
__dir__ = modules.listing(__all__)
modules.bind(sys.modules[__name__], horovod.torch)
