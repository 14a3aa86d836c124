"""Save and resume: a flush, then one rank writes what all have."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from data import batches, network

import horovod_partial.torch as hvd


def make(sync: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=sync)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    path = hvd.broadcast_object(str(Path(tempfile.mkdtemp()) / "checkpoint.pt"), root_rank=0)
    model, optimizer = make(sync)
    step(model, optimizer, steps // 2)
    hvd.save_checkpoint(path, model, optimizer)  # on every rank: it flushes, and rank 0 writes
    hvd.allreduce(torch.zeros(1), name="saved")

    model, optimizer = make(sync)
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step(model, optimizer, steps // 2)
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
