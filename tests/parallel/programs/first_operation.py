"""Two threads are in the first operation of this process while a third one attaches, as the import of a framework does.

`init` is Horovod's own, so that the first operation shakes hands. Horovod's log tells when rank 0 does.
"""

import os
import threading

from common import FOLDER, RANK, note, wait_for_note, wait_until

LOG = FOLDER / "horovod.log"
if RANK == 0:  # Horovod reads the variable, and writes its log to standard output
    os.environ["HOROVOD_LOG_LEVEL"] = "trace"
    os.dup2(os.open(LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)

import horovod.torch
import torch

import horovod_partial.torch as hvd
from horovod_partial import _attach
from horovod_partial.torch.operations import runtime

torch.set_num_threads(1)
horovod.torch.init()
if RANK != 0:
    wait_for_note("attached", 0)  # until then rank 0 is in its handshake

results: dict[str, int] = {}


def reduce(name: str) -> None:
    tensor = torch.tensor([10**RANK])
    results[name] = int(hvd.partial_allreduce(tensor, name=name, op=hvd.Sum, sync="quorum:1.0"))


threads = [threading.Thread(target=reduce, args=(name,)) for name in ("a", "b")]
for thread in threads:
    thread.start()
if RANK == 0:
    wait_until(
        lambda: "Enqueued allreduce.horovod_partial.agreement.handshake" in LOG.read_text(), "this rank shakes hands"
    )
    _attach.attach(runtime.library, waits_are_told=False)
    note("attached")
for thread in threads:
    thread.join()
note("results", repr(sorted(results.items())))
