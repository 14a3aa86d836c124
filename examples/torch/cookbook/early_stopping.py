"""Early stopping by the word of rank 0: all ranks hear it after the same flush."""

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
    best = float("inf")
    for _ in range(3):
        for images, labels in batches(steps // 3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        optimizer.flush()
        loss = hvd.broadcast(loss.detach(), root_rank=0, name="loss").item()  # rank 0 decides
        if loss > best:
            break
        best = loss
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
