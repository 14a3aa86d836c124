"""Trains until one rank fails: `python failing.py raise|exit|kill RANK`."""

import os
import signal
import sys

import torch

import horovod_partial.torch as hvd

how, rank = sys.argv[1], int(sys.argv[2])
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="majority")
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(16, 3)).square().mean().backward()
    optimizer.step()
    if step == 5 and hvd.rank() == rank:
        if how == "raise":
            raise ValueError("this is what has failed")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
optimizer.flush()
print("trained to the end")
