"""A training in PyTorch that has left a checkpoint, on each rank in a folder of its own."""

import shutil
from pathlib import Path

import torch

import horovod_partial.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=hvd.Majority())
hvd.save_checkpoint("checkpoint.pt", model, optimizer, step=0)
written = hvd.broadcast_object(Path("checkpoint.pt").resolve())
if hvd.rank() > 0:
    shutil.copy(written, "checkpoint.pt")
