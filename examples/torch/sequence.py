"""Sequences of very different lengths: ranks that are slow because of what they have in their hands.

    .venv/bin/python examples/torch/sequence.py [--seeds 3] [--tune] [--transport gloo]

Starts 4 ranks, which learn to tell which of 16 patterns is hidden in a noisy sequence, under each policy. The lengths
follow those of the videos of UCF101 (29 to 1,776 frames, mean 187, standard deviation 97), where eager-SGD (PPoPP'20)
met this imbalance: a log-normal distribution with these figures, divided by 4. As usual a batch has sequences of
similar length, so that little is padded, and its work is proportional to the length that it is padded to. Ranks share
few cores here, where they would slow each other down by computing. So the network is tiny, and a sleep proportional to
the batch's padded length stands for the work of a large one, beside the real computation.

Work and time: under every policy each rank takes the same steps with the same batches, 5 epochs over its own share of
the sequences. The clock stops when the last rank has flushed. The target is reached on a rank when its own replica
first has 90 % of the held-out sequences right, tested every 10 steps; the table has the mean of the ranks' times. The
accuracy is that after the flush; the distance is the largest between two replicas before it, relative to their mean.

Samplers: each rank draws from its own share with its own generator, and begins its next epoch when it is through with
the last. Nothing ties epochs or steps of two ranks together, so ranks may be in different epochs; a sampler that deals
out one common order (`DistributedSampler.set_epoch`) works too if each rank calls it with its own epoch.

Learning rates: each policy has the one of `RATES` with which it was best, for a seed that is used for nothing else;
`--tune` finds them. Momentum stays on its rank under the policies that average models.

Prints a table and writes `sequence.json`, `sequence_accuracy.png` and `sequence_lengths.png` into `build/demo`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

import horovod_partial.torch as hvd
from horovod_partial.policies import Policy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "shared")]

import harness
import plots


@dataclass(frozen=True)
class Arm:
    """A policy to train under.

    Attributes:
        sync: the policy, as text or object.
        rate: the learning rate, of `RATES`.
        label: for readers.
        has_late: arrivals can be late. Under P-Reduce and WP-SGD they cannot: ranks wait, though for few others.
    """

    sync: Policy | str
    rate: float
    label: str
    has_late: bool


ARMS = {
    "full": Arm("full", 0.1, "Full", False),
    "solo": Arm("solo", 0.05, "Solo", True),
    "majority": Arm("majority", 0.05, "Majority", True),
    "quorum": Arm("quorum:0.75", 0.2, "Quorum(0.75)", True),
    "group_average": Arm("group_average:2", 0.1, "GroupAverage(2)", True),
    "partial_reduce": Arm("partial_reduce:2", 0.05, "PartialReduce(2)", False),
    # The contraction of WP-SGD follows from the loss if that is convex. For a network it is a knob.
    "weighted_average": Arm("weighted_average:8,0.98", 0.1, "WeightedAverage(8)", False),
}
LABELS = {name: arm.label for name, arm in ARMS.items()}

FRAMES_MEAN, FRAMES_DEVIATION, FRAMES_RANGE = 187, 97, (29, 1776)
SCALE = 4  # frames of a video to one of ours
CHANNELS = 8
PATTERNS, PATTERN_LENGTH = 16, 5
TRAINING, HELD_OUT = 4096, 1000  # sequences
BATCH = 16
RATES = (0.025, 0.05, 0.1, 0.2)
TUNING_SEED = 1000
TARGET = 0.9  # accuracy
SNAPSHOT_EVERY = 10  # steps


# --- Data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequences:
    """Sequences, each a matrix of frames by channels; the patterns hidden in them; their lengths in frames."""

    frames: list[torch.Tensor]
    patterns: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.frames)

    def share(self, rank: int, size: int) -> Sequences:
        """One rank's share; all are equally large."""
        chosen = slice(rank, len(self) // size * size, size)
        return Sequences(self.frames[chosen], self.patterns[chosen], self.lengths[chosen])

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Padded sequences, their lengths and their patterns."""
        padded = pad_sequence([self.frames[i] for i in indices], batch_first=True)
        return padded, self.lengths[indices], self.patterns[indices]


def make(seed: int) -> tuple[Sequences, Sequences]:
    """Sequences to train with, and those held out: noise, in which a pattern lies somewhere."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(PATTERNS, PATTERN_LENGTH, CHANNELS, generator=generator)
    variance = math.log(1 + (FRAMES_DEVIATION / FRAMES_MEAN) ** 2)
    normal = torch.randn(TRAINING + HELD_OUT, generator=generator)
    video_lengths = (normal * math.sqrt(variance) + math.log(FRAMES_MEAN) - variance / 2).exp().clamp(*FRAMES_RANGE)
    lengths = (video_lengths / SCALE).round().long()
    hidden = torch.randint(PATTERNS, (len(lengths),), generator=generator)
    frames = []
    for length, pattern in zip(lengths.tolist(), hidden.tolist(), strict=True):
        sequence = torch.randn(length, CHANNELS, generator=generator)
        start = int(torch.randint(length - PATTERN_LENGTH + 1, (), generator=generator))
        sequence[start : start + PATTERN_LENGTH] += patterns[pattern]
        frames.append(sequence)
    split = slice(TRAINING), slice(TRAINING, None)
    training, held_out = (Sequences(frames[part], hidden[part], lengths[part]) for part in split)
    return training, held_out


def draw_batches(lengths: torch.Tensor, epochs: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The batches of a rank: in each epoch its whole share, sorted by length into batches, which are then shuffled."""
    batches = []
    for _ in range(epochs):
        order = torch.randperm(len(lengths), generator=generator)
        order = order[lengths[order].argsort(stable=True)]  # those of the same length stay shuffled
        similar = order.split(BATCH)
        batches += [similar[i] for i in torch.randperm(len(similar), generator=generator)]
    return batches


def plan(training: Sequences, size: int, epochs: int, seed: int) -> list[list[torch.Tensor]]:
    """The batches of every rank, by rank: indices into its share."""
    return [
        draw_batches(
            training.share(rank, size).lengths, epochs, torch.Generator().manual_seed((seed + 1) * 1000 + rank)
        )
        for rank in range(size)
    ]


class WorkOfBatches(harness.Delays):
    """In each step a rank is delayed in proportion to the length that its batch is padded to."""

    def __init__(self, training: Sequences, batches: list[list[torch.Tensor]], mean_seconds: float) -> None:
        """`mean_seconds` is for a batch padded to the mean length of all sequences."""
        per_frame = mean_seconds / training.lengths.float().mean().item()
        size = len(batches)
        shares = [training.share(rank, size).lengths for rank in range(size)]
        self._seconds = [
            [per_frame * lengths[batch].max().item() for lengths, batch in zip(shares, step, strict=True)]
            for step in zip(*batches, strict=True)
        ]

    def draw(self, step: int) -> Sequence[float]:
        return self._seconds[step]

    def by_step(self) -> np.ndarray:
        """Seconds of all steps by rank, a row for each step."""
        return np.array(self._seconds)


# --- Training --------------------------------------------------------------------------------------------------------


class Finder(nn.Module):
    """Looks for short patterns anywhere: a convolution, and of each channel the largest value within the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(CHANNELS, 32, PATTERN_LENGTH)
        self.output = nn.Linear(32, PATTERNS)

    def forward(self, padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = self.convolution(padded.transpose(1, 2)).relu()
        within = torch.arange(found.shape[2]) <= lengths[:, None] - PATTERN_LENGTH
        return self.output((found * within[:, None]).amax(2))


def train_all(seeds: list[int], rates: list[float] | None, epochs: int, mean_ms: float) -> list[dict[str, Any]]:
    """On every rank: train under each policy, from each seed.

    Returns the figures by seed and policy; with `rates`, in place of the arms' own, by seed, policy and rate.
    """
    rank, size = hvd.rank(), hvd.size()
    results: list[dict[str, Any]] = []
    for seed in seeds:
        training, held_out = make(seed)
        batches = plan(training, size, epochs, seed)
        delays = WorkOfBatches(training, batches, mean_ms / 1e3)
        share = training.share(rank, size)

        def train_arm(
            arm: Arm, rate: float, seed: int = seed, job: Any = (share, held_out, batches[rank], delays)
        ) -> Any:
            return train(f"{arm.label}, seed {seed}", arm, rate, seed, *job)

        results.append(
            {name: train_arm(arm, arm.rate) for name, arm in ARMS.items()}
            if rates is None
            else {name: {str(rate): train_arm(arm, rate) for rate in rates} for name, arm in ARMS.items()}
        )
    return results


def train(
    stage: str,
    arm: Arm,
    rate: float,
    seed: int,
    share: Sequences,
    held_out: Sequences,
    batches: list[torch.Tensor],
    delays: harness.Delays,
) -> dict[str, Any]:
    """Train under one policy. Returns its figures, and the accuracy over time, in seconds from the start."""
    rank, steps = hvd.rank(), len(batches)
    torch.manual_seed(seed)
    model = Finder()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model.named_parameters(), sync=arm.sync
    )
    rate_of = lambda n: max(0.05, (1 + math.cos(math.pi * n / steps)) / 2)
    hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    buckets_before = set(hvd.partial_stats())
    snapshots = []

    hvd.barrier()
    start = time.perf_counter()
    for step, batch in enumerate(batches):
        harness.progress(stage, step, steps)
        if step % SNAPSHOT_EVERY == 0:
            snapshots.append((time.perf_counter() - start, parameters_to_vector(model.parameters()).detach()))
        padded, lengths, patterns = share.batch(batch)
        delays.serve(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(padded, lengths), patterns).backward()
        optimizer.step()
    before_flush = parameters_to_vector(model.parameters()).detach()
    optimizer.flush()
    seconds = time.perf_counter() - start
    snapshots.append((seconds, parameters_to_vector(model.parameters()).detach()))

    tests = [held_out.batch(indices) for indices in held_out.lengths.argsort().split(100)]
    curves = hvd.allgather_object([(when, accuracy(model, vector, tests)) for when, vector in snapshots])
    replicas = hvd.allgather(before_flush[None], name="replicas")
    return {
        "seconds": max(hvd.allgather_object(seconds)),
        "seconds_to_target": seconds_to_target(curves),
        "accuracy": fmean(curve[-1][1] for curve in curves),
        "late": late_share(buckets_before, steps) if arm.has_late else None,
        "distance": (torch.cdist(replicas, replicas).max() / replicas.mean(0).norm()).item(),
        "curve": mean_curve(curves),
    }


def accuracy(model: nn.Module, parameters: torch.Tensor, tests: list[tuple[torch.Tensor, ...]]) -> float:
    """The share of the tests' sequences whose pattern a replica finds."""
    vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        right = torch.cat([model(padded, lengths).argmax(1) == patterns for padded, lengths, patterns in tests])
    return right.float().mean().item()


Curve = list[tuple[float, float]]  # accuracy by time


def seconds_to_target(curves: list[Curve]) -> float | None:
    """When a rank has first reached the target, in the mean; None if one never does."""
    reached = [next((when for when, value in curve if value >= TARGET), None) for curve in curves]
    known = [when for when in reached if when is not None]
    return fmean(known) if len(known) == len(reached) else None


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean over the ranks, each of which has been tested at times of its own."""
    times = sorted(when for curve in curves for when, _ in curve)[:: len(curves)]
    times.append(max(when for curve in curves for when, _ in curve))
    values = np.mean([np.interp(times, *zip(*curve, strict=True)) for curve in curves], axis=0)
    return list(zip(times, values.tolist(), strict=True))


def late_share(buckets_before: set[str], steps: int) -> float:
    """The share of all ranks' steps that were too late for their round."""
    # The network is so small that it has one bucket; a flush may have another, with one round of its own.
    on_time = [
        sum(bucket["on_time"])
        for name, bucket in hvd.partial_stats().items()
        if name not in buckets_before and not name.endswith(".flush")
    ]
    return 1 - min(on_time) / (steps * hvd.size())


# --- Report ----------------------------------------------------------------------------------------------------------


def show(results: Sequence[dict[str, dict[str, Any]]], title: str) -> dict[str, dict[str, float | None]]:
    """Print the table of means over the seeds. Returns the figures for the JSON file."""
    figures: dict[str, dict[str, float | None]] = {}
    rows = []
    for name, arm in ARMS.items():
        runs = [result[name] for result in results]
        to_target = [run["seconds_to_target"] for run in runs]
        seconds = fmean(run["seconds"] for run in runs)
        speed_up = fmean(result["full"]["seconds"] for result in results) / seconds
        figures[name] = {
            "seconds": seconds,
            "speed_up": speed_up,
            "seconds_to_target": None if None in to_target else fmean(to_target),
            "accuracy": fmean(run["accuracy"] for run in runs),
            "late": fmean(run["late"] for run in runs) if arm.has_late else None,
            "max_replica_distance": max(run["distance"] for run in runs),
        }
        rows.append(
            [
                arm.label,
                f"{seconds:.1f}",
                f"{speed_up:.2f}",
                "never" if None in to_target else f"{fmean(to_target):.1f}",
                f"{figures[name]['accuracy']:.1%}",
                f"{figures[name]['late']:.0%}" if arm.has_late else "",
                f"{figures[name]['max_replica_distance']:.1e}",
            ]
        )
    columns = ["policy", "time", "speed-up", f"to {TARGET:.0%}", "accuracy", "late", "distance"]
    harness.print_table(title, columns, rows)
    return figures


def show_rates(result: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print what each policy comes to with each learning rate."""
    rows = [[ARMS[name].label, *(f"{run['accuracy']:.1%}" for run in runs.values())] for name, runs in result.items()]
    harness.print_table("Accuracy by learning rate", ["policy", *map(str, RATES)], rows)


def main() -> None:
    harness.origin()  # before anything is measured
    parser = argparse.ArgumentParser(description="Train on sequences of very different lengths under each policy.")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default 4)")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs to average (default 1)")
    parser.add_argument("--epochs", type=int, default=5, help="of each rank, over its own share (default 5)")
    parser.add_argument("--mean-ms", type=float, default=25.0, help="time of a step of mean length (default 25)")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=harness.default_transport())
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "demo", help="folder (default build/demo)")
    parser.add_argument("--tune", action="store_true", help="only find the best learning rate of each policy")
    options = parser.parse_args()

    job = {"ranks": options.ranks, "transport": options.transport, "epochs": options.epochs, "mean_ms": options.mean_ms}
    if options.tune:
        show_rates(harness.launch(train_all, **job, seeds=[TUNING_SEED], rates=RATES)[0])
        return
    results = harness.launch(train_all, **job, seeds=list(range(options.seeds)), rates=None)
    title = (
        f"Sequences: {options.ranks} ranks over {options.transport}, {options.epochs} epochs, mean of "
        f"{options.seeds} seed(s), in seconds"
    )
    figures = show(results, title)

    training, _ = make(seed=0)
    batches = plan(training, options.ranks, options.epochs, seed=0)
    work = WorkOfBatches(training, batches, options.mean_ms / 1e3).by_step()
    limit = work.max(axis=1).sum() / work.sum(axis=0).max()
    print(f"The sleeps alone allow a speed-up of {limit:.2f}; what is above it is overhead that a policy saves.")
    harness.write_json(options.output / "sequence.json", {**figures, "speed_up_limit": limit})
    plots.accuracy(
        results[0],
        LABELS,
        options.output / "sequence_accuracy.png",
        title=f"Sequences of very different lengths, {options.ranks} ranks: the same work, done sooner",
        ylabel="held-out accuracy in %, mean of the ranks",
        lowest=0,
    )
    plots.lengths(training.lengths.numpy(), work * 1e3, options.output / "sequence_lengths.png")
    print(f"Figures and plots are in {options.output}")


if __name__ == "__main__":
    main()
