"""Digits learnt by ranks of unequal machines: whoever is free takes the next batch.

    horovodrun -np 4 python examples/torch/work/heterogeneous.py --policy partial_reduce:2 --rate 0.1 --seed 0

Nothing here makes a rank slow; the machine does, or the quota that `benchmarks/work.py` gives each rank. If all ranks took
the same number of steps, the slowest would decide when the job is done, under any policy. So there is one list of batches,
in which each epoch has every image once, and a counter that tells a rank which batch is next. Under `full` all ranks take
equally many. The rate stays what it is, since where models are averaged no rank knows how many steps it will take.
"""

from __future__ import annotations

from datetime import timedelta

import job
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import horovod_partial.torch as hvd

BATCH, CHANNELS = 32, 96
STEPS, RATE, LARGEST_NORM = 800, 0.1, 2.0
MOMENTUM = 0.5  # less than is usual, since late gradients act as momentum
TEN_EPOCHS = 105  # rounds of 4 ranks, after which eager-SGD as published averages the models
HOST = "localhost"  # of rank 0, where the counter is


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def plan(images: int, batches: int, seed: int) -> list[torch.Tensor]:
    """All batches of the training: in each epoch every image once."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-batches * BATCH // images)
    order = torch.cat([torch.randperm(images, generator=generator) for _ in range(epochs)])
    return list(order.split(BATCH)[:batches])


def counter() -> torch.distributed.Store:
    """One for all ranks, which rank 0 keeps."""
    store, patience = None, timedelta(minutes=5)
    if hvd.rank() == 0:
        store = torch.distributed.TCPStore(HOST, 0, is_master=True, timeout=patience)
    port = hvd.broadcast_object(store and store.port, root_rank=0, name="port")
    return store or torch.distributed.TCPStore(HOST, port, is_master=False, timeout=patience)


def main() -> None:
    options = job.options(__doc__, rate=RATE, steps=STEPS, momentum=MOMENTUM, what="of all ranks together")
    hvd.init()
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    images, tests, labels, test_labels = train_test_split(images, labels, random_state=0, stratify=labels)
    tests, test_labels = tests[rank::size], test_labels[rank::size]
    batches = plan(len(images), options.steps // size * size, options.seed)

    torch.manual_seed(options.seed)
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.rate, momentum=options.momentum),
        model.named_parameters(),
        sync=options.policy,
        max_grad_norm=LARGEST_NORM,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    taken = counter()  # which lives until all ranks have flushed
    sync = job.ModelSync(optimizer, TEN_EPOCHS) if "missed=latest" in options.policy else None

    clock = job.Clock(model, len(batches) // size)
    while (number := taken.add("batches", 1)) <= len(batches):
        clock.batch()
        batch = batches[number - 1]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        if sync is not None:
            sync.after_step()
    optimizer.flush()

    def test() -> tuple[float, int]:
        with torch.no_grad():
            return (model(tests).argmax(1) == test_labels).sum().item(), len(tests)

    clock.report(test, policy=options.policy, name="accuracy", better="higher")


if __name__ == "__main__":
    main()
