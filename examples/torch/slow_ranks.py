"""A program for Horovod, as there are many, on a cluster whose ranks are not alike: which one is slow, and what to do?

    horovodrun -np 4 horovod-partial run --record recordings examples/torch/slow_ranks.py
    horovod-partial report recordings --output report.html
    horovod-partial advise recordings

The last rank takes 1.6 times as long for each step, and rank 1 is slow for 15 steps in 50, as where somebody else uses its
machine now and then. See docs/slow-ranks.md.
"""

import argparse
import time

import horovod.torch as hvd
import torch
from torch import nn

STEP = 0.05  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    hvd.init()
    torch.manual_seed(0)
    inputs = torch.randn(2000, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(1)  # data that need no download: what a random linear layer says
    inputs, labels = inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for step in range(steps):
        rows = torch.randint(len(inputs), (16,))
        is_slow = hvd.rank() == hvd.size() - 1
        is_disturbed = hvd.rank() == 1 and step % 50 >= 35
        time.sleep(STEP * (1.6 if is_slow else 2.5 if is_disturbed else 1.0))  # stands for a larger model
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if step % 50 == 49:  # in each step all ranks would wait for the slowest here, under any policy
            mean_loss = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean_loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
