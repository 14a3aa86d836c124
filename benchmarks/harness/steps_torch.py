"""Steps without compute in PyTorch, for each optimizer: gradients flow through hooks, from a backward that does little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch
import torch

import horovod_partial.torch as hvd
from harness.device import finish
from harness.shapes import Shape

__all__ = ["anyone", "barrier", "bucket_stats", "finish", "make_steps", "mean_over_ranks"]

Step = Callable[[], None]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "horovod": horovod.torch.DistributedOptimizer,
    "horovod_again": horovod.torch.DistributedOptimizer,
    "full": lambda *arguments: hvd.DistributedOptimizer(*arguments, sync=hvd.Full()),
    "quorum of all": lambda *arguments: hvd.DistributedOptimizer(*arguments, sync=hvd.Quorum(1.0)),
    "majority": lambda *arguments: hvd.DistributedOptimizer(*arguments, sync=hvd.Majority()),
    "solo": lambda *arguments: hvd.DistributedOptimizer(*arguments, sync=hvd.Solo()),
}


def make_steps(prefix: str, shapes: list[Shape]) -> dict[str, Step]:
    """A step of each optimizer, with parameters of its own."""
    return {name: _make_step(name, f"{prefix}.{name}", shapes) for name in OPTIMIZERS}


def _make_step(optimizer_name: str, prefix: str, shapes: list[Shape]) -> Step:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = [(f"{prefix}.{index}", parameter) for index, parameter in enumerate(parameters)]
    optimizer = OPTIMIZERS[optimizer_name](torch.optim.SGD(parameters, lr=1e-3), named)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()

    return step


def barrier() -> None:
    """Wait until every rank is here."""
    hvd.barrier()


def bucket_stats() -> dict[str, Any]:
    """`hvd.partial_stats()`."""
    return hvd.partial_stats()


def anyone(flag: bool) -> bool:
    """Whether a rank says so; the same on all ranks."""
    return any(hvd.allgather_object(flag))


def mean_over_ranks(values: list[list[float]], name: str) -> list[list[float]]:
    """The mean of everybody's numbers."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name).tolist()
