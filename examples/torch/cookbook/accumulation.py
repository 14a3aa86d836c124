"""Accumulation: several backward passes make one contribution."""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd

PASSES = 3


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        sync=sync,
        backward_passes_per_step=PASSES,
    )
    for number, (images, labels) in enumerate(batches(PASSES * steps), start=1):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        (loss / PASSES).backward()
        if number % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
