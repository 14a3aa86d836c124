"""How ranks train together, by name: Horovod's way, published rivals written with our operations, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import horovod_partial.torch as hvd

PERIOD = 10  # rounds from one average over all ranks to the next
CONTRACTION = 0.99  # of a step, for averages by work


class LocalSGD(torch.optim.SGD):
    """Every rank by itself; every `PERIOD` steps the models are averaged over all ranks, and all wait."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)
        self._model = model
        self._steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self._steps += 1
        if self._steps % PERIOD == 0:
            self.flush()
        return loss

    @property
    def was_full(self) -> bool:
        """The last step ended with an average over all ranks."""
        return self._steps % PERIOD == 0

    @torch.no_grad()
    def flush(self) -> None:
        """Average the models now."""
        flat = nn.utils.parameters_to_vector(self._model.parameters())
        nn.utils.vector_to_parameters(hvd.allreduce_(flat, name="local_sgd"), self._model.parameters())


def fixed_groups(size: int) -> hvd.GroupAverage:
    """Groups that never change: only the rounds of all ranks mix them."""
    return hvd.GroupAverage(schedule=hvd.Schedule(lambda _, rank: rank // size, 1), period=PERIOD)


POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: {"sync": hvd.Full()},
    # D-PSGD averages with both neighbours on a ring; in groups it is the one, then the other, and everybody waits.
    "d_psgd": lambda: {"sync": hvd.GroupAverage(schedule=hvd.Ring(2), period=None), "max_staleness": 0},
    # AD-PSGD draws a partner at random; here it is the next that is ready.
    "ad_psgd": lambda: {"sync": hvd.PartialReduce(2)},
    "group_average:2": lambda: {"sync": hvd.GroupAverage(2, period=PERIOD)},
    "group_average:4": lambda: {"sync": hvd.GroupAverage(4, period=PERIOD)},
    "fixed_groups:2": lambda: {"sync": fixed_groups(2)},
    "fixed_groups:4": lambda: {"sync": fixed_groups(4)},
    "partial_reduce:3": lambda: {"sync": hvd.PartialReduce(3)},
    "partial_reduce:4": lambda: {"sync": hvd.PartialReduce(4)},
    "partial_reduce:3:staleness": lambda: {"sync": hvd.PartialReduce(3, weights="staleness")},
    "weighted_average": lambda: {"sync": hvd.WeightedAverage(PERIOD, CONTRACTION)},
}
# Every rank must take the same number of steps with these.
IN_STEP = ("full", "local_sgd", "d_psgd")


def make_optimizer(name: str, model: nn.Module, lr: float) -> Any:
    """SGD that trains the model by the exchange of that name."""
    if name == "local_sgd":
        return LocalSGD(model, lr)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **POLICIES[name]())


def was_full(optimizer: Any) -> bool:
    """The last step waited for all ranks, by schedule."""
    if isinstance(optimizer, LocalSGD):
        return optimizer.was_full
    last = optimizer.last_round
    return last is None or last.round == 0 or (last.round + 1) % PERIOD == 0


def model_statistics() -> list[dict[str, Any]]:
    """`hvd.partial_stats()` of the models that policies average, in the order in which their optimizers were made."""
    stats = hvd.partial_stats()
    names = [name for name in stats if name.startswith("DistributedOptimizer.") and name.endswith(".model")]
    return [stats[name] for name in sorted(names, key=lambda name: int(name.split(".")[-2]))]
