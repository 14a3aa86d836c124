"""BatchNorm: its running statistics are of each rank. (`hvd.SyncBatchNorm` takes CUDA tensors only, and waits for all.)"""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    plain = network()
    model = torch.nn.Sequential(plain[0], torch.nn.BatchNorm1d(32), *plain[1:])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), sync=sync
    )
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.flush()
    # The running statistics are of each rank; before an evaluation take their mean.
    statistics = model[1]
    for name in ("running_mean", "running_var"):
        buffer = getattr(statistics, name)
        buffer.copy_(hvd.allreduce(buffer, name=name))
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
