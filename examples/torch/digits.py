"""The main job: handwritten digits, learnt by ranks that take turns at being slow.

    .venv/bin/python examples/torch/digits.py [--seeds 5] [--adam 0.002] [--transport gloo]

Starts 4 ranks, which train a small network on scikit-learn's digits under each policy. A step takes a rank a quarter,
half, once or 2.25 times the mean (a sleep stands for that much work), and the ranks take turns. Under every policy a rank
takes the same number of steps of its own, so every policy works through the same number of gradients. The clock stops
when the last rank has flushed. Accuracy is that of the replicas on the test set, after the flush, averaged over ranks.

Under `WorkSharing` a step is split into 4 micro-batches, which whoever is free takes. A rank is as slow as it would be in
that step, and each update has the very samples that it has under `Full`.

Prints a table and writes `digits.json`, `accuracy.png` and `arrivals.png` into `build/demo`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import horovod_partial.torch as hvd

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "shared")]

import digits_job
import harness


def train_all(**arguments: Any) -> list[dict[str, digits_job.Run]]:
    """What every rank runs."""
    arms = {"full": digits_job.ARMS["full"]} | digits_job.SHARING_ARM | digits_job.ARMS
    return digits_job.train_all(train, arms=arms, **arguments)


def train(
    stage: str, options: dict[str, Any], seed: int, steps: int, delays: harness.Delays, adam: float | None
) -> digits_job.Run:
    """Train under one policy, with Adam if there is a rate for it. Returns its figures, and when what happened, in seconds from the start."""
    rank, size = hvd.rank(), hvd.size()
    images, labels, test_images, test_labels = map(torch.from_numpy, digits_job.load(seed))
    drawn = [draw(seed * size + home, len(images[home::size]), steps) for home in range(size)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if adam is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=digits_job.LEARNING_RATE, momentum=digits_job.MOMENTUM)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=adam)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), step_each_pass=True, **options)
    rate_of = lambda n: max(0.05, (1 + math.cos(math.pi * n / steps)) / 2)
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes = options.get("backward_passes_per_step", 1)
    notes = digits_job.Notes(
        hvd, lambda: parameters_to_vector(model.parameters()).detach().numpy(), shares_work=passes > 1
    )

    hvd.barrier()
    notes.start()
    while (begun := optimizer.begin_micro_batch())[0] < steps:  # one loop for all policies
        step, number = begun
        home, part = divmod(number, passes)
        batch = drawn[home][step].chunk(passes)[part]
        harness.progress(stage, step, steps)
        notes.begin(step)
        delays.serve(rank, step, 1 / passes)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[home::size][batch]), labels[home::size][batch])
        (loss / passes).backward()
        notes.arrive()
        optimizer.step()
        notes.end()
    optimizer.flush()
    notes.finish()

    def accuracy(weights: np.ndarray) -> float:
        vector_to_parameters(torch.from_numpy(weights).float(), model.parameters())
        with torch.no_grad():
            return (model(test_images).argmax(1) == test_labels).float().mean().item()

    return notes.run(steps, accuracy)


def draw(seed: int, images: int, steps: int) -> list[torch.Tensor]:
    """The images of each step of a rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(images, (digits_job.BATCH,), generator=generator) for _ in range(steps)]


if __name__ == "__main__":
    digits_job.main(train_all, output=Path("build/demo"))
