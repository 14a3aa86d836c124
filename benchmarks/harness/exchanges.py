"""How ranks train together, by name: Horovod's way, published rivals (see baselines), and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from baselines import ADPSGD, DPSGD, Baseline, EagerSGD, LocalSGD, PushSum
from torch import nn

import horovod_partial.torch as hvd
from horovod_partial.policies import parse

PERIOD = 10  # rounds from one average over all ranks to the next
TEN_EPOCHS = 640  # rounds, in which a rank goes through the hyperplane's points ten times


def fixed_groups(size: int) -> hvd.GroupAverage:
    """Groups that never change: only the rounds of all ranks mix them."""
    return hvd.GroupAverage(schedule=hvd.Schedule(lambda _, rank: rank // size, 1), period=PERIOD)


def wait_avoiding(size: int) -> hvd.GroupAverage:
    """Groups along a butterfly, but every `PERIOD`-th round is one group of all ranks. Only the first round waits for ranks."""
    butterfly = hvd.Butterfly(size)

    def group(round: int, rank: int) -> int:
        groups = butterfly.groups(round, hvd.size())
        return -1 if (round + 1) % PERIOD == 0 else next(i for i, ranks in enumerate(groups) if rank in ranks)

    # If ranks and size are powers of two, a butterfly repeats after this many rounds.
    phases = (hvd.size() - 1).bit_length()
    return hvd.GroupAverage(schedule=hvd.Schedule(group, PERIOD * phases), period=None)


# Policies that have no text form. Every other name, unless it is a baseline, is the text of a policy.
POLICIES: dict[str, Callable[[], hvd.GroupAverage]] = {
    "fixed_groups:2": lambda: fixed_groups(2),
    "fixed_groups:4": lambda: fixed_groups(4),
    "wait_avoiding:4": lambda: wait_avoiding(4),
}
BASELINES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Sequence[hvd.ProcessSet]], Baseline]] = {
    "local_sgd": lambda _, optimizer, __: LocalSGD(optimizer, PERIOD),
    "d_psgd": lambda _, optimizer, sets: DPSGD(optimizer, sets),
    "ad_psgd": lambda _, optimizer, sets: ADPSGD(optimizer, sets),
    "push_sum:1": lambda _, optimizer, sets: PushSum(optimizer, sets, 1),
    "push_sum:2": lambda _, optimizer, sets: PushSum(optimizer, sets, 2),
    "push_sum:1:overlap": lambda _, optimizer, sets: PushSum(optimizer, sets, 1, overlap=True),
    "push_sum:2:overlap": lambda _, optimizer, sets: PushSum(optimizer, sets, 2, overlap=True),
    "eager_sgd:solo": lambda model, optimizer, _: EagerSGD(optimizer, model.named_parameters(), "solo", TEN_EPOCHS),
    "eager_sgd:majority": lambda model, optimizer, _: EagerSGD(
        optimizer, model.named_parameters(), "majority", TEN_EPOCHS
    ),
}
# By the kind of an exchange, the part of its name before the first colon.
PROCESS_SETS = {
    "d_psgd": DPSGD.process_sets_of,
    "ad_psgd": ADPSGD.process_sets_of,
    "push_sum": PushSum.process_sets_of,
}
IN_STEP = ("full", "local_sgd", "d_psgd", "push_sum")


def is_in_step(name: str) -> bool:
    """Whether every rank must take the same number of steps with the exchange of that name."""
    return _kind(name) in IN_STEP


def process_sets_of(name: str, ranks: int) -> list[list[int]]:
    """The ranks of the process sets that the exchange of that name needs."""
    return PROCESS_SETS[_kind(name)](ranks) if _kind(name) in PROCESS_SETS else []


def _kind(name: str) -> str:
    return name.partition(":")[0]


def jobs(exchange_of: Mapping[str, str], ranks: int) -> list[tuple[list[list[int]], list[str]]]:
    """The arms that run in one job of Horovod, with the process sets that they need, as each of these costs time.

    Args:
        exchange_of: by arm, its name.
        ranks: how many.
    """
    together: list[tuple[list[list[int]], list[str]]] = []
    for name, exchange in exchange_of.items():
        needed = process_sets_of(exchange, ranks)
        same = next((names for process_sets, names in together if process_sets == needed), None)
        if same is None:
            together.append((needed, [name]))
        else:
            same.append(name)
    return together


def make_optimizer(name: str, model: nn.Module, lr: float, process_sets: Sequence[hvd.ProcessSet] = ()) -> Any:
    """SGD that trains the model by the exchange of that name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if name in BASELINES:
        return BASELINES[name](model, optimizer, process_sets)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=policy(name))


def policy(name: str) -> Any:
    """Return our policy of that name."""
    return POLICIES[name]() if name in POLICIES else parse(name)


def was_full(name: str, optimizer: Any) -> bool:
    """The last step, by the exchange of that name, waited for all ranks by schedule."""
    if isinstance(optimizer, Baseline):
        return optimizer.was_full
    if name == "full":
        return True
    last, ours = optimizer.last_round, policy(name)
    period = ours.period if isinstance(ours, hvd.GroupAverage) else None
    return last is not None and (last.round == 0 or (period is not None and (last.round + 1) % period == 0))


def model_statistics() -> list[dict[str, Any]]:
    """`hvd.partial_stats()` of the models that policies average, in the order in which their optimizers were made."""
    stats = hvd.partial_stats()
    names = [name for name in stats if name.startswith("DistributedOptimizer.") and name.endswith(".model")]
    return [stats[name] for name in sorted(names, key=lambda name: int(name.split(".")[-2]))]
