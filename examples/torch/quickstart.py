"""What a Horovod script looks like with a sync policy: marked are the lines that a script for one process lacks.

horovodrun -np 4 python examples/torch/quickstart.py
"""

import torch
from torch import nn

import horovod_partial.torch as hvd  # 1: instead of horovod.torch

hvd.init()  # 2

torch.manual_seed(0)
inputs = torch.randn(2000, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(1)  # made data: what a random linear layer says
inputs, labels = inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]  # 3: this rank's share of the data

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, model.named_parameters(), sync=hvd.Majority()
)  # 4: nobody waits for all
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 5: the same start on every rank

for epoch in range(10):
    order = torch.randperm(len(inputs))
    for batch in order.split(16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

optimizer.flush()  # before the model is saved or tested: deliver what came late
if hvd.rank() == 0:
    correct = (model(inputs).argmax(1) == labels).float().mean().item()
    print(f"{correct:.1%} of rank 0's samples are classified right; {optimizer.rounds} rounds", flush=True)
