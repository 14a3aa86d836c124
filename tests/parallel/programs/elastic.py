"""Trains in an elastic job until it has its final size and some steps have passed: `elastic.py POLICY FINAL_SIZE`.

A rank on the host 127.0.0.1, as the job calls it, kills itself on the way, between backward and step.
"""

from __future__ import annotations

import sys

import torch
from common import count_step, die_if_told, note

import horovod_partial.torch as hvd

policy, final_size = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
# Replicas of SGD with momentum agree whatever was missed, if each missed result is a step of its own.
options = {} if policy == "full" else {"model_sync_every": 7, "missed": "replay"}
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), model.named_parameters(), sync=policy, **options
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, steps=0, steps_at_final_size=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.steps_at_final_size < 20:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        die_if_told(state.steps)
        optimizer.step()
        count_step(state, hvd.size() == final_size)
        if state.steps % 5 == 0:
            optimizer.flush()
            state.commit()


train(state)
optimizer.flush()
weights = hvd.allgather(torch.cat([p.detach().reshape(1, -1) for p in model.parameters()], 1), name="weights")
distance = (weights - weights[0]).abs().max().item()
note("ended", f"{hvd.size()} {distance < 1e-5} {state.steps > 20}")
