"""How long one tensor takes: when all ranks arrive together, and when each comes 5 ms after the one before.

    .venv/bin/python benchmarks/latency.py [--device cuda] [--json FILE] [--transport gloo]

Together: `Majority` against `hvd.allreduce`, turn about, each behind a barrier; medians of the mean over the ranks. Ours
are negotiated in every round, as Horovod's are without its response cache, so the ratio is to Horovod without it (both
in one job, as everywhere). A second job, with the cache, gives the milliseconds for default settings.

Skew: mean latency over ranks and rounds of 4 B, behind a barrier and a delay of rank times 5 ms; the policies take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import harness
import torch

import horovod_partial.torch as hvd

SIZES = (4, 64, 1_000, 16_000, 256_000, 1_000_000, 4_000_000, 25_000_000, 32_000_000)  # bytes
SKEW_BYTES, SKEW_SECONDS = 4, 5e-3
SKEWED = {"full": hvd.Full(), "solo": hvd.Solo(), "majority": hvd.Majority(), "random": hvd.Majority("random")}
WARM_UP = 10  # rounds

# At most so many rounds, and about so many bytes in them.
MOST_ROUNDS, BYTES_OF_ROUNDS = 400, 1_600_000_000
FEWEST_ROUNDS = 40


def together(rounds: int) -> dict[str, dict[str, float]]:
    """On every rank: median seconds of Horovod's allreduce and of ours, by size."""
    result = {}
    for index, size in enumerate(SIZES):
        harness.progress("latency, together", index, len(SIZES))
        tensor = torch.ones(size // 4)
        name = f"together.{size}"
        operations = {
            "horovod": partial(hvd.allreduce_, tensor, name=f"{name}.horovod"),
            "majority": partial(hvd.partial_allreduce_, tensor, name=name, sync=hvd.Majority()),
        }
        count = max(FEWEST_ROUNDS, min(rounds, BYTES_OF_ROUNDS // size))
        seconds = [take_turns(operations, index) for index in range(WARM_UP + count)][WARM_UP:]
        result[str(size)] = {
            operation: statistics.median(mean_over_ranks([turn[operation] for turn in seconds], f"{name}.{operation}"))
            for operation in operations
        }
    return result


def skew(rounds: int) -> dict[str, float]:
    """On every rank: mean seconds of a round under each policy, with every rank later than the one before."""
    delays = harness.LinearSkew(hvd.size(), SKEW_SECONDS)
    tensor = torch.ones(SKEW_BYTES // 4)
    operations = {
        name: partial(hvd.partial_allreduce_, tensor, name=f"skew.{name}", sync=policy)
        for name, policy in SKEWED.items()
    }
    seconds = []
    for index in range(WARM_UP + rounds):
        harness.progress("latency, skew", index, WARM_UP + rounds)
        seconds.append(take_turns(operations, index, delays))
    return {
        name: statistics.fmean(mean_over_ranks([turn[name] for turn in seconds[WARM_UP:]], f"skew.{name}.seconds"))
        for name in operations
    }


def take_turns(
    operations: Mapping[str, Callable[[], Any]], index: int, delays: harness.Delays | None = None
) -> dict[str, float]:
    """Time each operation once, in an order that changes with the index."""
    seconds = {}
    for name in sorted(operations, reverse=index % 2 == 1):
        hvd.barrier()
        if delays is not None:
            delays.serve(hvd.rank(), index)
        start = time.perf_counter()
        operations[name]()
        seconds[name] = time.perf_counter() - start
    return seconds


def mean_over_ranks(seconds: list[float], name: str) -> list[float]:
    return hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), name=name).tolist()


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="of the small sizes")
    parser.add_argument("--skew-ranks", type=int, default=8, help="processes to start for the skew")
    parser.add_argument("--skew-rounds", type=int, default=500, help="under skew")
    options = parser.parse_args()
    job = {"transport": options.transport, "device": options.device}

    both = {"ranks": options.ranks, "rounds": options.rounds}
    uncached = harness.launch(together, **job, **both, environment={"HOROVOD_CACHE_CAPACITY": "0"})
    default = harness.launch(together, **job, **both)
    skewed = harness.launch(skew, **job, ranks=options.skew_ranks, rounds=options.skew_rounds)

    ratios = {size: row["majority"] / row["horovod"] for size, row in uncached.items()}
    milliseconds = {
        size: {
            "majority_uncached": 1e3 * uncached[size]["majority"],
            "horovod_uncached": 1e3 * uncached[size]["horovod"],
            "majority": 1e3 * default[size]["majority"],
            "horovod": 1e3 * default[size]["horovod"],
        }
        for size in uncached
    }
    harness.print_table(
        f"One tensor, all together, {options.ranks} ranks over {options.transport}: milliseconds",
        ["bytes", "Majority, no cache", "Horovod, no cache", "ratio", "Majority", "Horovod", "ratio"],
        [
            [
                f"{int(size):,}",
                f"{row['majority_uncached']:.2f}",
                f"{row['horovod_uncached']:.2f}",
                f"{ratios[size]:.2f}",
                f"{row['majority']:.2f}",
                f"{row['horovod']:.2f}",
                f"{row['majority'] / row['horovod']:.2f}",
            ]
            for size, row in milliseconds.items()
        ],
    )
    harness.print_table(
        f"Skew of 5 ms a rank, {options.skew_ranks} ranks over {options.transport}, 4 B",
        ["policy", "mean ms", "Full over it"],
        [[name, f"{1e3 * mean:.2f}", f"{skewed['full'] / mean:.2f}"] for name, mean in skewed.items()],
    )
    harness.write_json(
        options.json,
        {
            **job,
            **both,
            "together": ratios,
            "together_milliseconds": milliseconds,
            "skew": {f"full_over_{name}": skewed["full"] / mean for name, mean in skewed.items() if name != "full"},
            "skew_milliseconds": {name: 1e3 * mean for name, mean in skewed.items()},
            "skew_ranks": options.skew_ranks,
            "skew_rounds": options.skew_rounds,
        },
    )


if __name__ == "__main__":
    main()
