"""Real training on a GPU: images or tokens a second, under Horovod's optimizer and under ours, when one rank is slowed.

    .venv/bin/python benchmarks/gpu_training.py [--model transformer] [--device cpu --smoke] [--json FILE]

ResNet-50 on images of 224 x 224, or a Transformer of 98 million parameters, in single precision (TF32) on random data. All
ranks share the GPU. Each arm has a model of its own; the arms take turns in blocks of a few steps, in balanced orders, each
behind a barrier: first with nobody slow, then with the last rank asleep for --delay-ms in each step. A figure is the median
over the blocks of what all ranks get through in a second; where Horovod's two arms differ by more than 2 % with nobody slow,
the ratios mean nothing.

Memory, on a GPU only, is measured in a second job, in which one arm trains after the other, with the last rank slowed. It is
what an arm needs beside what was in use before it: the most that PyTorch allocated on a rank, and what was in use on the
whole device after the steps. The latter counts all ranks, and memory that is not PyTorch's. Solo keeps the same buffers as
Majority, and they would come out of memory that Majority has left in our pool, so it is not measured.

The figures are written after each setting and each arm.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from harness import networks, steps_torch
from harness.device import finish
from harness.steps_torch import OPTIMIZERS, barrier

import horovod_partial.torch as hvd

ARMS = ("horovod", "horovod_again", "full", "majority", "solo")
MEMORY_ARMS = ("horovod_again", "horovod", "full", "majority")  # the first one pays for what all need, and is not shown
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
SETTINGS = ("even", "slowed")
QUICK_SECONDS = 8.0  # for a setting


def throughput(
    model: str, smoke: bool, blocks: int, block: int, delay_ms: float, seconds: float | None
) -> Iterator[dict[str, dict[str, list[float]]]]:
    """On every rank: for each setting and arm, what all ranks got through in a second, in each block."""
    workload = workload_of(model, smoke)
    arms = {arm: make_step(arm, workload) for arm in ARMS}
    rates: dict[str, dict[str, list[float]]] = {}
    for setting in SETTINGS:
        delay = slowed(delay_ms if setting == "slowed" else 0.0)
        measured = harness.alternate(
            f"{model}, {setting}",
            arms,
            steps_torch,
            blocks=blocks,
            block=block,
            seconds=seconds,
            before_step=lambda number, delay=delay: delay.serve(hvd.rank(), number),
        )
        units = hvd.size() * workload.units
        rates[setting] = {arm: [units / step for step in steps] for arm, steps in measured.items()}
        yield rates


def memory(model: str, smoke: bool, steps: int, delay_ms: float) -> Iterator[dict[str, dict[str, float]]]:
    """On every rank: MiB that each arm needs."""
    workload = workload_of(model, smoke)
    delay = slowed(delay_ms)
    needed: dict[str, dict[str, float]] = {}
    for index, arm in enumerate(MEMORY_ARMS):
        harness.progress(f"{model}, memory", index, len(MEMORY_ARMS))
        allocated, used = in_use()
        torch.cuda.reset_peak_memory_stats()
        step = make_step(arm, workload)
        for number in range(steps):
            delay.serve(hvd.rank(), number)
            step()
        most = torch.cuda.max_memory_allocated() - allocated
        now = in_use()[1] - used
        del step
        needed[arm] = {"allocated": max(hvd.allgather_object(most)) / (1 << 20), "used": now / (1 << 20)}
        yield {arm: row for arm, row in needed.items() if arm != MEMORY_ARMS[0]}


def in_use() -> tuple[int, int]:
    """Bytes that PyTorch has allocated on this rank, and that are in use on the device, when all ranks are here and idle."""
    gc.collect()
    finish()
    torch.cuda.empty_cache()
    barrier()
    free, total = torch.cuda.mem_get_info()
    barrier()  # before a rank allocates again
    return torch.cuda.memory_allocated(), total - free


def workload_of(model: str, smoke: bool) -> networks.Workload:
    """What is trained; also lets the GPU multiply as it does in practice."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(hvd.rank())
    return (networks.SMOKE if smoke else networks.WORKLOADS)[model]


def slowed(delay_ms: float) -> harness.Delays:
    return harness.SlowRank(hvd.size(), hvd.size() - 1, delay_ms / 1e3)


def make_step(arm: str, workload: networks.Workload) -> Callable[[], None]:
    """A step of one arm, whose model every rank begins with alike."""
    model = workload.model()
    hvd.broadcast_parameters(model.state_dict(), 0)
    x, classes = workload.batch()
    base = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    named = [(f"{arm}.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = OPTIMIZERS[arm](base, named)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).flatten(0, -2), classes).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.set_defaults(device="cuda")
    parser.add_argument("--model", choices=list(networks.WORKLOADS), default="resnet50", help="what is trained")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that all of this works")
    parser.add_argument("--blocks", type=int, default=10, help="of each arm")
    parser.add_argument("--block", type=int, default=5, help="steps that an arm takes in a row")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="by which one rank is slowed in each step")
    parser.add_argument("--memory-steps", type=int, default=10, help="of each arm, for its memory")
    options = parser.parse_args()
    job = {"ranks": options.ranks, "transport": options.transport, "device": options.device}
    load = {"model": options.model, "smoke": options.smoke, "delay_ms": options.delay_ms}
    unit = (networks.SMOKE if options.smoke else networks.WORKLOADS)[options.model].unit
    figures: dict[str, Any] = {**job, **load, "unit": unit, "quick": options.quick}
    figures |= {"blocks": options.blocks, "block": options.block, "memory_steps": options.memory_steps}

    def keep(more: dict[str, Any]) -> None:
        figures.update(more)
        harness.write_json(options.json, figures)

    harness.launch(
        throughput,
        **job,
        **load,
        on_result=lambda rates: keep({setting: figures_of(by_arm) for setting, by_arm in rates.items()}),
        blocks=options.blocks,
        block=options.block,
        seconds=QUICK_SECONDS if options.quick else None,
    )
    harness.print_table(
        f"{options.model} on {options.ranks} ranks, one slowed by {options.delay_ms:g} ms: {unit} a second",
        ["", "optimizer", f"{unit}/s", "over Horovod"],
        [
            [setting, arm, f"{rate:,.0f}", f"{figures[setting]['over_horovod'][arm]:.3f}"]
            for setting in SETTINGS
            for arm, rate in figures[setting]["per_second"].items()
        ],
    )
    if options.device == "cpu":
        return
    harness.launch(
        memory, **job, **load, on_result=lambda needed: keep({"memory_mib": needed}), steps=options.memory_steps
    )
    harness.print_table(
        "Memory in MiB, the last rank slowed",
        ["optimizer", "allocated on a rank", "used on the device"],
        [[arm, f"{row['allocated']:,.0f}", f"{row['used']:,.0f}"] for arm, row in figures["memory_mib"].items()],
    )


def figures_of(by_arm: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of one setting."""
    medians = {arm: statistics.median(values) for arm, values in by_arm.items()}
    horovod = statistics.median(by_arm["horovod"] + by_arm["horovod_again"])
    return {
        "per_second": medians,
        "over_horovod": {arm: median / horovod for arm, median in medians.items()},
        "horovod_over_horovod": medians["horovod_again"] / medians["horovod"],
    }


if __name__ == "__main__":
    main()
