"""In two process sets side by side one rank each waits for the other, and one of those fails. Who waits leaves a note."""

from __future__ import annotations

import torch
from common import RANK, at_the_end, note, wait_for_note

import horovod_partial.torch as hvd

halves = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
hvd.init(process_sets=halves)
if RANK in (0, 2):
    handle = hvd.partial_allreduce_async(torch.ones(4), name="step", process_set=halves[RANK // 2], sync="solo")
    note("arrived")
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        note("internal-error", str(error))
        raise
elif RANK == 1:
    wait_for_note("internal-error", 0)
else:
    for other in (0, 2):
        wait_for_note("arrived", other)
        at_the_end(lambda other=other: wait_for_note("internal-error", other))  # no launcher ends them before
    raise RuntimeError("planned failure")
