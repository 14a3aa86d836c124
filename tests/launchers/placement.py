"""Says where each rank is, and sees whether Horovod works there, with a process set for which ranks meet once more."""

import os
import socket

import torch

import horovod_partial.torch as hvd

hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum).item()
assert total == sum(range(hvd.size())), total
some = hvd.add_process_set([0, 2])
if some.included():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() == 2
hvd.barrier()
places = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
hvd.shutdown()
print("place", socket.gethostname(), *places, os.environ["SLURM_PROCID"], flush=True)
