"""Trains where rank 1 does something else than the others: `disagree.py KIND`. Notes the error, and how long it took."""

import sys
import time

import torch
from common import RANK, note

import horovod_partial.torch as hvd

kind = sys.argv[1]
differs = RANK == 1


def wrapped(*layers: torch.nn.Module, names: str = "", **arguments: object) -> torch.optim.Optimizer:
    model = torch.nn.Sequential(*layers)
    named = [(names + name, parameter) for name, parameter in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named, **{"sync": "majority", **arguments})


def train(optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"]).backward()
        optimizer.step()


def differ() -> None:
    small, large = torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)
    if kind == "layers":
        train(wrapped(small, large) if differs else wrapped(small))
    elif kind == "names":
        train(wrapped(small, names="other." if differs else ""))
    elif kind == "groups":
        train(wrapped(small, large, groups=2 if differs else None))
    elif kind == "full":
        train(wrapped(small, sync="full" if differs else "majority"))
    elif kind == "models":
        train(wrapped(small, sync=hvd.GroupAverage(2) if differs else "majority"))
    elif kind == "process-sets":  # each with the next one
        train(wrapped(small, process_set=sets[RANK]))
    elif kind == "one-more":
        optimizers = [wrapped(small) for _ in range(2 if differs else 1)]
        train(optimizers[-1])
    elif kind in ("flush", "everything"):
        optimizer = wrapped(small)
        train(optimizer)
        if differs:
            optimizer.flush()
        if kind == "everything" and RANK == 2:
            train(wrapped(large))
        hvd.allreduce(torch.ones(1), name="after")


sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 2])] if kind == "process-sets" else []
hvd.init(process_sets=sets)
start = time.monotonic()
try:
    differ()
except hvd.HorovodInternalError as error:
    note("error", f"{time.monotonic() - start:.1f} {error}")
    sys.exit(1)
