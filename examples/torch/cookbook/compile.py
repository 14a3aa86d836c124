"""`torch.compile`: the model is compiled, the optimizer is wrapped for the parameters of the model itself, as they are named."""

from __future__ import annotations

import sys

import torch
from data import batches, network

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    # The default backend, "inductor", needs a C++ compiler on every machine, and starts processes that compile.
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), sync=sync
    )
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(compiled(images), labels).backward()
        optimizer.step()  # outside of what is compiled: a round cannot be traced
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
