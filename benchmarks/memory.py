"""How much more memory than Horovod's optimizer ours hold, for ResNet-50's parameters.

    .venv/bin/python benchmarks/memory.py [--json FILE] [--transport gloo]

Counts the storages of all tensors that are alive, and what the core holds of results and contributions, at three points
of each step: before backward, after it, and after the step. A figure is the largest excess over Horovod's optimizer at
the same point, on the rank that holds most, in gradients' worths: of `Full`; of `Quorum(1.0)`, under which every rank is
always on time, with gradients set to None after a step and with gradients zeroed in place, which then are views of the
buckets; of `Majority` and `Solo` with ranks that are late; and of `Solo` on a rank that is away until the others wait for it.
"""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import harness
import horovod.torch
import torch
from harness import shapes

import horovod_partial.torch as hvd

ARMS: dict[str, dict[str, Any]] = {
    "horovod": {"sync": None},
    "full": {"sync": "full"},
    "on_time": {"sync": "quorum:1.0"},
    "horovod_views": {"sync": None, "set_to_none": False},
    "on_time_views": {"sync": "quorum:1.0", "set_to_none": False},
    "majority": {"sync": "majority", "late": True},
    "solo": {"sync": "solo", "late": True},
    "limit": {"sync": "solo", "away": True},
}
ROWS = {
    "Full": "full",
    "all on time": "on_time",
    "all on time, gradients zeroed in place": "on_time_views",
    "Majority, some late": "majority",
    "Solo, some late": "solo",
    "Solo, one away until the others wait for it": "limit",
}
STEPS = 6
REPLAY_LIMIT = hvd.Solo().replay_limit
LATE_SECONDS = 1.0  # longer than a reduction takes


def measure() -> dict[str, list[int]]:
    """On every rank: for each arm the most bytes held on a rank, at each point of a step."""
    return {name: measure_arm(name, **options) for name, options in ARMS.items()}


def measure_arm(
    name: str, sync: str | None, set_to_none: bool = True, late: bool = False, away: bool = False
) -> list[int]:
    """Take some steps with Horovod's own optimizer, or with ours if `sync` names a policy."""
    gc.collect()
    at_start = bytes_held([])
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.resnet50()]
    named = [(f"{name}.{index}", parameter) for index, parameter in enumerate(parameters)]
    base = torch.optim.SGD(parameters, lr=1e-3)
    if sync is None:
        optimizer = horovod.torch.DistributedOptimizer(base, named)
    else:
        optimizer = hvd.DistributedOptimizer(base, named, sync=sync)
    delays = harness.RandomVictims(hvd.size(), hvd.size() // 2 if late else 0, LATE_SECONDS)
    steps = []
    for step in range(0 if away else STEPS):
        harness.progress(f"memory, {name}", step, STEPS)
        delays.serve(hvd.rank(), step)
        steps.append([held - at_start for held in take_step(optimizer, parameters, set_to_none)])
    if away:
        harness.progress(f"memory, {name}", 0, 1)
        take_step(optimizer, parameters, set_to_none)
        if hvd.rank() == hvd.size() - 1:
            while max(bucket["missed_rounds"] for bucket in hvd.partial_stats().values()) < REPLAY_LIMIT:
                time.sleep(0.1)
        else:
            for _ in range(REPLAY_LIMIT + 1):
                take_step(optimizer, parameters, set_to_none)
        steps.append([bytes_held(parameters) - at_start] * 3)
    if sync is not None:
        optimizer.flush()
    everybodys = [point for steps in hvd.allgather_object(steps) for point in steps]
    return [max(column) for column in zip(*everybodys, strict=True)]


def take_step(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], set_to_none: bool
) -> tuple[int, int, int]:
    """Take a step; returns the bytes held before backward, after it, and at the end."""
    # Not by the optimizer's own, which in Horovod takes no argument.
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()
    loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
    before = bytes_held(parameters)
    loss.backward()
    after = bytes_held(parameters)
    optimizer.step()
    return before, after, bytes_held(parameters)


def bytes_held(parameters: list[torch.nn.Parameter]) -> int:
    """Bytes of all tensors that are alive, and of the core's buffers."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) + sum(bucket["bytes_held"] for bucket in hvd.partial_stats().values())


def main() -> None:
    options = harness.arguments(__doc__, ranks=4).parse_args()
    job = {"ranks": options.ranks, "transport": options.transport}
    gradient_bytes = 4 * sum(math.prod(shape) for shape in shapes.resnet50())

    held = harness.launch(measure, **job)
    figures: dict[str, Any] = {**job, "gradient_bytes": gradient_bytes}
    for name in ROWS.values():
        reference = held["horovod_views" if name.endswith("views") else "horovod"]
        figures[name] = max(ours - theirs for ours, theirs in zip(held[name], reference, strict=True)) / gradient_bytes
    harness.print_table(
        f"Memory over Horovod's, {options.ranks} ranks over {options.transport}",
        ["", f"gradients' worths of {gradient_bytes / 1e6:.0f} MB"],
        [[title, f"{figures[name]:.2f}"] for title, name in ROWS.items()],
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
