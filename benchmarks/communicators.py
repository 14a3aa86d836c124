"""By how much a process grows with each communicator of a group of ranks.

    .venv/bin/python benchmarks/communicators.py [--json FILE] [--transport gloo]

The ranks are divided into two groups, in another way in each round. Memory is what Linux says that is resident. A figure is
the growth in the first rounds, less that in as many rounds whose communicators are there already, on the rank where it is
largest.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import harness
import torch

import horovod_partial.torch as hvd

MOST = 128  # communicators that a rank keeps


def measure() -> tuple[float, int]:
    """On every rank: the bytes of a communicator, and how many were made."""
    partitions = min(2 ** (hvd.size() - 1), MOST) - 1
    average("one", 1, rounds=partitions)
    at_start = resident()
    average("all", partitions, rounds=partitions + 1)
    first = resident() - at_start
    average("all", partitions, rounds=partitions)
    again = resident() - at_start - first
    made = hvd.partial_stats()["all"]["groups_made"]
    return max(hvd.allgather_object(((first - again) / made, made)))


def average(name: str, partitions: int, rounds: int) -> None:
    """Average in groups that come again after so many rounds. All ranks wait for each other."""
    schedule = hvd.Schedule(lambda round, rank: (round + 1) >> (rank - 1) & 1 if rank else 0, partitions)
    policy = hvd.GroupAverage(schedule=schedule, period=None, max_staleness=0)
    for number in range(rounds):
        harness.progress(f"communicators, {name}", number, rounds)
        hvd.average(torch.zeros(1), policy, name)


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    options = harness.arguments(__doc__, ranks=8).parse_args()
    job: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport}
    size, made = harness.launch(measure, **job)
    harness.print_table(
        f"{made} communicators, {options.ranks} ranks over {options.transport}",
        ["", "bytes"],
        [["each", f"{size:.0f}"]],
    )
    harness.write_json(options.json, {**job, "made": made, "bytes": size})


if __name__ == "__main__":
    main()
