"""A sparse support-vector machine with the numbers of WP-SGD's KDD run, on sessions of rows that differ in length.

    horovodrun -np 4 python examples/torch/work/svm.py --policy weighted_average:20,0.97 --rate 1e-4 --seed 0

Hinge loss, lambda 0.01, a rate of 1e-4 and all weights 4 at the start, as in WP-SGD (JPDC 2020, section 6.5). KDD Cup 2010
(algebra) has binary rows, most of them with 20 to 40 non-zeros, in 20,216,830 dimensions. These here are generated, with as
many non-zeros in 49,152 dimensions: a row has one value in each of its first fields, the values of a field follow a power
law, and a noisy plane gives the labels.

A step takes the rows of a session, whose lengths, log-normal, are ours and not KDD's: so steps differ by what a rank has in
its hands. Loss and regularisation are sums over the rows, which is as many steps of the paper at once; so the paper's r of
0.99999, which is of one row, is r^n for a step of n rows: 0.97 for the mean session.
"""

from __future__ import annotations

from collections.abc import Iterator

import job
import torch
from torch import nn

import horovod_partial.torch as hvd

FIELDS, VALUES = 48, 1024
DIMENSIONS = FIELDS * VALUES
NON_ZEROS, NON_ZEROS_SPREAD = 29, 0.3  # of a row: median, and sigma of a log-normal; two rows of three have 21 to 39
SESSION, SESSION_SPREAD = 2500, 0.7  # rows, likewise
LONGEST_SESSION = 8 * SESSION
ROWS, HELD_OUT = 40_000, 2_000  # of a rank; of all
NOISE = 0.5
REGULARISATION = 0.01
START = 4.0
RATE, STEPS = 1e-4, 640
TEN_EPOCHS = 125  # mean sessions, after which eager-SGD as published averages the models


def log_normal(median: float, spread: float, count: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers, 1 or more."""
    return (median * (spread * torch.randn(count, generator=generator)).exp()).round().clamp(min=1).long()


def make(count: int, seed: int, plane: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, each as the dimensions that are not zero, filled up with DIMENSIONS; and their labels, 1 or -1."""
    generator = torch.Generator().manual_seed(seed)
    length = log_normal(NON_ZEROS, NON_ZEROS_SPREAD, count, generator).clamp(max=FIELDS)
    # Log-uniform, so that value v of a field is about as frequent as 1 / v.
    values = (VALUES ** torch.rand(count, FIELDS, generator=generator)).long() - 1
    dimensions = torch.arange(FIELDS) * VALUES + values
    dimensions[torch.arange(FIELDS) >= length[:, None]] = DIMENSIONS
    noise = NOISE * torch.randn(count, generator=generator)
    above = plane[dimensions].sum(1) / length.sqrt() + noise > 0
    return dimensions, torch.where(above, 1.0, -1.0)


def draw(steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """The rows of each step of a rank: one session."""
    for length in log_normal(SESSION, SESSION_SPREAD, steps, generator).clamp(max=LONGEST_SESSION).tolist():
        yield torch.randint(ROWS, (length,), generator=generator)


def hinge(model: nn.EmbeddingBag, dimensions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each row."""
    return (1 - labels * model(dimensions)[:, 0]).relu()


def main() -> None:
    options = job.options(__doc__, rate=RATE, steps=STEPS)
    hvd.init()
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    plane = torch.randn(DIMENSIONS + 1, generator=torch.Generator().manual_seed(options.seed))
    plane[DIMENSIONS] = 0.0
    training = make(ROWS, 1_000 * (options.seed + 1) + rank, plane)
    held_out = [part[rank::size] for part in make(HELD_OUT, 1_000 * (options.seed + 1) + 999, plane)]

    model = nn.EmbeddingBag(DIMENSIONS + 1, 1, mode="sum", padding_idx=DIMENSIONS)
    nn.init.constant_(model.weight, START)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.rate),
        model.named_parameters(),
        sync=options.policy,
    )
    sync = job.ModelSync(optimizer, TEN_EPOCHS) if "missed=latest" in options.policy else None

    clock = job.Clock(model, options.steps)
    for rows in draw(options.steps, torch.Generator().manual_seed(1_000 * (options.seed + 1) + 500 + rank)):
        clock.batch()
        optimizer.zero_grad()
        losses = hinge(model, *(part[rows] for part in training))
        (losses.sum() + len(rows) * REGULARISATION / 2 * model.weight.square().sum()).backward()
        optimizer.step()
        if sync is not None:
            sync.after_step()
    optimizer.flush()

    def test() -> tuple[float, int]:
        with torch.no_grad():
            losses = hinge(model, *held_out)
        return losses.sum().item(), len(losses)

    clock.report(test, policy=options.policy, name="hinge loss", better="lower")


if __name__ == "__main__":
    main()
