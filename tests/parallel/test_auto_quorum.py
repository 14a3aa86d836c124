"""The adaptive quorum in a real job: down while a rank is slow, and up again. The rest is in the simulator."""

from __future__ import annotations

import time
from typing import Any

import torch
from harness.world import World

import horovod_partial.torch as hvd

STEP, DELAY = 0.006, 0.044  # seconds, asleep
MOST_STEPS = 1000


def make(**options: Any) -> tuple[torch.nn.Module, Any]:
    """A model, and its optimizer with two buckets."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    bare = torch.optim.SGD(model.parameters(), lr=0.01)
    groups = [list(layer.parameters()) for layer in model]
    return model, hvd.DistributedOptimizer(bare, model.named_parameters(), groups=groups, **options)


def statistics(optimizer: Any) -> list[dict[str, Any]]:
    stats = hvd.partial_stats()
    return [stats[bucket.name] for bucket in optimizer._exchange.buckets]


def step(model: torch.nn.Module, optimizer: Any, seconds: float) -> None:
    optimizer.zero_grad()
    time.sleep(seconds)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_it_goes_down_while_a_rank_is_slow_and_up_again(world: World) -> None:
    model, optimizer = make(sync=hvd.Auto())
    late = world.size - 1

    def run(delay: float, is_over: Any) -> None:
        for _ in range(MOST_STEPS):
            step(model, optimizer, STEP + (delay if world.rank == late else 0.0))
            if is_over(statistics(optimizer)):
                return
        raise AssertionError(str(statistics(optimizer)))

    run(DELAY, lambda stats: all(bucket["quorum"] < world.size for bucket in stats))
    optimizer.flush()
    world.barrier()
    for bucket in statistics(optimizer):
        first, down = bucket["quorum_changes"][:2]
        assert first == (0, world.size, "start")
        assert down[0] <= 128
        assert down[1] < world.size
        assert down[2] == "faster"
    run(0.0, lambda stats: all(bucket["quorum"] == world.size for bucket in stats))
    optimizer.flush()
    world.barrier()
    hvd.assert_replicas_equal(model, optimizer)
    world.same([bucket["quorum_changes"] for bucket in statistics(optimizer)])


def test_it_stays_above_its_least(world: World) -> None:
    model, optimizer = make(sync=f"auto:{world.size}")
    for _ in range(30):
        step(model, optimizer, DELAY / 4 if world.rank == 0 else 0.0)
    optimizer.flush()
    assert all(sum(bucket["late"]) == 0 or bucket["closed_by"].get("flush") for bucket in statistics(optimizer))
    assert all(bucket["quorum_changes"] == [(0, world.size, "start")] for bucket in statistics(optimizer))
