"""The optimizer is a variable of a function that has returned when the program ends. Rank 1 takes one step more than rank 0."""

import torch
from common import RANK, note, wait_for_note

import horovod_partial.torch as hvd


def train(weight: torch.nn.Parameter) -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="solo")
    for step in range(2 + RANK):
        if step == 1 and RANK == 1:
            wait_for_note("returned", 0)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


hvd.init()
weight = torch.nn.Parameter(torch.zeros(1))
train(weight)
note("returned")
note("weight", str(weight.item()))
