"""A schedule: it moves with the rounds that are applied, so that a late rank has the rates of the others."""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), sync=sync
    )
    scheduler = hvd.follow_rounds(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps))
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()  # does nothing now: loops that have this line may keep it
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
