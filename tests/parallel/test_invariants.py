"""The invariants of the round protocol (docs/protocol.md), by their names, on real ranks with delays of their own.

Rounds under a script are in `test_rounds.py`. I5 (`Full()` is Horovod's own path) is in `test_full.py`, and I6 (no hang)
in `test_liveness.py` and `test_jobs.py`: every test that waits is one for I6 too.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from harness.buckets import collect, completed
from harness.world import World

import horovod_partial.torch as hvd

POLICIES = ["solo", "majority", "majority:random", "quorum:0.75"]


def delay(random: random.Random) -> None:
    """Arrivals in another order in each step; nothing depends on how long this takes."""
    time.sleep(random.choice((0.0, 0.0, 0.001, 0.004)))


@pytest.mark.parametrize("policy", POLICIES)
def test_i1_exactly_once(world: World, policy: str) -> None:
    rounds = {"mpi": 2000, "gloo": 200}[world.transport] if world.long else 40
    rng = random.Random(world.random().random() + world.rank)
    names = [world.name(f"bucket.{index}") for index in range(3)]
    submitted = [torch.zeros(7, dtype=torch.int64) for _ in names]
    delivered = [torch.zeros(7, dtype=torch.int64) for _ in names]
    for step in range(rounds):
        delay(rng)
        own = [torch.randint(-1000, 1000, (7,), generator=torch.manual_seed(rng.randrange(2**32))) for _ in names]
        in_place = rng.random() < 0.5
        start = hvd.partial_allreduce_async_ if in_place else hvd.partial_allreduce_async
        handles = []
        for index, name in enumerate(names):
            submitted[index] += own[index]
            handles.append(start(own[index], name=name, op=hvd.Sum, sync=policy))
        if step % 10 == 0:
            beside = hvd.allreduce_async(torch.tensor([step + world.rank]), name=world.name("beside"), op=hvd.Sum)
        if step % 14 == 0:
            rows = hvd.allgather(torch.full((world.rank + 1, 2), world.rank), name=world.name("rows"))
            assert rows[:, 0].tolist() == [rank for rank in world.ranks for _ in range(rank + 1)]
        for index, handle in enumerate(handles):
            delivered[index] += hvd.synchronize(handle)
        if step % 10 == 0:
            assert hvd.synchronize(beside).item() == sum(step + rank for rank in world.ranks)
    hvd.flush()
    for index, name in enumerate(names):
        delivered[index] += collect(name, delivered[index])
    totals = torch.tensor(world.gather([tensor.tolist() for tensor in submitted])).sum(0)
    assert [tensor.tolist() for tensor in delivered] == totals.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_i2_one_result(world: World, policy: str) -> None:
    rng = random.Random(world.random().random() + world.rank)
    seen: dict[int, bytes] = {}
    for _ in range(40):
        delay(rng)
        tensor = torch.rand(33, generator=torch.manual_seed(rng.randrange(2**32)))
        handle = hvd.partial_allreduce_async_(tensor, name=world.name(), sync=policy, missed="latest")
        result = hvd.synchronize(handle)
        seen[hvd.round_info(handle).round] = result.numpy().tobytes()
    hvd.flush()
    everybody = world.gather(seen)
    rounds = sorted({number for results in everybody for number in results})
    differing = [n for n in rounds if len({results[n] for results in everybody if n in results}) != 1]
    assert rounds, "no round has run"
    assert not differing


@pytest.mark.parametrize("policy", ["solo", "majority", "quorum:3", "quorum:1.0"])
def test_i3_quorum(world: World, policy: str) -> None:
    rng = random.Random(world.random().random() + world.rank)
    quorum = {"solo": 1, "majority": (world.size + 1) // 2, "quorum:3": min(3, world.size), "quorum:1.0": world.size}
    for _ in range(40):
        delay(rng)
        hvd.partial_allreduce(torch.ones(3), name=world.name(), sync=policy)
    hvd.flush()
    stats = world.same(hvd.partial_stats()[world.name()]["fresh_histogram"])
    closed_by = hvd.partial_stats()[world.name()]["closed_by"]
    exempt = sum(closed_by.get(reason, 0) for reason in ("liveness", "flush", "end"))
    assert sum(count for fresh, count in stats.items() if fresh < quorum[policy]) <= exempt


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_i4_staleness(world: World, bound: int) -> None:
    rng = random.Random(world.random().random() + world.rank)
    for _ in range(40):
        delay(rng)
        hvd.partial_allreduce(torch.ones(3), name=world.name(), sync="solo", max_staleness=bound)
    hvd.flush()
    stats = hvd.partial_stats()[world.name()]
    staleness = world.same(stats["staleness_histogram"])
    exempt = stats["closed_by"].get("liveness", 0)
    assert sum(count for rounds, count in staleness.items() if rounds > bound) <= exempt * world.size


def test_i7_no_torn_data(world: World) -> None:
    """The application writes into its tensor as soon as it may; a round's sum is of whole contributions."""
    rng = random.Random(world.random().random() + world.rank)
    tensor = torch.zeros(1 << 18, dtype=torch.int32)
    for step in range(60):
        delay(rng)
        tensor.fill_((step << 4) + world.rank)
        result = hvd.partial_allreduce_(tensor, name=world.name(), op=hvd.Sum, sync="solo")
        assert result.min() == result.max(), f"step {step}"
    hvd.flush()


def test_i8_on_time_means_no_extra_copy(world: World) -> None:
    name = world.name()
    for _ in range(5):
        world.barrier()
        handle = hvd.partial_allreduce_async_(torch.ones(1000), name=name, sync="quorum:1.0")
        hvd.synchronize(handle)
        assert not hvd.round_info(handle).late
    assert hvd.partial_stats()[name]["bytes_held"] == 0


@pytest.mark.parametrize("late", [0, 1])
def test_i1_a_flush_covers_all_buckets(world: World, late: int) -> None:
    """When `flush` returns, the flush round of every bucket has ended here."""
    names = [world.name(str(index)) for index in range(8)]
    sync = hvd.Quorum(world.size - 1)
    ones = torch.ones(200_000, dtype=torch.int64)

    def reduce_all() -> int:
        handles = [hvd.partial_allreduce_async(ones, name=name, op=hvd.Sum, sync=sync) for name in names]
        return sum(hvd.synchronize(handle)[0].item() for handle in handles)

    delivered = reduce_all()
    for step in range(3):
        if world.rank == late:
            for name in names:
                world.until(lambda name=name, step=step: completed(name) >= 2 * step + 2, "the round has ended here")
        delivered += reduce_all()
        hvd.flush()
        delivered += sum(collect(name, ones)[0].item() for name in names)
        assert delivered == len(names) * (step + 2) * world.size
        world.barrier()
