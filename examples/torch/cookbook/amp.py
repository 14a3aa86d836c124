"""Mixed precision: pass the scaler. A round that overflows is skipped by every rank, and the scale follows rounds."""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        sync=sync,
        grad_scaler=scaler,
        max_grad_norm=1.0,  # of the unscaled gradients
    )
    for images, labels in batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
