"""The invariants of the round protocol (docs/protocol.md), for every front end, on real ranks with delays of their own.

Rounds under a script are in `test_conformance_rounds.py`, I5 (`Full()` is Horovod's own path) is in `test_full.py`, and I6
(no hang) in `test_liveness.py` and `test_jobs.py`: every test that waits is one for I6 too.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness.fronts import Front
from harness.world import World, delay

from horovod_partial import policies

POLICIES = ["solo", "majority", "majority:random", "quorum:0.75"]
STEPS = 40


@pytest.mark.parametrize("policy", POLICIES)
def test_i1_exactly_once(front: Front, world: World, policy: str) -> None:
    steps = {"mpi": 1000, "gloo": 200}[world.transport] if world.long else STEPS
    rng = random.Random(world.random().random() + world.rank)
    generator = np.random.default_rng(rng.randrange(2**32))
    names = [world.name(f"bucket.{index}") for index in range(3)]
    # Each bucket by two operations: a rank brings to it in place, or not.
    options = {"op": front.hvd.Sum, "sync": policy}
    operations = [[front.bind(in_place=in_place, name=name, **options) for in_place in (False, True)] for name in names]
    submitted, delivered = np.zeros((3, 7), np.int64), np.zeros((3, 7), np.int64)
    for step in range(steps):
        delay(rng)
        own = generator.integers(-1000, 1000, (3, 7))
        submitted += own
        in_place = rng.random() < 0.5
        make = front.variable if in_place else front.tensor
        arrivals = [begin[in_place](make(numbers, "int64")) for begin, numbers in zip(operations, own, strict=True)]
        if step % 10 == 0:
            rows = front.hvd.allgather(front.tensor(np.full((world.rank + 1, 2), world.rank)), name=world.name("rows"))
            assert front.array(rows)[:, 0].tolist() == [rank for rank in world.ranks for _ in range(rank + 1)]
        delivered += np.array([front.array(arrival.end()[0]) for arrival in arrivals])
    front.hvd.flush()
    delivered += np.array([front.collect(name, delivered[0]) for name in names])
    totals = np.array(world.gather(submitted.tolist())).sum(0)
    assert delivered.tolist() == totals.tolist()


@pytest.mark.parametrize("late", [0, 1])
def test_i1_a_flush_covers_all_buckets(front: Front, world: World, late: int) -> None:
    """When `flush` returns, the flush round of every bucket has ended here."""
    names = [world.name(str(index)) for index in range(8)]
    operations = [front.bind(name=name, op=front.hvd.Sum, sync=policies.Quorum(world.size - 1)) for name in names]
    ones = front.tensor(np.ones(200_000), "int64")

    def reduce_all() -> int:
        arrivals = [begin(ones) for begin in operations]
        return sum(front.array(arrival.end()[0])[0] for arrival in arrivals)

    delivered = reduce_all()
    for step in range(3):
        if world.rank == late:
            for name in names:
                ended = lambda name=name, step=step: front.completed(name) >= 2 * step + 2
                world.until(ended, "the round has ended here")
        delivered += reduce_all()
        front.hvd.flush()
        delivered += sum(front.collect(name, front.array(ones))[0] for name in names)
        assert delivered == len(names) * (step + 2) * world.size
        world.barrier()


@pytest.mark.parametrize("policy", POLICIES)
def test_i2_one_result(front: Front, world: World, policy: str) -> None:
    rng = random.Random(world.random().random() + world.rank)
    begin = front.bind(name=world.name(), sync=replace(policies.parse(policy), missed="latest"))
    seen: dict[int, bytes] = {}
    for _ in range(STEPS):
        delay(rng)
        result, info = begin(front.tensor([rng.random() for _ in range(33)])).end()
        seen[info.round] = front.array(result).tobytes()
    front.hvd.flush()
    everybody = world.gather(seen)
    rounds = sorted({number for results in everybody for number in results})
    differing = [n for n in rounds if len({results[n] for results in everybody if n in results}) != 1]
    assert rounds, "no round has run"
    assert not differing


def stats_of(front: Front, world: World, policy: str) -> dict[str, Any]:
    """What is told of a bucket in which ranks have arrived with delays."""
    rng = random.Random(world.random().random() + world.rank)
    begin = front.bind(name=world.name(), sync=policy)
    for _ in range(STEPS):
        delay(rng)
        begin(front.tensor(np.ones(3))).end()
    front.hvd.flush()
    return front.hvd.partial_stats()[world.name()]


@pytest.mark.parametrize("policy", ["solo", "majority", "quorum:3", "quorum:1.0"])
def test_i3_quorum(front: Front, world: World, policy: str) -> None:
    quorum = {"solo": 1, "majority": (world.size + 1) // 2, "quorum:3": min(3, world.size), "quorum:1.0": world.size}
    stats = stats_of(front, world, policy)
    histogram = world.same(stats["fresh_histogram"])
    exempt = sum(stats["closed_by"].get(reason, 0) for reason in ("liveness", "flush", "end"))
    assert sum(count for fresh, count in histogram.items() if fresh < quorum[policy]) <= exempt


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_i4_staleness(front: Front, world: World, bound: int) -> None:
    stats = stats_of(front, world, f"solo:max_staleness={bound}")
    staleness = world.same(stats["staleness_histogram"])
    exempt = stats["closed_by"].get("liveness", 0)
    assert sum(count for rounds, count in staleness.items() if rounds > bound) <= exempt * world.size


def test_i7_no_torn_data(front: Front, world: World) -> None:
    """The application writes into its tensor as soon as it may; a round's sum is of whole contributions."""
    rng = random.Random(world.random().random() + world.rank)
    begin = front.bind(in_place=True, name=world.name(), op=front.hvd.Sum, sync="solo")
    variable = front.variable(np.zeros(1 << 18), "int32")
    for step in range(60):
        delay(rng)
        front.fill(variable, (step << 4) + world.rank)
        result = front.array(begin(variable).end()[0])
        assert result.min() == result.max(), f"step {step}"
    front.hvd.flush()


def test_i8_on_time_means_no_extra_copy(front: Front, world: World) -> None:
    begin = front.bind(name=world.name(), sync="quorum:1.0")
    for _ in range(5):
        world.barrier()
        _, info = begin(front.tensor(np.ones(1000))).end()
        assert not info.late
    assert front.hvd.partial_stats()[world.name()]["bytes_held"] == 0
