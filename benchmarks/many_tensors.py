"""What a tensor costs when thousands are in flight: `hvd.partial_allreduce_async_` beside Horovod's `allreduce_async_`.

    .venv/bin/python benchmarks/many_tensors.py [--tensors 2000] [--json FILE] [--transport gloo]

All tensors are submitted, then all are waited for. Both operations take turns in one job, in one order and then in the other,
each behind a barrier. A figure is the median over the rounds of the mean over the ranks: until the last tensor has been
submitted, and until the last result is there. Every rank is on time (`Quorum(1.0)`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from harness import steps_torch

import horovod_partial.torch as hvd

WARM_UP = 3  # rounds
PARTS = ("submit", "whole")


def measure(tensors: int, elements: int, rounds: int) -> dict[str, dict[str, float]]:
    """On every rank: for each operation the median seconds until all are submitted, and until all results are there."""
    flat = torch.ones(tensors, elements)
    operations: dict[str, Callable[..., Any]] = {
        "horovod": partial(hvd.allreduce_async_, op=hvd.Sum),
        "partial": partial(hvd.partial_allreduce_async_, op=hvd.Sum, sync=hvd.Quorum(1.0)),
    }
    names = {operation: [f"{operation}.{index}" for index in range(tensors)] for operation in operations}
    seconds: dict[str, list[list[float]]] = {operation: [] for operation in operations}
    for index in range(WARM_UP + rounds):
        harness.progress("many tensors", index, WARM_UP + rounds)
        for operation in harness.in_turn(operations, index):
            flat.fill_(1.0)
            steps_torch.barrier()
            start = time.perf_counter()
            handles = [
                operations[operation](tensor, name=name) for tensor, name in zip(flat, names[operation], strict=True)
            ]
            submitted = time.perf_counter()
            for handle in handles:
                hvd.synchronize(handle)
            ended = time.perf_counter()
            assert bool((flat == hvd.size()).all())
            if index >= WARM_UP:
                seconds[operation].append([submitted - start, ended - start])
    means = {
        operation: steps_torch.mean_over_ranks(rows, f"seconds.{operation}") for operation, rows in seconds.items()
    }
    return {
        operation: {
            part: statistics.median(column) for part, column in zip(PARTS, zip(*rows, strict=True), strict=True)
        }
        for operation, rows in means.items()
    }


def main() -> None:
    parser = harness.arguments(__doc__, ranks=2)
    parser.add_argument("--tensors", type=int, default=2000, help="in flight at the same time")
    parser.add_argument("--elements", type=int, default=256, help="of each")
    parser.add_argument("--rounds", type=int, default=20, help="of each operation")
    options = parser.parse_args()
    job = {"ranks": options.ranks, "transport": options.transport}
    load = {"tensors": options.tensors, "elements": options.elements, "rounds": options.rounds}

    # Horovod's cache has room for all of them, so that it is in its best form.
    capacity = {"HOROVOD_CACHE_CAPACITY": str(2 * options.tensors + 1024)}
    measured = harness.launch(measure, **job, **load, environment=capacity)
    ratios = {part: measured["partial"][part] / measured["horovod"][part] for part in PARTS}
    harness.print_table(
        f"{options.tensors} tensors of {4 * options.elements} B on {options.ranks} ranks over {options.transport}",
        ["", "Horovod, ms", "partial, ms", "ratio"],
        [
            [part, *(f"{1e3 * measured[name][part]:.2f}" for name in ("horovod", "partial")), f"{ratios[part]:.2f}"]
            for part in PARTS
        ],
    )
    harness.write_json(options.json, {**job, **load, "seconds": measured, "ratio": ratios})


if __name__ == "__main__":
    main()
