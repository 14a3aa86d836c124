"""Layers that are frozen at first: wrap the optimizer of each phase, with what is trained in it."""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    first = model[0].requires_grad_(False)
    for phase in ("the head", "everything"):
        if phase == "everything":
            first.requires_grad_(True)
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        bare = torch.optim.AdamW([parameter for _, parameter in trained], lr=1e-3)
        optimizer = hvd.DistributedOptimizer(bare, trained, sync=sync)
        for images, labels in batches(steps // 2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
