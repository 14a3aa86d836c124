"""Real training on a GPU: images or tokens a second, under Horovod's optimizer and under ours, when one rank is slowed.

    .venv/bin/python benchmarks/gpu_training.py [--model transformer] [--device cpu --smoke] [--json FILE]

ResNet-50 on images of 224 x 224, or a Transformer of 98 million parameters, in single precision (TF32) on random data. All
ranks share the GPU. Each arm has a model of its own; the arms take turns in blocks of a few steps, in one order and then in
the other, behind a barrier: first with nobody slow, then with the last rank asleep for --delay-ms in each step. A figure is
the median over the blocks of what all ranks get through in a second; where Horovod's two arms differ by more than 2 % with
nobody slow, the ratios mean nothing.

Memory, on a GPU only, is that of jobs of one arm each, with the last rank slowed: the most that PyTorch had allocated on a
rank, and what was in use on the whole device after the steps, which is of all ranks and of what PyTorch knows nothing of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from harness import networks
from harness.device import finish
from harness.steps_torch import OPTIMIZERS, barrier, mean_over_ranks

import horovod_partial.torch as hvd

WARM_UP = 2  # blocks of each arm
MEMORY_STEPS = 10
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
SETTINGS = ("even", "slowed")


def throughput(model: str, smoke: bool, blocks: int, block: int, delay_ms: float) -> dict[str, dict[str, list[float]]]:
    """On every rank: for each setting and arm, what all ranks got through in a second, in each block."""
    workload = workload_of(model, smoke)
    steps = {arm: make_step(arm, workload) for arm in OPTIMIZERS}
    rates: dict[str, dict[str, list[float]]] = {setting: {arm: [] for arm in steps} for setting in SETTINGS}
    for setting, by_arm in rates.items():
        delay = slowed(delay_ms if setting == "slowed" else 0.0)
        for index in range(WARM_UP + blocks):
            harness.progress(f"{model}, {setting}", index, WARM_UP + blocks)
            for arm in sorted(steps, key=list(steps).index, reverse=index % 2 == 1):
                barrier()
                start = time.perf_counter()
                for number in range(block):
                    delay.serve(hvd.rank(), number)
                    steps[arm]()
                finish()
                if index >= WARM_UP:
                    by_arm[arm].append(block * workload.units / (time.perf_counter() - start))
        means = mean_over_ranks(list(by_arm.values()), f"{setting}.rates")
        rates[setting] = {arm: [hvd.size() * rate for rate in row] for arm, row in zip(by_arm, means, strict=True)}
    return rates


def memory(model: str, smoke: bool, arm: str, delay_ms: float) -> dict[str, float]:
    """On every rank of a job with one arm: MiB."""
    step = make_step(arm, workload_of(model, smoke))
    delay = slowed(delay_ms)
    for number in range(MEMORY_STEPS):
        harness.progress(f"{model}, memory, {arm}", number, MEMORY_STEPS)
        delay.serve(hvd.rank(), number)
        step()
    finish()
    barrier()
    free, total = torch.cuda.mem_get_info()
    allocated = max(hvd.allgather_object(torch.cuda.max_memory_allocated()))
    return {"allocated": allocated / (1 << 20), "used": (total - free) / (1 << 20)}


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
    options = parser.parse_args()
    job = {"ranks": options.ranks, "transport": options.transport, "device": options.device}
    load = {"model": options.model, "smoke": options.smoke, "delay_ms": options.delay_ms}

    rates = harness.launch(throughput, **job, **load, blocks=options.blocks, block=options.block)
    arms = [] if options.device == "cpu" else [arm for arm in OPTIMIZERS if arm != "horovod_again"]
    held = {arm: harness.launch(memory, **job, **load, arm=arm) for arm in arms}

    unit = (networks.SMOKE if options.smoke else networks.WORKLOADS)[options.model].unit
    figures: dict[str, Any] = {**job, **load, "unit": unit, "blocks": options.blocks, "block": options.block}
    figures |= {"memory_mib": held}
    rows = []
    for setting, by_arm in rates.items():
        medians = {arm: statistics.median(values) for arm, values in by_arm.items()}
        horovod = statistics.median(by_arm["horovod"] + by_arm["horovod_again"])
        figures[setting] = {
            "per_second": medians,
            "over_horovod": {arm: median / horovod for arm, median in medians.items()},
            "horovod_over_horovod": medians["horovod_again"] / medians["horovod"],
        }
        rows += [[setting, arm, f"{median:,.0f}", f"{median / horovod:.3f}"] for arm, median in medians.items()]
    harness.print_table(
        f"{options.model} on {options.ranks} ranks, one slowed by {options.delay_ms:g} ms: {unit} a second",
        ["", "optimizer", f"{unit}/s", "over Horovod"],
        rows,
    )
    if held:
        harness.print_table(
            "Memory in MiB, the last rank slowed",
            ["optimizer", "allocated on a rank", "used on the device"],
            [[arm, f"{row['allocated']:,.0f}", f"{row['used']:,.0f}"] for arm, row in held.items()],
        )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
