"""Does an outer momentum help? Policies of models with and without `hvd.SlowMomentum`, on sequences of natural lengths.

    .venv/bin/python benchmarks/slow_momentum.py [--seeds 5] [--json FILE]

The training is that of examples/torch/sequence.py: momentum of 0.9 on each rank, and a cosine. Each arm has the best of the
same learning rates, found with a seed that is used for nothing else. SlowMo (Wang et al., ICLR 2020) has a beta of 0.4 to
0.8 in its experiments. `against none` is the mean over the seeds of the difference to the same policy without it.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import harness

import horovod_partial.torch as hvd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "torch"), str(ROOT / "examples" / "shared")]

import sequence

BETAS = (None, 0.4, 0.7)
Key = tuple[str, float | None]  # an arm: policy and beta


def policy_of(name: str, beta: float | None) -> Any:
    momentum = None if beta is None else hvd.SlowMomentum(beta)
    if name == "GroupAverage(2)":
        return hvd.GroupAverage(2, slow_momentum=momentum)
    return hvd.WeightedAverage(8, 0.98, slow_momentum=momentum)


ARMS: list[Key] = [(name, beta) for name in ("GroupAverage(2)", "WeightedAverage(8)") for beta in BETAS]


def train_all(seeds: int, epochs: int, mean_ms: float) -> list[tuple[float, list[float]]]:
    """On every rank: tune and train. Returns the rate of each of ARMS, and its accuracies by seed."""
    rank, size = hvd.rank(), hvd.size()

    def accuracy(key: Key, rate: float, seed: int) -> float:
        training, held_out = sequence.make(seed)
        batches = sequence.plan(training, size, epochs, seed)
        delays = sequence.WorkOfBatches(training, batches, mean_ms / 1e3)
        arm = sequence.Arm(policy_of(*key), rate, f"{key[0]}, beta {key[1]}, rate {rate:g}", has_late=False)
        run = sequence.train(
            f"{arm.label}, seed {seed}", arm, rate, seed, training.share(rank, size), held_out, batches[rank], delays
        )
        return float(run["accuracy"])

    tuned = {
        key: max(sequence.RATES, key=lambda rate, key=key: accuracy(key, rate, sequence.TUNING_SEED)) for key in ARMS
    }
    found: dict[Key, list[float]] = {key: [] for key in ARMS}
    for seed in range(seeds):
        for key in ARMS:
            found[key].append(accuracy(key, tuned[key], seed))
    return [(tuned[key], found[key]) for key in ARMS]


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm at its best rate")
    parser.add_argument("--epochs", type=int, default=5, help="of each rank, over its own share")
    parser.add_argument("--mean-ms", type=float, default=8.0, help="time of a step of mean length")
    options = parser.parse_args()
    trained = harness.launch(
        train_all,
        ranks=options.ranks,
        transport=options.transport,
        timeout=1800,
        seeds=options.seeds,
        epochs=options.epochs,
        mean_ms=options.mean_ms,
    )
    arms = dict(zip(ARMS, trained, strict=True))
    rows = []
    figures = []
    for (name, beta), (rate, accuracies) in arms.items():
        plain = arms[name, None][1]
        deviation = harness.deviation(accuracies)
        difference = statistics.fmean(ours - theirs for ours, theirs in zip(accuracies, plain, strict=True))
        mean = statistics.fmean(accuracies)
        figures.append({"policy": name, "beta": beta, "rate": rate, "accuracies": accuracies})
        rows.append(
            [
                name,
                "none" if beta is None else f"{beta:g}",
                f"{rate:g}",
                f"{mean:.1%} ± {deviation:.1%}",
                "" if beta is None else f"{100 * difference:+.2f}",
            ]
        )
    harness.print_table(
        f"Slow momentum: {options.ranks} ranks over {options.transport}, {options.epochs} epochs, {options.seeds} seeds",
        ["policy", "beta", "rate", "accuracy", "against none, points"],
        rows,
    )
    harness.write_json(options.json, {"arms": figures})


if __name__ == "__main__":
    main()
