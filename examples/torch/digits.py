"""The main job: handwritten digits, learnt by ranks that take turns at being slow.

    .venv/bin/python examples/torch/digits.py [--seeds 5] [--transport gloo]

Starts 4 ranks, which train a small network on scikit-learn's digits under each policy. A step takes a rank a quarter,
half, once or 2.25 times the mean (a sleep stands for that much work), and the ranks take turns. Under every policy a rank
takes the same number of steps of its own, so every policy works through the same number of gradients. The clock stops
when the last rank has flushed. Accuracy is that of the replicas on the test set, after the flush, averaged over ranks.

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
    return digits_job.train_all(train, **arguments)


def train(stage: str, options: dict[str, Any], seed: int, steps: int, delays: harness.Delays) -> digits_job.Run:
    """Train under one policy. Returns its figures, and when what happened, in seconds from the start."""
    rank, size = hvd.rank(), hvd.size()
    images, labels, test_images, test_labels = map(torch.from_numpy, digits_job.load(seed))
    images, labels = images[rank::size], labels[rank::size]
    generator = torch.Generator().manual_seed(seed * size + rank)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=digits_job.LEARNING_RATE, momentum=digits_job.MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    rate_of = lambda n: max(0.05, (1 + math.cos(math.pi * n / steps)) / 2)
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    notes = digits_job.Notes(hvd, lambda: parameters_to_vector(model.parameters()).detach().numpy())

    hvd.barrier()
    notes.start()
    for step in range(steps):
        harness.progress(stage, step, steps)
        notes.begin(step)
        batch = torch.randint(len(images), (digits_job.BATCH,), generator=generator)
        delays.serve(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
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


if __name__ == "__main__":
    digits_job.main(train_all, output=Path("build/demo"))
