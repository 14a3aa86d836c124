"""Trains with the last rank slow, since its loader is, for a recording: `recorded.py POLICY STEPS WHAT`.

WHAT is `whole`, `large` (with gradients of 2.6 MB), `metric` (with an average over the ranks in each step), `late` (recorded by the program, from step 5 on), `uneven` (each rank takes 10 steps more than the one before, and joins), `again` (Horovod is initialised twice) or `for_ever`.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import FOLDER, RANK, note
from torch.utils.data import DataLoader, IterableDataset

import horovod_partial.torch as hvd

policy, steps, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if hvd.rank() == hvd.size() - 1:
                time.sleep(0.1)
            yield torch.randn(4, 8)


def shared_updates(optimizer: Any) -> Iterator[int]:
    """The update of each micro-batch. No rank makes a second one of an update before all ranks have begun their first.

    Otherwise a rank that a busy machine keeps waiting for milliseconds would find that the others have made all of them.
    """
    begun = -1
    while (update := optimizer.rounds) < steps:
        while update == begun and not all((FOLDER / f"begun.{update}.{rank}").exists() for rank in range(hvd.size())):
            time.sleep(0.001)
        (FOLDER / f"begun.{update}.{RANK}").touch()
        begun = update
        yield update


def train(recorded_from: int | None) -> None:
    torch.manual_seed(0)
    width = 1 << 16 if what == "large" else 16
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    passes = 2 if policy == "work_sharing" else 1
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), sync=policy, backward_passes_per_step=passes)

    batches = iter(DataLoader(Batches(), batch_size=None))

    def numbers() -> Iterator[int]:
        if policy == "work_sharing":
            yield from shared_updates(optimizer)
        elif what == "for_ever":
            yield from itertools.count()
        else:
            yield from range(steps + 10 * hvd.rank() if what == "uneven" else steps)

    for number in numbers():
        if number == recorded_from:
            hvd.record(FOLDER / "recordings")
            try:
                hvd.record(Path(FOLDER / "recordings"))
            except RuntimeError as error:
                note("twice", str(error))
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        if what == "metric":
            hvd.allreduce(loss.detach(), name="loss")
    if what == "uneven":
        hvd.join()
    optimizer.flush()


hvd.init()
train(5 if what == "late" else None)
if what == "again":
    hvd.shutdown()
    hvd.init()
    train(None)
note("ended", str(RANK))
