"""Each rank trains, and forks a child that ends as a program does, by its exit handlers. Notes the child's status."""

import os
import sys

import torch
from common import note, wait_until

import horovod_partial.torch as hvd

hvd.init()
for _ in range(3):
    hvd.partial_allreduce(torch.ones(3), name="bucket", sync="majority")
child = os.fork()
if child == 0:
    sys.exit(0)
ended: list[tuple[int, int]] = []


def has_ended() -> bool:
    process, status = os.waitpid(child, os.WNOHANG)
    if process:
        ended.append((process, status))
    return bool(process)


wait_until(has_ended, "its child has ended")
hvd.partial_allreduce(torch.ones(3), name="bucket", sync="majority")
note("child", str(ended[0][1]))
