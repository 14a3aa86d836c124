"""In two process sets side by side one rank each waits for the other, and one of those fails.

Who waits leaves a note of that error, and of the one that it gets when it begins the next operation.
"""

import torch
from common import RANK, at_the_end, note, wait_for_note

import horovod_partial.torch as hvd

halves = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
hvd.init(process_sets=halves)
if RANK in (0, 2):
    arguments = {"name": "step", "process_set": halves[RANK // 2], "sync": "solo"}
    handle = hvd.partial_allreduce_async(torch.ones(4), **arguments)
    note("arrived")
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        note("waiting", str(error))
    try:
        hvd.partial_allreduce(torch.ones(4), **arguments)
    except hvd.HorovodInternalError as error:
        note("later", str(error))
        raise
elif RANK == 1:
    wait_for_note("later", 0)
else:
    for other in (0, 2):
        wait_for_note("arrived", other)
        at_the_end(lambda other=other: wait_for_note("later", other))  # no launcher ends them before
    raise RuntimeError("planned failure")
