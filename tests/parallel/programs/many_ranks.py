"""Trains under each policy with ranks of random speed, and compares the replicas; then the last rank is killed."""

import os
import random
import signal
import sys
import time

import torch
from common import RANK, note, wait_for_note

import horovod_partial.torch as hvd

torch.set_num_threads(1)
torch.manual_seed(0)
hvd.init()
speed = random.Random(RANK)


def train(policy: str, steps: int) -> None:
    model = torch.nn.Linear(8, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sync=policy)
    for _ in range(steps):
        time.sleep(speed.choice((0.0, 0.0, 0.02)))
        model(torch.randn(4, 8) + RANK / hvd.size()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    hvd.assert_replicas_equal(model)


for policy in sys.argv[1:]:
    train(policy, steps=20)
    note(f"trained.{policy}")
if hvd.rank() == hvd.size() - 1:
    for other in range(hvd.size()):
        wait_for_note(f"trained.{sys.argv[-1]}", other)
    os.kill(os.getpid(), signal.SIGKILL)
train("majority", steps=1_000_000)
