"""The main job: handwritten digits, learnt by ranks that take turns at being slow.

    .venv/bin/python examples/torch/digits.py [--seeds 5] [--transport gloo]

Starts 4 ranks, which train a small network on scikit-learn's digits under each policy. A step takes a rank a quarter,
half, once or 2.25 times the mean (a sleep stands for that much work), and the ranks take turns. Under every policy a rank
takes the same number of steps of its own, so every policy works through the same number of gradients. The clock stops
when the last rank has flushed. Accuracy is that of the replicas on the test set, after the flush, averaged over ranks.

Prints a table and writes `digits.json`, `accuracy.png` and `arrivals.png` into `build/demo`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import horovod_partial.torch as hvd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness
import plots

ARMS: dict[str, dict[str, Any]] = {
    "full": {"sync": "full"},
    "solo": {"sync": "solo"},
    "majority": {"sync": "majority"},
    "solo_latest": {"sync": "solo", "missed": "latest"},  # the paper's own: a late rank gets the newest result only
}
LABELS = {"full": "Full", "solo": "Solo", "majority": "Majority", "solo_latest": "Solo (latest)"}
MULTIPLES = (0.25, 0.5, 1.0, 2.25)
BATCH = 16
SNAPSHOT_EVERY = 10  # steps
SHOWN_STEPS = 16  # in the plot of arrivals


def train_all(seeds: int, steps: int, mean_ms: float) -> list[dict[str, dict[str, Any]]]:
    """On every rank: train under each policy, from each seed. Returns the figures by seed and policy."""
    delays = harness.Rotating(MULTIPLES, mean_ms / 1e3)
    results: list[dict[str, dict[str, Any]]] = []
    for seed in range(seeds):
        results.append({})
        for name, options in ARMS.items():
            stage = f"{LABELS[name]}, seed {seed}"
            results[-1][name] = train(stage, options, seed, steps, delays)
    return results


def train(stage: str, options: dict[str, Any], seed: int, steps: int, delays: harness.Delays) -> dict[str, Any]:
    """Train under one policy. Returns its figures, and when what happened, in seconds from the start."""
    rank, size = hvd.rank(), hvd.size()
    images, labels, test_images, test_labels = load(seed)
    images, labels = images[rank::size], labels[rank::size]
    generator = torch.Generator().manual_seed(seed * size + rank)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    buckets_before = set(hvd.partial_stats())
    snapshots, computing, waiting = [], [], []

    hvd.barrier()
    start = time.perf_counter()
    for step in range(steps):
        harness.progress(stage, step, steps)
        begin = time.perf_counter()
        if step % SNAPSHOT_EVERY == 0:
            snapshots.append((begin - start, parameters_to_vector(model.parameters()).detach()))
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        delays.serve(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        arrival = time.perf_counter()
        optimizer.step()
        schedule.step()
        computing.append((begin - start, arrival - begin))
        waiting.append((arrival - start, time.perf_counter() - arrival))
    optimizer.flush()
    seconds = time.perf_counter() - start
    snapshots.append((seconds, parameters_to_vector(model.parameters()).detach()))

    def accuracy(vector: torch.Tensor) -> float:
        vector_to_parameters(vector, model.parameters())
        with torch.no_grad():
            return (model(test_images).argmax(1) == test_labels).float().mean().item()

    replicas = hvd.allgather(snapshots[-1][1][None], name="replicas")
    stats = [bucket for name, bucket in hvd.partial_stats().items() if name not in buckets_before]
    # A step is on time if all its buckets are; the network is so small that there is but one.
    on_time = [min(bucket["on_time"][r] for bucket in stats) if stats else steps for r in range(size)]
    staleness = stats[0]["staleness_histogram"] if stats else {0: steps * size}
    return {
        "seconds": max(hvd.allgather_object(seconds)),
        "accuracy": fmean(accuracy(replica) for replica in replicas),
        "late_by_rank": [steps - count for count in on_time],
        "staleness": [[rounds, count] for rounds, count in staleness.items()],
        "distance": (torch.cdist(replicas, replicas).max() / replicas.mean(0).norm()).item(),
        "curve": [(when, accuracy(vector)) for when, vector in snapshots],
        "computing": hvd.allgather_object(computing[:SHOWN_STEPS]),
        "waiting": hvd.allgather_object(waiting[:SHOWN_STEPS]),
    }


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train and to test with: 1,347 and 450, shared out by the seed."""
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16, labels, random_state=seed, stratify=labels)
    return (
        torch.tensor(images, dtype=torch.float32),
        torch.tensor(labels),
        torch.tensor(test_images, dtype=torch.float32),
        torch.tensor(test_labels),
    )


def show(results: Sequence[dict[str, dict[str, Any]]], steps: int, title: str) -> dict[str, dict[str, float]]:
    """Print the table of means over the seeds. Returns the figures for the JSON file."""
    figures, rows = {}, []
    for name in ARMS:
        runs = [result[name] for result in results]
        late = round(fmean(sum(run["late_by_rank"]) for run in runs))
        figures[name] = {
            "seconds": fmean(run["seconds"] for run in runs),
            "accuracy": fmean(run["accuracy"] for run in runs),
            "late_steps": late,
            "max_replica_distance": max(run["distance"] for run in runs),
        }
        staleness = [(rounds, count) for run in runs for rounds, count in run["staleness"]]
        mean_staleness = sum(r * count for r, count in staleness) / sum(count for _, count in staleness)
        rows.append(
            [
                LABELS[name],
                f"{figures[name]['seconds']:.1f}",
                f"{figures['full']['seconds'] / figures[name]['seconds']:.2f}",
                f"{figures[name]['accuracy']:.2%}",
                f"{late / (steps * len(MULTIPLES)):.0%}",
                f"{mean_staleness:.2f} ({max(rounds for rounds, _ in staleness)})",
                f"{figures[name]['max_replica_distance']:.1e}",
            ]
        )
    columns = ["policy", "seconds", "speed-up", "accuracy", "late", "staleness (max)", "distance"]
    harness.print_table(title, columns, rows)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits under each policy, with ranks that are slow in turn.")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs to average (default 1)")
    parser.add_argument("--steps", type=int, default=300, help="of each rank (default 300)")
    parser.add_argument("--mean-ms", type=float, default=30.0, help="mean time of a step (default 30)")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=harness.default_transport())
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "demo", help="folder (default build/demo)")
    options = parser.parse_args()

    ranks = len(MULTIPLES)
    results = harness.launch(
        train_all,
        ranks=ranks,
        transport=options.transport,
        seeds=options.seeds,
        steps=options.steps,
        mean_ms=options.mean_ms,
    )
    title = (
        f"Digits: {ranks} ranks over {options.transport}, {options.steps} steps each, mean of {options.seeds} seed(s)"
    )
    harness.write_json(options.output / "digits.json", show(results, options.steps, title))
    plots.accuracy(
        results[0],
        LABELS,
        options.output / "accuracy.png",
        title=f"Digits, {ranks} ranks that are slow in turn: the same work, done sooner",
        ylabel="test accuracy of rank 0 in %",
        lowest=70,
    )
    plots.arrivals(results[0], LABELS, options.steps, options.output / "arrivals.png")
    print(f"Figures and plots are in {options.output}")


if __name__ == "__main__":
    main()
