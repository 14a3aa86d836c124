"""`hvd.Auto` against static policies: seconds until the digits are recognised, in ten scenarios of slow ranks.

    .venv/bin/python benchmarks/auto.py [--seeds 3] [--scenarios "one always" bursts] [--base 0.03] [--json FILE]

8 ranks train a small network on scikit-learn's digits; a step is a sleep (harness/scenarios.py) and the work itself. Rank 2, which no
scenario singles out, tests its model every few steps; the time is from a barrier until it recognises 95 % of the images that
are held out. The learning rate is one at which `Full()` needs 600 rounds or more. The seed draws delays, batches and the
first model, alike for each policy of a row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import scenarios

TESTER = 2
TEST_EVERY = 5  # steps
TARGET = 0.95
LEARNING_RATE = 0.05
BATCH = 16
MOST_STEPS = 3000
STATIC = ("full", "quorum:0.75", "majority", "solo")


def measure(folder: str, names: list[str], policies: list[str], seeds: list[int], base: float) -> dict[str, Any]:
    """On every rank: by scenario, seed and policy the seconds to the target, the tester's steps, and the late share."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import horovod_partial.torch as hvd

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])

    def train(seconds: Any, policy: str, seed: int, over: Path) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model.named_parameters(), sync=policy
        )
        batches = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        buckets = set(hvd.partial_stats())
        reached, steps = float("inf"), 0
        hvd.barrier()
        start = time.perf_counter()
        while steps < MOST_STEPS and (policy == "full" or not over.exists()):
            time.sleep(seconds[steps % len(seconds)])
            rows = torch.randint(len(train_images), (BATCH,), generator=batches)
            wrapped.zero_grad()
            torch.nn.functional.cross_entropy(model(train_images[rows]), train_labels[rows]).backward()
            wrapped.step()
            steps += 1
            if hvd.rank() == TESTER and steps % TEST_EVERY == 0:
                with torch.no_grad():
                    right = (model(test_images).argmax(1) == test_labels).float().mean().item()
                if right >= TARGET:
                    reached = time.perf_counter() - start
                    over.touch()
            if policy == "full" and steps % TEST_EVERY == 0:  # all ranks end in the same step
                is_over = hvd.allreduce(torch.tensor(float(over.exists())), name="over", op=hvd.Max)
                if is_over.item():
                    break
        # Before ranks end, each in a step of its own, where gradients are late by nobody's delay.
        stats = [of for name, of in hvd.partial_stats().items() if name not in buckets]
        wrapped.flush()
        of_tester = hvd.broadcast(torch.tensor([reached, float(steps)], dtype=torch.float64), root_rank=TESTER)
        late = sum(sum(of["late"]) for of in stats)
        arrivals = sum(sum(of["late"]) + sum(of["on_time"]) for of in stats)
        return {
            "seconds": of_tester[0].item(),
            "steps": int(of_tester[1].item()),
            "late": late / max(arrivals, 1),
            "quorums": [change for of in stats for change in of.get("quorum_changes", ())],
        }

    found: dict[str, Any] = {}
    runs = [(name, seed, policy) for name in names for seed in seeds for policy in policies]
    for number, (name, seed, policy) in enumerate(runs):
        harness.progress("auto", number, len(runs))
        drawn = scenarios.draw(name, steps=600, ranks=hvd.size(), base=base, seed=seed)[:, hvd.rank()].tolist()
        over = Path(folder) / f"over-{number}"
        found.setdefault(name, {}).setdefault(str(seed), {})[policy] = train(drawn, policy, seed, over)
    return found


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--seeds", type=int, default=1, help="how many; no tuning has seen those from 100 on")
    parser.add_argument("--first-seed", type=int, default=100, help="the first of them")
    parser.add_argument("--base", type=float, default=0.03, help="seconds of a step that is not slow")
    parser.add_argument("--scenarios", nargs="*", default=list(scenarios.SCENARIOS), help="by name")
    options = parser.parse_args()
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    with tempfile.TemporaryDirectory(prefix="auto-") as folder:
        measured = harness.launch(
            measure,
            ranks=options.ranks,
            transport=options.transport,
            timeout=6 * 3600.0,
            asleep=True,
            folder=folder,
            names=options.scenarios,
            policies=["auto", *STATIC],
            seeds=seeds,
            base=options.base,
        )
    rows = []
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport, "runs": measured, "ratios": {}}
    for name, by_seed in measured.items():
        medians = {
            policy: statistics.median(run[policy]["seconds"] for run in by_seed.values())
            for policy in ("auto", *STATIC)
        }
        best = min(STATIC, key=lambda policy: medians[policy])
        ratio = statistics.median(run["auto"]["seconds"] / run[best]["seconds"] for run in by_seed.values())
        figures["ratios"][name] = ratio
        told = [f"{medians[policy]:.1f}" for policy in ("auto", *STATIC)]
        late = statistics.fmean(run["auto"]["late"] for run in by_seed.values())
        steps = statistics.median(run["full"]["steps"] for run in by_seed.values())
        rows.append([name, *told, best, f"{ratio:.2f}", f"{late:.1%}", f"{steps:.0f}"])
    harness.print_table(
        f"Seconds to {TARGET:.0%} of the digits, medians of {len(seeds)} seeds; {options.ranks} ranks over {options.transport}",
        ["scenario", "auto", *STATIC, "best", "auto over best", "late under auto", "rounds of full"],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
