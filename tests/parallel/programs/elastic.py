"""Trains in an elastic job until it has its final size and some steps have passed: `elastic.py POLICY FINAL_SIZE [WHERE]`.

A rank on the host 127.0.0.1, as the job calls it, kills itself on the way, between backward and step, unless the job is
to end with one rank. WHERE is `inside` if the elastic function wraps an optimizer of its own each time it is called.
"""

import sys
from typing import Any

import torch
from common import count_step, die_if_told, note

import horovod_partial.torch as hvd

policy, final_size, inside = sys.argv[1], int(sys.argv[2]), "inside" in sys.argv
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))


def make_optimizer() -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), sync=policy)


kept = {} if inside else {"optimizer": make_optimizer()}
state = hvd.elastic.TorchState(model=model, **kept, steps=0, steps_at_final_size=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    optimizer = make_optimizer() if inside else state.optimizer
    while state.steps_at_final_size < 20:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if final_size > 1:
            die_if_told(state.steps)
        optimizer.step()
        count_step(state, hvd.size() == final_size)
        if state.steps % 5 == 0:
            optimizer.flush()
            state.commit()
    optimizer.flush()


train(state)
weights = hvd.allgather(torch.cat([p.detach().reshape(1, -1) for p in model.parameters()], 1), name="weights")
distance = (weights - weights[0]).abs().max().item()
note("ended", f"{hvd.size()} {distance < 1e-5} {state.steps > 20}")
