"""All of `horovod.tensorflow`, and partial collectives beside it.

    import horovod_partial.tensorflow as hvd

Names of `horovod.tensorflow` have the same meaning here. But `init`, `shutdown` and `join` also handle partial
collectives, and `DistributedGradientTape` and `DistributedOptimizer` take a `sync` policy and work on Keras 3.
"""

import sys

from horovod_partial.runtime.build import check_versions

check_versions("tensorflow")  # before Horovod's library is loaded

import horovod.tensorflow
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import *
from horovod.tensorflow import Adasum, Average, Max, Min, Product, Sum  # noqa: F401

import horovod_partial.tensorflow.elastic as elastic  # noqa: PLR0402 (the `from` form would import Horovod's `elastic`)
from horovod_partial import policies
from horovod_partial.names import modules
from horovod_partial.policies import *
from horovod_partial.tensorflow import operations
from horovod_partial.tensorflow.balancing import BalancedBatchSampler
from horovod_partial.tensorflow.operations import *
from horovod_partial.tensorflow.optimizer import DistributedOptimizer
from horovod_partial.tensorflow.tape import DistributedGradientTape
from horovod_partial.tensorflow.variables import broadcast_variables

__all__ = [
    "BalancedBatchSampler",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "broadcast_variables",
    "elastic",
]
__all__ += operations.__all__
__all__ += policies.__all__
__dir__ = modules.listing(__all__)
modules.bind(sys.modules[__name__], horovod.tensorflow)
