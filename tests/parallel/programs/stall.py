"""Ranks wait for one that does not come, until the test lets it: `stall.py POLICY WHAT RANKS`.

WHAT rank 2 does: "asleep", "keeps-lock" of the interpreter in a call of C, "stopped" (asleep, and rank 3 is stopped), "flush"
(asleep, and the others flush), "collective" (asleep, and the others are in a barrier). With "center-stopped" rank 2 sleeps and
rank 0 is stopped. With "nobody" no rank waits for any: all compute for long, and come to their end one after the other.
"""

import ctypes
import os
import signal
import sys
import time

import torch
from common import FOLDER, RANK, note, wait_for_note, wait_for_word

import horovod_partial.torch as hvd
from horovod_partial.settings import settings
from horovod_partial.torch.operations import runtime

policy, what, ranks = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)  # a flush compares the models of the ranks
model = torch.nn.Linear(8, 1)
torch.optim.SGD(model.parameters(), lr=0.01).step()  # imports much, which takes one rank longer than another
note("warm")
for rank in range(int(ranks)):
    wait_for_note("warm", rank)
hvd.init()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), sync=policy
)


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def sleep_between_steps() -> None:
    note("watched", str(runtime._monitor is not None))
    note("missing")
    if what == "keeps-lock":
        file = os.open(FOLDER / "pipe", os.O_RDWR)
        note("keeps")
        ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)
    else:
        wait_for_word("go-on")


def stop() -> None:
    for other in range(hvd.size()):  # one that still is in the steps before would not come out of them
        wait_for_note("begun", other)
    note("missing")
    os.kill(os.getpid(), signal.SIGSTOP)


for _ in range(5):
    step()
hvd.barrier()  # nobody waits in one of these steps any more
note("begun")
if what == "nobody":
    time.sleep(2 * settings().stall_seconds)
    step()
    hvd.barrier()  # nor in this one
    time.sleep(2 * settings().stall_seconds * (RANK == 1))
elif RANK == 2:
    sleep_between_steps()
elif (what, RANK) in (("stopped", 3), ("center-stopped", 0)):
    stop()
note("goes-on", repr(time.time()))
if what == "flush":
    optimizer.flush()
if what == "collective":
    hvd.barrier()
if what != "nobody":
    for _ in range(20):  # more than a rank may stay behind
        step()
    wait_for_word("end")
hvd.shutdown()
note("ended")
