"""Two optimizers: each has its own rounds, and any flush applies those of both."""

from __future__ import annotations

import sys

import torch
from data import batches

import horovod_partial.torch as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    critic = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    makes, judges = (
        hvd.DistributedOptimizer(torch.optim.Adam(part.parameters(), lr=1e-3), part.named_parameters(), sync=sync)
        for part in (generator, critic)
    )
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for images, _ in batches(steps):
        made = generator(torch.randn(len(images), 8))
        judges.zero_grad()
        real, false = critic(images), critic(made.detach())
        (bce(real, torch.ones_like(real)) + bce(false, torch.zeros_like(false))).backward()
        judges.step()

        makes.zero_grad()
        critic.requires_grad_(False)  # its gradients are none of this step
        judged = critic(made)
        bce(judged, torch.ones_like(judged)).backward()
        critic.requires_grad_(True)
        makes.step()
    makes.flush()
    judges.flush()
    hvd.assert_replicas_equal(critic, judges)
    return generator, makes


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
