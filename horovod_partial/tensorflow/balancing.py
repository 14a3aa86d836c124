"""`hvd.BalancedBatchSampler` of TensorFlow."""

from horovod_partial.data import balancing
from horovod_partial.tensorflow.graph import runtime
from horovod_partial.tensorflow.variables import gather_bytes


class BalancedBatchSampler(balancing.BalancedBatchSampler):
    __doc__ = balancing.BalancedBatchSampler.__doc__
    _runtime = runtime
    _gather = staticmethod(gather_bytes)
