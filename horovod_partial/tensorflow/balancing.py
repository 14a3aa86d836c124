"""`hvd.BalancedBatchSampler` of TensorFlow."""

from horovod_partial.data import balancing
from horovod_partial.tensorflow.graph import runtime


class BalancedBatchSampler(balancing.BalancedBatchSampler):
    __doc__ = balancing.BalancedBatchSampler.__doc__
    _runtime = runtime
