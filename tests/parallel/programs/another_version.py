"""Rank 0 is of another version: the others find that out, and all go on with Horovod alone.

Rank 0 is Horovod without us, which adds to the handshake what no version adds. The others wait for it for longer than a
rank keeps quiet about a wait.
"""

import time

import torch
from common import RANK, note

if RANK != 0:
    import horovod_partial.torch as hvd  # before Horovod is initialised
import horovod.torch as plain

torch.set_num_threads(1)
plain.init()
if RANK == 0:
    plain.allreduce(torch.tensor([1, 0, 0]), name="horovod_partial.agreement.handshake", op=plain.Sum)
    time.sleep(1)
else:
    try:
        hvd.partial_allreduce(torch.ones(1), name="partial", sync="solo")
    except ImportError as error:
        note("error", str(error))
total = plain.allreduce(torch.tensor([10**RANK]), name="late", op=plain.Sum)
note("total", str(int(total)))
