"""`hvd.BalancedBatchSampler` of PyTorch."""

from horovod_partial.data import balancing
from horovod_partial.torch.operations import runtime


class BalancedBatchSampler(balancing.BalancedBatchSampler):
    __doc__ = balancing.BalancedBatchSampler.__doc__
    _runtime = runtime
