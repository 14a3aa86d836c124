"""A moving average of the weights, and weights that are kept in bounds: by a hook for each round."""

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
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    @torch.no_grad()
    def after_round(_: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)
        average.update_parameters(model)

    optimizer.register_round_hook(after_round, state=average)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.flush()
    hvd.assert_replicas_equal(average.module)
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
