"""A program for Horovod and PyTorch, in each form of import: `stock_torch.py WHAT`, where that is `ends`, `exits` or `fails`."""

import importlib
import sys
import time

import horovod
import horovod.torch as hvd
import horovod.torch.elastic as elastic_package
import torch
from common import note
from horovod.torch import *
from horovod.torch import DistributedOptimizer, elastic
from horovod.torch.elastic import run
from horovod.torch.mpi_ops import rank

what = sys.argv[1]
by_name = importlib.import_module("horovod.torch")
assert by_name is hvd is horovod.torch is sys.modules["horovod.torch"]
assert DistributedOptimizer is hvd.DistributedOptimizer is importlib.import_module("horovod.torch").DistributedOptimizer
assert run is elastic.run is elastic_package.run is hvd.elastic.run
assert allreduce is hvd.allreduce

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = DistributedOptimizer(inner, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for number in range(20):
    optimizer.zero_grad()
    model(torch.ones(1, 4) + rank()).square().mean().backward()
    if rank() == hvd.size() - 1:
        time.sleep(0.01)
        if what == "fails" and number == 10:
            raise RuntimeError("planned failure")
    optimizer.step()
note("trained", f"{DistributedOptimizer.__module__} {hvd.init.__module__} {hvd.allreduce.__module__}")
if what == "exits":
    sys.exit(0)
