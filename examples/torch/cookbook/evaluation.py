"""Evaluation on rank 0 between epochs: flush first, and the others train on meanwhile."""

from __future__ import annotations

import sys

import torch
from data import batches, digits, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), sync=sync
    )
    for _ in range(2):
        for images, labels in batches(steps // 2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        optimizer.flush()  # on every rank: now all have the model that is evaluated
        if hvd.rank() == 0:
            with torch.no_grad():
                images, labels = digits()
                print(f"accuracy {(model(images).argmax(1) == labels).float().mean().item():.1%}")
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
