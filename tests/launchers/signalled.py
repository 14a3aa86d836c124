"""Trains until a signal comes, then all ranks flush, as before a checkpoint."""

import signal

import torch

import horovod_partial.torch as hvd

signals: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="majority")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
told = torch.zeros(1)
while not told:
    optimizer.zero_grad()
    model(torch.randn(16, 3)).square().mean().backward()
    optimizer.step()
    told = hvd.allreduce(torch.tensor([float(len(signals))]), name="told", op=hvd.Min)
    if hvd.rank() == 0:
        print("running", flush=True)
optimizer.flush()
hvd.assert_replicas_equal(model)
if hvd.rank() == 0:
    print(f"saved by {hvd.size()} ranks", flush=True)
