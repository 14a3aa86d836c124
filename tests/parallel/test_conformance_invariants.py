"""The invariants of the round protocol (docs/protocol.md), for every front end, on real ranks with delays of their own.

I1 and I7, whose writing into tensors is a front end's own, are in `test_invariants.py` and `test_tensorflow.py`. Rounds
under a script are in `test_conformance_rounds.py`, I5 (`Full()` is Horovod's own path) is in `test_full.py`, and I6 (no
hang) in `test_liveness.py` and `test_jobs.py`: every test that waits is one for I6 too.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from harness.fronts import Front
from harness.world import World, delay

from horovod_partial import policies

POLICIES = ["solo", "majority", "majority:random", "quorum:0.75"]
STEPS = 40


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


@pytest.mark.parametrize("policy", ["solo", "majority", "quorum:3", "quorum:1.0"])
def test_i3_quorum(front: Front, world: World, policy: str) -> None:
    rng = random.Random(world.random().random() + world.rank)
    quorum = {"solo": 1, "majority": (world.size + 1) // 2, "quorum:3": min(3, world.size), "quorum:1.0": world.size}
    begin = front.bind(name=world.name(), sync=policy)
    for _ in range(STEPS):
        delay(rng)
        begin(front.tensor(np.ones(3))).end()
    front.hvd.flush()
    stats = world.same(front.hvd.partial_stats()[world.name()]["fresh_histogram"])
    closed_by = front.hvd.partial_stats()[world.name()]["closed_by"]
    exempt = sum(closed_by.get(reason, 0) for reason in ("liveness", "flush", "end"))
    assert sum(count for fresh, count in stats.items() if fresh < quorum[policy]) <= exempt


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_i4_staleness(front: Front, world: World, bound: int) -> None:
    rng = random.Random(world.random().random() + world.rank)
    begin = front.bind(name=world.name(), sync=f"solo:max_staleness={bound}")
    for _ in range(STEPS):
        delay(rng)
        begin(front.tensor(np.ones(3))).end()
    front.hvd.flush()
    stats = front.hvd.partial_stats()[world.name()]
    staleness = world.same(stats["staleness_histogram"])
    exempt = stats["closed_by"].get("liveness", 0)
    assert sum(count for rounds, count in staleness.items() if rounds > bound) <= exempt * world.size


def test_i8_on_time_means_no_extra_copy(front: Front, world: World) -> None:
    begin = front.bind(name=world.name(), sync="quorum:1.0")
    for _ in range(5):
        world.barrier()
        _, info = begin(front.tensor(np.ones(1000))).end()
        assert not info.late
    assert front.hvd.partial_stats()[world.name()]["bytes_held"] == 0
