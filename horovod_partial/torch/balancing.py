"""`hvd.BalancedBatchSampler` of PyTorch."""

from horovod_partial.data import balancing
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replicas import gather_bytes


class BalancedBatchSampler(balancing.BalancedBatchSampler):
    __doc__ = balancing.BalancedBatchSampler.__doc__
    _runtime = runtime
    _gather = staticmethod(gather_bytes)
