"""A wait that a shutdown on this rank ends: it raises, it does not hang."""

import threading

import torch
from common import RANK, note, wait_for_note

import horovod_partial.torch as hvd

torch.set_num_threads(1)
hvd.init()
hvd.partial_allreduce(torch.ones(1), name="bucket", sync="quorum:1.0")
if RANK == 0:
    handle = hvd.partial_allreduce_async(torch.ones(1), name="bucket", sync="quorum:1.0")

    def wait() -> None:
        note("waiting")
        try:
            hvd.synchronize(handle)
            note("result", "a result")
        except hvd.HorovodInternalError as error:
            note("result", str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for_note("down", 1)
    thread.join(60)
    assert not thread.is_alive()
else:
    wait_for_note("waiting", 0)
    import horovod.torch

    horovod.torch.shutdown()  # Horovod's own, which asks nobody
    note("down")
