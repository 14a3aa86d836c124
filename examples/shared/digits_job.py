"""What the digits job is in every framework: data, delays, policies, what a rank notes, table, JSON file and plots."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import harness
import numpy as np
import plots
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

ARMS: dict[str, dict[str, Any]] = {
    "full": {"sync": "full"},
    "solo": {"sync": "solo"},
    "majority": {"sync": "majority"},
    "solo_latest": {"sync": "solo:missed=latest"},  # the paper's own: a late rank gets the newest result only
}
PASSES = 4  # micro-batches that a rank's step is split into where work is shared
SHARING_ARM = {"work_sharing": {"sync": "work_sharing", "backward_passes_per_step": PASSES}}  # in PyTorch
LABELS = {
    "full": "Full",
    "work_sharing": "WorkSharing",
    "solo": "Solo",
    "majority": "Majority",
    "solo_latest": "Solo (latest)",
}
MULTIPLES = (0.25, 0.5, 1.0, 2.25)
BATCH = 16
LEARNING_RATE = 0.1  # of SGD with momentum, at the start of its cosine schedule
MOMENTUM = 0.9
SNAPSHOT_EVERY = 10  # steps
SHOWN_STEPS = 16  # in the plot of arrivals

Run = dict[str, Any]  # what one training gives
Train = Callable[[str, dict[str, Any], int, int, harness.Delays, float | None], Run]


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train and to test with: 1,347 and 450, shared out by the seed."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    images, test_images, labels, test_labels = train_test_split(images, labels, random_state=seed, stratify=labels)
    return images, labels, test_images, test_labels


class Notes:
    """What one rank notes while it trains: what it did when, in seconds from the start, and its model now and then.

    Args:
        hvd: `horovod_partial.torch` or `horovod_partial.keras`.
        weights: a copy of the model's weights, as one vector.
        shares_work: a rank without a part in a round is not late: others have done its work.
    """

    def __init__(self, hvd: ModuleType, weights: Callable[[], np.ndarray], *, shares_work: bool = False) -> None:
        self._hvd = hvd
        self._shares_work = shares_work
        self._weights = weights
        self._buckets_before = set(hvd.partial_stats())
        self._snapshots: list[tuple[float, np.ndarray]] = []
        self._snapshot_at = -1
        self._computing: list[tuple[float, float]] = []  # each time: when, and for how long
        self._waiting: list[tuple[float, float]] = []  # each time: when, and for how long

    def start(self) -> None:
        """The clock starts."""
        self._start = time.perf_counter()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._begin = time.perf_counter()
        if step % SNAPSHOT_EVERY == 0 and step > self._snapshot_at:
            self._snapshot_at = step
            self._snapshots.append((self._begin - self._start, self._weights()))

    def arrive(self) -> None:
        """The step is computed."""
        self._arrival = time.perf_counter()

    def end(self) -> None:
        """The step's result has been applied."""
        self._computing.append((self._begin - self._start, self._arrival - self._begin))
        self._waiting.append((self._arrival - self._start, time.perf_counter() - self._arrival))

    def finish(self) -> None:
        """The clock stops: everything has been flushed."""
        self._snapshots.append((time.perf_counter() - self._start, self._weights()))

    def run(self, steps: int, accuracy: Callable[[np.ndarray], float]) -> Run:
        """The figures of this training, on every rank; `accuracy` is a replica's, on the test set."""
        gather = self._hvd.allgather_object
        size = self._hvd.size()
        seconds, final = self._snapshots[-1]
        shown = SHOWN_STEPS * (PASSES if self._shares_work else 1)
        replicas = np.array(gather(final), dtype=float)
        stats = [bucket for name, bucket in self._hvd.partial_stats().items() if name not in self._buckets_before]
        # A step is on time if all its buckets are; the network is so small that there is but one.
        counts = [min(bucket["on_time"][r] for bucket in stats) if stats else steps for r in range(size)]
        on_time = [steps] * size if self._shares_work else counts
        staleness = stats[0]["staleness_histogram"] if stats and not self._shares_work else {0: steps * size}
        return {
            "seconds": max(gather(seconds)),
            "accuracy": fmean(accuracy(replica) for replica in replicas),
            "late_by_rank": [steps - count for count in on_time],
            "staleness": [[rounds, count] for rounds, count in staleness.items()],
            "distance": float(
                max(np.linalg.norm(one - other) for one in replicas for other in replicas)
                / np.linalg.norm(replicas.mean(0))
            ),
            "curve": [(when, accuracy(weights)) for when, weights in self._snapshots],
            "computing": gather(self._computing[:shown]),
            "waiting": gather(self._waiting[:shown]),
        }


def train_all(
    train: Train, seeds: int, steps: int, mean_ms: float, adam: float | None, arms: dict[str, dict[str, Any]] = ARMS
) -> list[dict[str, Run]]:
    """On every rank: train under each policy, from each seed. Returns the figures by seed and policy."""
    delays = harness.Rotating(MULTIPLES, mean_ms / 1e3)
    results: list[dict[str, Run]] = []
    for seed in range(seeds):
        results.append({})
        for name, options in arms.items():
            stage = f"{LABELS[name]}, seed {seed}"
            results[-1][name] = train(stage, options, seed, steps, delays, adam)
    return results


def show(results: Sequence[dict[str, Run]], steps: int, title: str) -> dict[str, dict[str, Any]]:
    """Print the table of means over the seeds. Returns the figures for the JSON file."""
    figures, rows = {}, []
    for name in results[0]:
        runs = [result[name] for result in results]
        late = round(fmean(sum(run["late_by_rank"]) for run in runs))
        figures[name] = {
            "seconds": fmean(run["seconds"] for run in runs),
            "accuracy": fmean(run["accuracy"] for run in runs),
            "late_steps": late,
            "max_replica_distance": max(run["distance"] for run in runs),
            "seconds_by_seed": [run["seconds"] for run in runs],
            "accuracy_by_seed": [run["accuracy"] for run in runs],
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


def main(
    train_all: Callable[..., Any], *, output: Path, framework: harness.Framework = "torch", label: str = "Digits"
) -> None:
    """The program: reads the command line, starts the ranks, and reports.

    Args:
        train_all: the function above, bound to a script's own `train`; at the top level of that script.
        output: the default folder for figures and plots, in that of the project.
        framework: whose Horovod the ranks use.
        label: what titles begin with.
    """
    harness.origin()  # before anything is measured
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Train on digits under each policy, with ranks that are slow in turn.")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs to average (default 1)")
    parser.add_argument("--steps", type=int, default=300, help="of each rank (default 300)")
    parser.add_argument("--mean-ms", type=float, default=30.0, help="mean time of a step (default 30)")
    parser.add_argument("--adam", type=float, metavar="RATE", help="train with Adam, in place of SGD with momentum")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=harness.default_transport())
    parser.add_argument("--output", type=Path, default=root / output, help=f"folder (default {output})")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file of the figures (default digits.json in that folder)"
    )
    options = parser.parse_args()

    ranks = len(MULTIPLES)
    results = harness.launch(
        train_all,
        ranks=ranks,
        transport=options.transport,
        framework=framework,
        seeds=options.seeds,
        steps=options.steps,
        mean_ms=options.mean_ms,
        adam=options.adam,
    )
    title = (
        f"{label}: {ranks} ranks over {options.transport}, {options.steps} steps each, mean of {options.seeds} seed(s)"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    harness.write_json(options.json or options.output / "digits.json", show(results, options.steps, title))
    plots.accuracy(
        results[0],
        LABELS,
        options.output / "accuracy.png",
        title=f"{label}, {ranks} ranks that are slow in turn: the same work, done sooner",
        ylabel="test accuracy of rank 0 in %",
        lowest=70,
    )
    plots.arrivals(results[0], LABELS, options.steps, options.output / "arrivals.png")
    print(f"Figures and plots are in {options.output}")
