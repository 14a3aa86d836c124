"""Two kinds of optimizers as one: Muon for matrices, AdamW for the rest. They share rounds, a schedule and a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import torch
from data import batches, network

import horovod_partial.torch as hvd


class Mixed(torch.optim.Optimizer):
    """Each group says which optimizer of PyTorch it has: `{"params": [...], "kind": "AdamW", "lr": 1e-3}`."""

    def __init__(self, groups: Any) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        super().__init__(groups, {})

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.parts.append(part_of(group))
        self.state.update(self.parts[-1].state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.parts = [part_of(group) for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]  # load_state_dict makes new ones
            part.step()
        return loss


def part_of(group: dict[str, Any]) -> torch.optim.Optimizer:
    return getattr(torch.optim, group["kind"])([group])


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    mixed = Mixed(
        [{"params": matrices, "kind": "Muon", "lr": 0.02}, {"params": rest, "kind": "AdamW", "lr": 1e-3}],
    )
    optimizer = hvd.DistributedOptimizer(mixed, model.named_parameters(), sync=sync)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.flush()
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
