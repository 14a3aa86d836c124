"""Accelerate: in each process for itself. It accumulates; the wrapper is told how often, and flushed by itself.

Not with `cpu=True`: under mpirun that makes a second job of the ranks, with an allreduce of its own in every step.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from data import batches, network

import horovod_partial.torch as hvd

PASSES = 3


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(gradient_accumulation_steps=PASSES, device_placement=False)
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        sync=sync,
        backward_passes_per_step=PASSES,
        max_grad_norm=1.0,  # in place of accelerator.clip_grad_norm_
    )
    model, prepared = accelerator.prepare(model, optimizer)
    for images, labels in batches(PASSES * steps):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            prepared.step()
            prepared.zero_grad()
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
