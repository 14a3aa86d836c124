"""Where the time of a step goes on a GPU: when each of its parts begins and ends, under Horovod's optimizer and under ours.

    .venv/bin/python benchmarks/gpu_profile.py [--load transformer] [--device cpu --smoke] [--json FILE]

A load is the gradients of ResNet-50, or 200 small ones, from a backward that does next to nothing; or the Transformer of
gpu_training.py. All ranks share the GPU. The arms take turns in blocks of a few rounds, in balanced orders, each behind a
barrier. There are clocks around the parts of each step, and rank 0 writes Horovod's timeline. So the figures are those of
rank 0, and medians over its steps: how often a part came in a step, how long all of it took, and when it first began and
last ended, in milliseconds since the step began. They are written after each block of each arm.

    forward    behind zero_grad
    backward   all hooks are in it
    hook       of a gradient: the copy into the bucket, and `submit` if it was the bucket's last
    submit     of a contribution: it is compressed, an event is recorded, and Horovod or the core is told
    negotiate  from the first report of a rank to the decision; before that the device computes the contribution
    queue      from there to the reduction: it is queued, waits for the device, and is copied into the fusion buffer
    reduce     the reduction; on a GPU Horovod has seen its event then
    finish     the copy out of the fusion buffer, until Horovod is about to call back
    wait       the host waits for results; under work sharing for the next micro-batch, too
    take       results of a round are copied and shown; behind `optimizer` it finds no more. Horovod does it after `wait`
    optimizer  the user's optimizer takes its step

The host is told between the last `finish` and the end of `wait`. Times of the device come from CUDA events. On a CPU the
clock of the host stands in for them. Parts in which this rank queues no work have none. Clocks cost time, and with a
timeline Horovod waits for gradients on the host: overhead.py and gpu_training.py measure whole steps without either.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from gpu_training import workload_of
from harness import shapes, steps_torch
from harness.device import Clock, Moment, Span, milliseconds
from harness.steps_torch import OPTIMIZERS
from harness.timelines import activities
from horovod.torch import optimizer as horovod_optimizer

import horovod_partial.torch as hvd
from horovod_partial.exchange.work_sharing import SharedWork
from horovod_partial.torch.buckets import GradientFamily
from horovod_partial.torch.round_applier import RoundApplier

LOADS = (*shapes.SETS, "transformer")
ARMS = {arm: OPTIMIZERS[arm] for arm in ("horovod", "full", "quorum of all", "majority")}
ARMS["work sharing"] = lambda *arguments: hvd.DistributedOptimizer(*arguments, sync=hvd.WorkSharing())
ON_DEVICE = ("step", "forward", "backward", "hook", "take", "optimizer")  # parts in which this rank queues work
OF_REDUCTIONS = ("negotiate", "queue", "reduce", "finish")
PARTS = ("step", "forward", "backward", "hook", "submit", *OF_REDUCTIONS, "wait", "take", "optimizer")
FUNCTIONS = (
    ("submit", GradientFamily, "arrive"),
    ("submit", horovod_optimizer, "allreduce_async_"),
    ("wait", GradientFamily, "wait"),
    ("wait", SharedWork, "must_apply"),
    ("wait", horovod_optimizer, "synchronize"),
    ("take", RoundApplier, "_take_into_gradients"),
    ("optimizer", torch.optim.SGD, "step"),
)
SMOKE_TENSORS = 16
QUICK_SECONDS = 15.0  # behind the first turn


def put_clocks(clock: Clock) -> None:
    """Let the clock note the calls of all functions and gradient hooks that are parts."""
    for part, owner, name in FUNCTIONS:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    horovods, parameters = horovod_optimizer._DistributedOptimizer, torch.nn.Parameter
    make, register = horovods._make_hook, parameters.register_post_accumulate_grad_hook
    horovods._make_hook = lambda *arguments: clock.timed("hook", make(*arguments))
    parameters.register_post_accumulate_grad_hook = lambda own, hook: register(own, clock.timed("hook", hook))


def reductions(timeline: Path) -> Iterator[Span]:
    """The parts that Horovod's timeline has of each reduction."""
    inner: dict[int, tuple[Moment, Moment]] = {}  # by tensor: the reduction itself
    for tensor, name, *bounds in activities(timeline):
        begin, end = map(Moment, bounds)
        if name == "NEGOTIATE_ALLREDUCE":
            yield Span("negotiate", begin, end)
        elif name.endswith("_ALLREDUCE"):
            inner[tensor] = begin, end
        elif name == "ALLREDUCE" and tensor in inner:
            first, last = inner.pop(tensor)
            yield from map(Span, OF_REDUCTIONS[1:], (begin, first, last), (first, last, end))


Figures = dict[str, dict[str, list[float]]]  # by part and name, a figure for each step


def add_steps(figures: Figures, spans: list[Span]) -> None:
    """Add the figures of each step. A span belongs to the step in which it has ended."""
    steps = sorted(span.begin for span in spans if span.part == "step")
    inside: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        inside[bisect([step.host for step in steps], span.end.host) - 1, span.part].append(span)
    for index, step in enumerate(steps):
        for part in PARTS:
            of_part = inside[index, part]
            figures[part]["calls"].append(len(of_part))
            for clock in Moment._fields:
                bounds = [(getattr(span.begin, clock), getattr(span.end, clock)) for span in of_part]
                if not bounds or bounds[0][0] is None:
                    continue
                origin = getattr(step, clock)
                figures[part][f"{clock}_ms"].append(sum(milliseconds(*both) for both in bounds))
                figures[part][f"{clock}_first_ms"].append(min(milliseconds(origin, begin) for begin, _ in bounds))
                figures[part][f"{clock}_last_ms"].append(max(milliseconds(origin, end) for _, end in bounds))


def profile(load: str, smoke: bool, blocks: int, block: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """On every rank: by arm and part, the medians of the figures so far."""
    clock = Clock(ON_DEVICE)
    put_clocks(clock)
    runs = {arm: make_run(arm, load, smoke, clock) for arm in ARMS}
    measured: dict[str, Figures] = {arm: {part: defaultdict(list) for part in PARTS} for arm in ARMS}
    end = None
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 + blocks):  # the first one is the warm-up
            if turn == 1 and seconds is not None:
                end = time.monotonic() + seconds
            elif end is not None and steps_torch.anyone(time.monotonic() > end):
                break
            harness.progress(load, turn, 1 + blocks)
            for arm in harness.in_turn(runs, turn):
                timeline = Path(folder) / f"{turn}.{arm}.json"
                hvd.start_timeline(str(timeline))
                clock.spans.clear()
                steps_torch.barrier()
                runs[arm](block)
                steps_torch.finish()
                hvd.stop_timeline()
                if turn and hvd.rank() == 0:
                    add_steps(measured[arm], [*clock.spans, *reductions(timeline)])
                yield {
                    arm: {part: {key: statistics.median(all) for key, all in row.items()} for part, row in rows.items()}
                    for arm, rows in measured.items()
                }


def make_run(arm: str, load: str, smoke: bool, clock: Clock) -> Callable[[int], None]:
    """What lets an arm apply so many rounds, or Horovod's own optimizer steps. All ranks stop behind the same one."""
    if load == "transformer":
        workload = workload_of(load, smoke)
        model = workload.model()
        hvd.broadcast_parameters(model.state_dict(), 0)
        x, classes = workload.batch()
        parameters = list(model.parameters())
        loss_of = lambda: torch.nn.functional.cross_entropy(model(x).flatten(0, -2), classes)
    else:
        drawn = shapes.SETS[load]()[: SMOKE_TENSORS if smoke else None]
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in drawn]
        loss_of = lambda: torch.stack([parameter.sum() for parameter in parameters]).sum()
    named = [(f"{arm}.{index}", parameter) for index, parameter in enumerate(parameters)]
    optimizer: Any = ARMS[arm](torch.optim.SGD(parameters, lr=1e-3), named)
    forward = clock.timed("forward", loss_of)
    backward = clock.timed("backward", lambda loss: loss.backward())
    steps = 0

    def step() -> None:
        optimizer.zero_grad()
        backward(forward())
        optimizer.step()

    timed_step = clock.timed("step", step)

    def run(rounds: int) -> None:
        nonlocal steps
        end = getattr(optimizer, "rounds", steps) + rounds
        while getattr(optimizer, "rounds", steps) < end:
            timed_step()
            steps += 1

    return run


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.set_defaults(device="cuda")
    parser.add_argument("--load", choices=LOADS, default="resnet50", help="whose gradients travel")
    parser.add_argument("--smoke", action="store_true", help="a tiny load, to see that all of this works")
    parser.add_argument("--blocks", type=int, default=10, help="of each arm")
    parser.add_argument("--block", type=int, default=5, help="rounds that an arm applies in a row")
    options = parser.parse_args()
    job = {"ranks": options.ranks, "transport": options.transport, "device": options.device, "load": options.load}
    job |= {"smoke": options.smoke, "blocks": options.blocks, "block": options.block}
    parts = harness.launch(
        profile,
        **job,
        seconds=QUICK_SECONDS if options.quick else None,
        environment={"HOROVOD_TIMELINE": "DYNAMIC"},
        on_result=lambda parts: harness.write_json(options.json, {**job, "quick": options.quick, "parts": parts}),
    )
    shown = lambda row: f"{row['host_last_ms']:.2f}" if row["calls"] else ""
    rows = [[part, *(shown(parts[arm][part]) for arm in ARMS)] for part in PARTS]
    harness.print_table(f"{options.load}: when a part has last ended, in ms of a step", ["", *ARMS], rows)


if __name__ == "__main__":
    main()
