"""A regression on a hyperplane where in every step one rank of eight, drawn at random, is late: policies side by side.

    .venv/bin/python benchmarks/straggler.py [--device cuda] [--json FILE] [--transport gloo]

eager-SGD's first experiment (PPoPP'20, section 7.2.1) in miniature: 8,192 dimensions, a step of C = 40 ms (a sleep), and a
delay of D = 20, 30 or 40 ms. Each rank sleeps through its own delays: C + D/8 a step on average, where Full takes C +
D. The time of a run ends when the last rank has flushed. The speed-up is Full's time over that of the policy, and the
table has the median over the seeds. It cannot exceed Full's time over the sleeps of the slowest rank. All arms run in
one job and take turns, and their threads sleep while they wait. The loss is the mean over the ranks, after the flush,
on test points that all ranks share.

Then the wait of a rank that comes when the round is over: the median time of `partial_allreduce_` of 8,193 floats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import harness
import torch
from harness.device import finish
from torch import nn

import horovod_partial.torch as hvd

DIMENSIONS, POINTS, TEST_POINTS, BATCH = 8192, 2048, 1024, 32  # the numbers of points are those of each rank
NOISE = 1.0
COMPUTE_MS, DELAYS_MS = 40, (20, 30, 40)
POLICIES = ("full", "solo", "majority")
QUICK_STEPS, QUICK_SEEDS = 40, 1


def measure(steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """On every rank: figures by delay, policy and seed, of the seeds so far; and the wait of a late rank."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        str(delay): {sync: [] for sync in POLICIES} for delay in DELAYS_MS
    }
    for seed in range(seeds):
        data = draw_data(seed)
        for delay, by_policy in runs.items():
            delays = harness.RandomVictims(hvd.size(), 1, int(delay) / 1e3, seed)
            for sync in harness.in_turn(POLICIES, seed):
                run = train(sync, f"D = {delay} ms, seed {seed}, {sync}", data, steps, delays)
                by_policy[sync].append(run)
                yield {"runs": runs}
    yield {"runs": runs, "late_wait_ms": late_wait(25 * hvd.size())}


def draw_data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's points on a noisy hyperplane that all ranks share, and the points that all ranks are tested with."""

    def randn(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device="cpu").to(torch.get_default_device())

    shared = torch.Generator().manual_seed(seed)
    plane = randn(DIMENSIONS, 1, shared) * (10 / DIMENSIONS) ** 0.5
    test_points = randn(TEST_POINTS, DIMENSIONS, shared)
    own = torch.Generator().manual_seed(1_000 * (seed + 1) + hvd.rank())
    points = randn(POINTS, DIMENSIONS, own)
    values = points @ plane + NOISE * randn(POINTS, 1, own)
    return points, values, test_points, test_points @ plane


def train(
    sync: str, stage: str, data: tuple[torch.Tensor, ...], steps: int, delays: harness.Delays
) -> dict[str, float]:
    """Train under one policy. Returns the time of the job and of its sleeps, over its steps; late steps; the loss."""
    points, values, test_points, test_values = data
    model = nn.Linear(DIMENSIONS, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), sync=sync
    )
    buckets_before = set(hvd.partial_stats())
    hvd.barrier()
    start = time.perf_counter()
    for step in range(steps):
        harness.progress(stage, step, steps)
        begin = step * BATCH % POINTS
        time.sleep(COMPUTE_MS / 1e3)
        delays.serve(hvd.rank(), step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points[begin : begin + BATCH]), values[begin : begin + BATCH]).backward()
        optimizer.step()
    optimizer.flush()
    finish()
    seconds = max(hvd.allgather_object(time.perf_counter() - start))
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(test_points), test_values).item() + NOISE**2
    on_time = [sum(b["on_time"]) for name, b in hvd.partial_stats().items() if name not in buckets_before]
    loss = hvd.allreduce(torch.tensor(loss, dtype=torch.float64), name="loss").item()
    late = 1 - on_time[0] / (steps * hvd.size()) if on_time else 0.0
    floors = harness.Floors.of(delays, hvd.size(), steps, COMPUTE_MS / 1e3)
    floor = floors.full if sync == "full" else floors.alone
    return {"step_ms": 1e3 * seconds / steps, "floor_ms": 1e3 * floor / steps, "loss": loss, "late": late}


def late_wait(rounds: int) -> float:
    """On every rank: median milliseconds that a rank waits which comes when the round is over."""
    tensor = torch.ones(DIMENSIONS + 1)
    waits = []
    for index in range(rounds):
        harness.progress("late wait", index, rounds)
        victim = index % hvd.size()
        hvd.barrier()
        if hvd.rank() == victim:
            time.sleep(COMPUTE_MS / 1e3)
        start = time.perf_counter()
        handle = hvd.partial_allreduce_async_(tensor, name="late_wait", sync=hvd.Solo())
        hvd.synchronize(handle)
        seconds = time.perf_counter() - start
        if hvd.rank() == victim and hvd.round_info(handle).late:
            waits.append(seconds)
    everybodys = [wait for waits in hvd.allgather_object(waits) for wait in waits]
    return 1e3 * statistics.median(everybodys)


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8, device=True)
    parser.add_argument("--steps", type=int, default=400, help="of each rank")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs of each policy")
    options = parser.parse_args()
    steps = min(options.steps, QUICK_STEPS) if options.quick else options.steps
    seeds = min(options.seeds, QUICK_SEEDS) if options.quick else options.seeds
    job = {"ranks": options.ranks, "transport": options.transport, "device": options.device}
    load = {"steps": steps, "seeds": seeds}
    about = {**job, **load, "compute_ms": COMPUTE_MS}

    measured = harness.launch(
        measure,
        **job,
        **load,
        asleep=True,
        on_result=lambda measured: harness.write_json(options.json, about | figures_of(measured)),
    )
    figures = figures_of(measured)
    rows = []
    for delay, runs in figures["runs"].items():
        for sync, of_sync in runs.items():
            row = [delay, sync, f"{statistics.median(run['step_ms'] for run in of_sync):.1f}"]
            if sync == "full":
                row += ["1.00", f"Full over its sleeps: {figures['full_over_floor'][delay]:.2f}", "", "1.000"]
            else:
                speed_up, loss = figures[sync][delay], figures["loss_over_full"][sync][delay]
                late = statistics.fmean(run["late"] for run in of_sync)
                row += [f"{speed_up:.2f}", f"{speed_up / figures['limit'][delay]:.1%}", f"{late:.0%}", f"{loss:.3f}"]
            rows.append(row)
    harness.print_table(
        f"One random rank of {options.ranks} late by D in a step of {COMPUTE_MS} ms, over {options.transport}",
        ["D in ms", "policy", "step in ms", "speed-up", "of limit", "late", "loss over Full's"],
        rows,
    )
    print(f"A late rank waits {figures['late_wait_ms']:.2f} ms for 8,193 floats (median)")


def figures_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of the runs so far: medians over the seeds that all policies have."""
    figures: dict[str, Any] = {**measured, "solo": {}, "majority": {}, "limit": {}, "full_over_floor": {}}
    figures["loss_over_full"] = {"solo": {}, "majority": {}}
    for delay, runs in measured["runs"].items():
        seeds = range(min(len(of_sync) for of_sync in runs.values()))
        if not seeds:
            continue
        full = [runs["full"][seed] for seed in seeds]
        figures["limit"][delay] = statistics.median(
            one["step_ms"] / runs["solo"][seed]["floor_ms"] for seed, one in zip(seeds, full, strict=True)
        )
        figures["full_over_floor"][delay] = statistics.median(one["step_ms"] / one["floor_ms"] for one in full)
        over_full = lambda sync, key, runs=runs, seeds=seeds: [
            runs[sync][seed][key] / runs["full"][seed][key] for seed in seeds
        ]
        for sync in ("solo", "majority"):
            figures[sync][delay] = 1 / statistics.median(over_full(sync, "step_ms"))
            figures["loss_over_full"][sync][delay] = statistics.median(over_full(sync, "loss"))
    return figures


if __name__ == "__main__":
    main()
