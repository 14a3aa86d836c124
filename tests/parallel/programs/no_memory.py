"""The double of a GPU has no memory left where rank RANK is late: `no_memory.py RANK`. Notes the error."""

import ctypes
import sys

import torch
from common import RANK, note

import horovod_partial
import horovod_partial.torch as hvd

hvd.init()
tensor = torch.ones(3)
hvd.partial_allreduce(tensor, name="bucket", sync="solo")
hvd.barrier()
late = int(sys.argv[1]) == RANK
if late:
    library = f"{horovod_partial.__path__[0]}/libhorovod_partial_attach.so"
    ctypes.CDLL(library).double_has_memory(ctypes.c_bool(False))
hvd.barrier()
try:
    if late:
        hvd.flush()  # in which nobody else is
    for _ in range(1000):
        hvd.partial_allreduce(tensor, name="bucket", sync="solo")
except hvd.HorovodInternalError as error:
    note("error", str(error))
    sys.exit(1)
