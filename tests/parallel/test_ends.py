"""Buckets end: what optimizers leave behind when they are gone."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness.matrix import front_end
from harness.world import World

import horovod_partial.torch as hvd

# Buckets that tests elsewhere have left would keep flushes busy that here must have nothing to do.
pytestmark = [front_end, pytest.mark.turn("first")]

POLICIES = {
    "solo": hvd.Solo(),
    "majority": hvd.Majority(),
    "group_average": hvd.GroupAverage(2),
    "partial_reduce": hvd.PartialReduce(2),
    "weighted_average": hvd.WeightedAverage(2, contraction=0.9),
}


@pytest.fixture(autouse=True)
def collections_are_short() -> Iterator[None]:
    """All that was there before the test is left out of the collector's rounds, which would take most of its time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_optimizer(policy: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync=policy)


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def buckets(world: World) -> set[str]:
    """The buckets of optimizers on this rank, when all ranks are here and have negotiated once more."""
    gc.collect()
    world.barrier()
    hvd.allreduce(torch.zeros(1), name=world.name("cycle"))
    return {name for name in hvd.partial_stats() if name.startswith("DistributedOptimizer.")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_optimizers_that_are_gone_leave_no_buckets(world: World, policy: str) -> None:
    for _ in range(50 if world.long and policy == "solo" else 3):
        model, optimizer = make_optimizer(POLICIES[policy])
        for _ in range(2 + world.rank):  # all use every bucket before one flushes
            step(model, optimizer)
        optimizer.flush()
        assert buckets(world)
        model = optimizer = None
        assert not buckets(world)
        hvd.flush()  # has nothing to wait for


def test_what_is_pending_when_an_optimizer_goes_is_delivered_once(world: World) -> None:
    model, optimizer = make_optimizer(hvd.Solo())
    for _ in range(3 + 5 * world.rank):
        step(model, optimizer)
    model = optimizer = None
    assert not buckets(world)


def test_a_rank_that_keeps_its_optimizer_goes_on(world: World) -> None:
    model, optimizer = make_optimizer(hvd.Solo())
    step(model, optimizer)
    if world.rank > 0:
        model = optimizer = None
    names = buckets(world)
    assert names
    if world.rank == 0:
        for _ in range(5):
            step(model, optimizer)
    hvd.flush()
    assert buckets(world) == names
    model = optimizer = None
    assert not buckets(world)


def test_a_flush_needs_no_bucket(world: World) -> None:
    model, optimizer = make_optimizer(hvd.Solo())
    step(model, optimizer)
    model = optimizer = None
    assert not buckets(world)
    if world.rank == 0:
        hvd.flush()
    world.barrier()


def test_a_flush_is_released_when_the_last_bucket_ends(world: World) -> None:
    model, optimizer = make_optimizer(hvd.Solo())
    step(model, optimizer)
    model = optimizer = None
    gc.collect()
    if world.rank == 0:
        hvd.flush()  # the others come after, or not at all
        world.tell("flushed")
    world.wait_for("flushed")
    assert not buckets(world)


@pytest.mark.full_matrix("gloo")
def test_a_wrapped_optimizer_goes_without_the_garbage_collector(world: World) -> None:
    """Else its hooks would go on beside those of the next one."""
    model = torch.nn.Linear(4, 2)
    merged = hvd.MergedGradients(warmup_steps=2)
    gc.disable()
    try:
        for _ in range(2):
            bare = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(bare, sync=hvd.Quorum(1.0), merging=merged)
            for _ in range(4):
                step(model, optimizer)
            plans = optimizer.merging_plan
            gone = weakref.ref(optimizer._exchange)
            optimizer = None
            assert plans is not None
            assert gone() is None
    finally:
        gc.enable()
    assert not buckets(world)


@pytest.mark.full_matrix("gloo")
@pytest.mark.parametrize("policy", ["solo", "quorum:1.0"])
def test_names_follow_the_order_of_wrapping(world: World, policy: str) -> None:
    """Threads that train alike models use theirs in any order, another on each rank."""
    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), sync=policy, op=hvd.Sum) for p in parameters]
    first_is_used = threading.Event()

    def train(index: int) -> None:
        if index == world.rank % 2:
            first_is_used.wait()
        for _ in range(5):
            (parameters[index] * 10.0 ** (world.rank + world.size * index)).backward()
            first_is_used.set()
            optimizers[index].step()
            optimizers[index].zero_grad()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, index) for index in range(2)]:
            done.result()
    for optimizer in optimizers:
        optimizer.flush()
    sums = [5 * sum(10.0 ** (rank + world.size * index) for rank in world.ranks) for index in range(2)]
    assert [-parameter.item() for parameter in parameters] == sums
