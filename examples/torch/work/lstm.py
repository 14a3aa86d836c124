"""An LSTM that classifies sequences as long as the videos of UCF101: a rank's step takes as long as its sequences.

    horovodrun -np 4 python examples/torch/work/lstm.py --policy solo --rate 8.0 --seed 0

Eager-SGD (PPoPP'20) met this imbalance where it trained an LSTM on features of UCF101's frames: 29 to 1,776 of them, mean
187, standard deviation 97. The lengths here are log-normal with these figures. The features are made: each class is a
motion, a vector that goes round in a plane of its own, in noise; two classes at a time share a plane and differ in the
direction, which no single frame shows. A batch has sequences of similar length, so its work is proportional to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import job
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import horovod_partial.torch as hvd

FRAMES_MEAN, FRAMES_DEVIATION, FRAMES_RANGE = 187, 97, (29, 1776)
FEATURES, CLASSES, TURN = 16, 16, 8  # a motion goes round in about so many frames
SIGNAL = 1.2  # against noise of 1
TRAINING, HELD_OUT = 4096, 1024  # sequences
BATCH, HIDDEN = 32, 96
STEPS, RATE, LARGEST_NORM = 224, 8.0, 1.0
MOMENTUM = 0.5  # less than is usual, since late gradients act as momentum


class Videos:
    """Sequences of frames with their lengths and classes."""

    def __init__(self, frames: list[torch.Tensor], classes: torch.Tensor) -> None:
        self.frames = frames
        self.lengths = torch.tensor([len(video) for video in frames])
        self.classes = classes

    @classmethod
    def make(cls, count: int, planes: torch.Tensor, generator: torch.Generator) -> Videos:
        variance = math.log(1 + (FRAMES_DEVIATION / FRAMES_MEAN) ** 2)
        normal = torch.randn(count, generator=generator)
        lengths = (normal * math.sqrt(variance) + math.log(FRAMES_MEAN) - variance / 2).exp().clamp(*FRAMES_RANGE)
        classes = torch.randint(CLASSES, (count,), generator=generator)
        frames = []
        for length, kind in zip(lengths.round().long().tolist(), classes.tolist(), strict=True):
            start, direction = torch.rand((), generator=generator), 1 - 2 * (kind % 2)
            angle = 2 * math.pi * (start + direction * torch.arange(length) / TURN)
            motion = torch.stack([angle.cos(), angle.sin()], dim=1) @ planes[kind // 2]
            frames.append(SIGNAL * motion + torch.randn(length, FEATURES, generator=generator))
        return cls(frames, classes)

    def share(self, rank: int, size: int) -> Videos:
        """One rank's share; all are equally large."""
        chosen = slice(rank, len(self.frames) // size * size, size)
        return Videos(self.frames[chosen], self.classes[chosen])

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Padded sequences, their lengths and classes."""
        padded = pad_sequence([self.frames[i] for i in indices], batch_first=True)
        return padded, self.lengths[indices], self.classes[indices]

    def similar(self, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Batches of similar length; those of the same length stay in the order that is given."""
        return order[self.lengths[order].argsort(stable=True)].split(BATCH)


class Classifier(nn.Module):
    """An LSTM, and a class by the mean of what it has put out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, CLASSES)

    def forward(self, padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(padded)
        within = torch.arange(padded.shape[1]) < lengths[:, None]
        return self.output((hidden * within[:, :, None]).sum(1) / lengths[:, None])


def draw(videos: Videos, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """The batches of a rank: in each epoch its whole share, in batches of similar length, which are shuffled."""
    return job.draw(lambda: videos.similar(torch.randperm(len(videos.frames), generator=generator)), steps, generator)


def main() -> None:
    options = job.options(__doc__, rate=RATE, steps=STEPS, momentum=MOMENTUM, balances=True)
    hvd.init()
    torch.set_num_threads(1)
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(options.seed)
    planes = torch.linalg.qr(torch.randn(CLASSES // 2, FEATURES, 2, generator=generator)).Q.transpose(1, 2)
    training = Videos.make(TRAINING, planes, generator)
    training = training if options.balanced else training.share(rank, size)
    held_out = Videos.make(HELD_OUT, planes, generator).share(rank, size)

    torch.manual_seed(options.seed)
    model = Classifier()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.rate, momentum=options.momentum),
        model.named_parameters(),
        sync=options.policy,
        max_grad_norm=LARGEST_NORM,
    )
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, job.cosine(options.steps)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    if options.balanced:
        drawn = map(torch.tensor, job.balanced(training.lengths, BATCH, options.steps, options.seed))
    else:
        drawn = draw(training, options.steps, torch.Generator().manual_seed(1000 * (options.seed + 1) + rank))
    clock = job.Clock(model, options.steps)
    for indices in drawn:
        clock.batch()
        padded, lengths, classes = training.batch(indices)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(padded, lengths), classes).backward()
        optimizer.step()
    optimizer.flush()

    def test() -> tuple[float, int]:
        right = 0.0
        with torch.no_grad():
            for indices in held_out.similar(torch.arange(len(held_out.frames))):
                padded, lengths, classes = held_out.batch(indices)
                right += (model(padded, lengths).argmax(1) == classes).sum().item()
        return right, len(held_out.frames)

    clock.report(test, policy=options.policy, name="accuracy", better="higher")


if __name__ == "__main__":
    main()
