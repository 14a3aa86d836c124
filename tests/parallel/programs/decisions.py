"""Rounds whose decisions are recorded."""

from __future__ import annotations

import torch
from common import RANK, note

import horovod_partial.torch as hvd

torch.set_num_threads(1)
hvd.init()
for _ in range(10 + 5 * RANK):
    hvd.partial_allreduce(torch.ones(1), name="a", sync="majority")
    hvd.partial_allreduce(torch.ones(1), name="b", sync="solo")
hvd.flush()
note("done")
