"""A GPU has no memory left where rank RANK is late with a bucket: `full_gpu.py RANK BYTES`. Notes the error."""

import sys

import torch
from common import RANK, note

import horovod_partial.torch as hvd

ROOM = 96 << 20  # stays free, for what CUDA itself loads later
SMALLEST = 16 << 20

late, size = int(sys.argv[1]) == RANK, int(sys.argv[2])
hvd.init()
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
tensor = torch.ones(size // 4, device="cuda")
hvd.partial_allreduce_(tensor, name="bucket", sync="solo")  # round 0, for which nobody is late
hvd.barrier()
held = []
if late:
    piece = torch.cuda.mem_get_info()[0]
    while (piece := min(piece, torch.cuda.mem_get_info()[0] - ROOM)) >= SMALLEST:
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            piece //= 2
hvd.barrier()
try:
    if late:
        hvd.flush()  # in which nobody else is
    for _ in range(100):
        hvd.partial_allreduce_(tensor, name="bucket", sync="solo")
except hvd.HorovodInternalError as error:
    note("error", str(error))
    sys.exit(1)
