"""How long one tensor takes: when all ranks arrive together, and when each comes 5 ms after the one before.

    .venv/bin/python benchmarks/latency.py [--device cuda] [--json FILE] [--transport gloo]

Together: `Majority` against `hvd.allreduce`, turn about, each behind a barrier; medians of the mean over the ranks. Ours
are negotiated in every round, as Horovod's are without its response cache, so the ratio is to Horovod without it (both
in one job, as everywhere). A second job, with the cache, gives the milliseconds for default settings. The figures are
written after each size and job.

Skew: mean latency over ranks and rounds of 4 B, behind a barrier and a delay of rank times 5 ms; the policies take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import steps_torch

import horovod_partial.torch as hvd

SIZES = (4, 64, 1_000, 16_000, 256_000, 1_000_000, 4_000_000, 25_000_000, 32_000_000)  # bytes
QUICK_SIZES = (4, 16_000, 1_000_000, 25_000_000)
QUICK_SECONDS = 1.0  # for a size
QUICK_SKEW_ROUNDS = 50
SKEW_BYTES, SKEW_SECONDS = 4, 5e-3
SKEWED = {"full": hvd.Full(), "solo": hvd.Solo(), "majority": hvd.Majority(), "random": hvd.Majority("random")}
WARM_UP = 10  # rounds under skew

# At most so many rounds, and about so many bytes in them.
MOST_ROUNDS, BYTES_OF_ROUNDS = 400, 1_600_000_000
FEWEST_ROUNDS = 40


def together(rounds: int, quick: bool) -> Iterator[dict[str, dict[str, float]]]:
    """On every rank: median seconds of Horovod's allreduce and of ours, by size."""
    result: dict[str, dict[str, float]] = {}
    for size in QUICK_SIZES if quick else SIZES:
        tensor = torch.ones(size // 4)
        name = f"together.{size}"
        operations = {
            "horovod": partial(hvd.allreduce_, tensor, name=f"{name}.horovod"),
            "majority": partial(hvd.partial_allreduce_, tensor, name=name, sync=hvd.Majority()),
        }
        measured = harness.alternate(
            f"latency, together, {size:,} B",
            operations,
            steps_torch,
            blocks=max(FEWEST_ROUNDS, min(rounds, BYTES_OF_ROUNDS // size)),
            block=1,
            seconds=QUICK_SECONDS if quick else None,
        )
        result[str(size)] = {operation: statistics.median(seconds) for operation, seconds in measured.items()}
        yield result


def skew(rounds: int) -> dict[str, float]:
    """On every rank: mean seconds of a round under each policy, with every rank later than the one before."""
    delays = harness.LinearSkew(hvd.size(), SKEW_SECONDS)
    tensor = torch.ones(SKEW_BYTES // 4)
    turns = []
    for index in range(WARM_UP + rounds):
        harness.progress("latency, skew", index, WARM_UP + rounds)
        turns.append(turn_under_skew("skew", tensor, delays, index))
    return means_of_turns(turns[WARM_UP:], "skew.seconds")


def turn_under_skew(prefix: str, tensor: torch.Tensor, delays: harness.Delays, index: int) -> dict[str, float]:
    """On every rank: the seconds of a round under each policy, behind a barrier and a delay. Buckets are `prefix.policy`."""
    seconds = {}
    for name in harness.in_turn(SKEWED, index):
        steps_torch.barrier()
        delays.serve(hvd.rank(), index)
        start = time.perf_counter()
        hvd.partial_allreduce_(tensor, name=f"{prefix}.{name}", sync=SKEWED[name])
        seconds[name] = time.perf_counter() - start
    return seconds


def means_of_turns(turns: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    """On every rank: means over the turns and the ranks, by policy."""
    means = steps_torch.mean_over_ranks([[turn[policy] for turn in turns] for policy in SKEWED], name)
    return {policy: statistics.fmean(row) for policy, row in zip(SKEWED, means, strict=True)}


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="of the small sizes")
    parser.add_argument("--skew-ranks", type=int, default=8, help="processes to start for the skew")
    parser.add_argument("--skew-rounds", type=int, default=500, help="under skew")
    options = parser.parse_args()
    job = {"transport": options.transport, "device": options.device}
    both = {"ranks": options.ranks, "rounds": options.rounds}
    figures: dict[str, Any] = {**job, **both, "quick": options.quick, "together": {}, "together_milliseconds": {}}

    def keep(suffix: str, seconds: dict[str, dict[str, float]]) -> None:
        for size, row in seconds.items():
            milliseconds = figures["together_milliseconds"].setdefault(size, {})
            milliseconds |= {f"{operation}{suffix}": 1e3 * value for operation, value in row.items()}
            if suffix:
                figures["together"][size] = row["majority"] / row["horovod"]
        harness.write_json(options.json, figures)

    for suffix, environment in (("_uncached", {"HOROVOD_CACHE_CAPACITY": "0"}), ("", {})):
        harness.launch(
            together,
            **job,
            **both,
            on_result=partial(keep, suffix),
            environment=environment,
            quick=options.quick,
        )
    rounds = min(options.skew_rounds, QUICK_SKEW_ROUNDS) if options.quick else options.skew_rounds
    skewed = harness.launch(skew, **job, ranks=options.skew_ranks, rounds=rounds)
    figures["skew"] = {f"full_over_{name}": skewed["full"] / mean for name, mean in skewed.items() if name != "full"}
    figures["skew_milliseconds"] = {name: 1e3 * mean for name, mean in skewed.items()}
    figures |= {"skew_ranks": options.skew_ranks, "skew_rounds": rounds}
    harness.write_json(options.json, figures)

    harness.print_table(
        f"One tensor, all together, {options.ranks} ranks over {options.transport}: milliseconds",
        ["bytes", "Majority, no cache", "Horovod, no cache", "ratio", "Majority", "Horovod", "ratio"],
        [
            [
                f"{int(size):,}",
                f"{row['majority_uncached']:.2f}",
                f"{row['horovod_uncached']:.2f}",
                f"{figures['together'][size]:.2f}",
                f"{row['majority']:.2f}",
                f"{row['horovod']:.2f}",
                f"{row['majority'] / row['horovod']:.2f}",
            ]
            for size, row in figures["together_milliseconds"].items()
        ],
    )
    harness.print_table(
        f"Skew of 5 ms a rank, {options.skew_ranks} ranks over {options.transport}, 4 B",
        ["policy", "mean ms", "Full over it"],
        [[name, f"{1e3 * mean:.2f}", f"{skewed['full'] / mean:.2f}"] for name, mean in skewed.items()],
    )


if __name__ == "__main__":
    main()
