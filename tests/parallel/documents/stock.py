"""A reader's `train.py`: a program for Horovod, whose last rank takes twice as long for each step."""

import time

import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(60):
    time.sleep(0.02 if hvd.rank() == hvd.size() - 1 else 0.01)
    optimizer.zero_grad()
    model(torch.ones(2, 4) + hvd.rank()).square().mean().backward()
    optimizer.step()
