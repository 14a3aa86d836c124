"""Rounds under a script, for every front end.

The thresholds of rule 7 (a blocked rank) are out of reach here; `test_liveness.py` is about them.
"""

import time

import pytest
from harness.fronts import Front
from harness.matrix import scripted
from harness.script import Script, all_but, total, value
from harness.world import World

from horovod_partial.policies import Majority

pytestmark = scripted


def test_round_0_waits_for_every_rank(front: Front, world: World) -> None:
    script = Script(front, world, sync="solo")
    arrival = script.start(value(world.rank)) if world.rank != 1 else None
    script.must_wait(arrival)
    result, info = script.end(arrival or script.start(value(world.rank)))
    assert result == total(world)
    assert (info.round, info.fresh, info.gradients, info.late, info.staleness) == (0, world.size, world.size, False, 0)


@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_gets_the_result_at_once_and_delivers_with_its_next(front: Front, world: World, late: int) -> None:
    script = Script(front, world, sync=all_but(late, world))
    script.first()
    if world.rank == late:
        script.completed(2)  # the others' round 1
        result, info = script.arrive(value(late, 0))
        assert (info.late, info.staleness) == (True, 1)
    else:
        result, info = script.arrive(value(world.rank, 0))
        assert (info.late, info.staleness) == (False, 0)
    assert (result, info.round) == (total(world, without=late), 1)
    assert (info.fresh, info.gradients) == (world.size - 1, world.size - 1)
    # Round 2: the late rank comes first, so that it is on time, and brings both of its contributions.
    if world.rank == late:
        arrival = script.start(value(late, 1))
    front.fence(world)
    if world.rank != late:
        arrival = script.start(value(world.rank, 1))
    if world.size > 2:  # with two ranks the one that was late is the quorum
        result, info = script.end(arrival)
        expected = total(world, step=1) + value(late, 0)
        absent = [rank for rank in world.ranks if result == expected - value(rank, 1)]
        assert result == expected or len(absent) == 1, result
    else:
        script.end(arrival)
    front.hvd.flush()


@pytest.mark.parametrize("late", [0, 1])
def test_late_contribution_travels_without_its_rank(front: Front, world: World, late: int) -> None:
    """A notice tells the coordinator; the rank itself does not come again."""
    script = Script(front, world, sync=all_but(late, world))
    script.first()
    for step in range(2):
        if world.rank == late:
            script.completed(2 + step)
            if step == 0:
                script.arrive(value(late, 0))
        else:
            result, info = script.arrive(value(world.rank, step))
            pending = value(late, 0) if step == 1 else 0
            assert result == total(world, without=late, step=step) + pending
            assert (info.fresh, info.gradients, info.late) == (world.size - 1, world.size - 1 + step, False)
        front.fence(world)
    if world.rank == late:
        result, info = script.arrive(0)
        assert (result, info.round, info.staleness) == (total(world, without=late, step=1) + value(late, 0), 2, 1)
    front.hvd.flush()


@pytest.mark.parametrize("missed", ["replay", "latest"])
def test_missed_results(front: Front, world: World, missed: str) -> None:
    late = 1
    script = Script(front, world, sync=all_but(late, world, missed=missed))
    script.first()
    if world.rank != late:
        for step in range(3):
            script.arrive(value(world.rank, step))
    else:
        script.completed(4)
        result, info = script.arrive(0)
        rounds = [total(world, without=late, step=step) for step in range(3)]
        assert result == (rounds[-1] if missed == "latest" else sum(rounds))
        assert (info.round, info.late, info.staleness) == (3, True, 3)
    front.hvd.flush()


def test_an_average_is_divided_by_the_number_of_ranks(front: Front, world: World) -> None:
    late = 1
    script = Script(front, world, sync=all_but(late, world), op=front.hvd.Average)
    script.first()
    if world.rank == late:
        script.completed(2)
    result, _ = script.arrive(value(world.rank, 0))
    assert result == pytest.approx(total(world, without=late) / world.size)
    front.hvd.flush()


def test_i4_a_round_does_not_close_without_a_rank_that_is_too_stale(front: Front, world: World) -> None:
    late = 1
    script = Script(front, world, sync=all_but(late, world, max_staleness=2))
    script.first()
    arrival = None
    if world.rank != late:
        for step in range(2):
            script.arrive(value(world.rank, step))
        arrival = script.start(value(world.rank, 2))
    script.must_wait(arrival)
    if world.rank == late:
        result, info = script.arrive(value(late, 0))  # late; what it has pending is as good as an arrival
        assert result == sum(total(world, without=late, step=step) for step in range(2))
        assert (info.late, info.staleness) == (True, 2)
        script.completed(4)
    else:
        result, info = script.end(arrival)
        assert result == total(world, without=late, step=2) + value(late, 0)
        assert (info.round, info.fresh, info.gradients) == (3, world.size - 1, world.size)
    world.barrier()
    stats = world.same(front.hvd.partial_stats()[world.name()]["staleness_histogram"])
    assert max(stats) == 2
    front.hvd.flush()


@pytest.mark.launch(full_ranks=(4, 8))
def test_majority_closes_when_half_have_arrived(front: Front, world: World) -> None:
    script = Script(front, world, sync="majority")
    script.first()
    half = world.size // 2
    arrival = script.start(value(world.rank)) if world.rank < half - 1 else None
    script.must_wait(arrival)
    if world.rank == half - 1:
        arrival = script.start(value(world.rank))
    if arrival is not None:
        result, info = script.end(arrival)
        assert (result, info.fresh) == (sum(value(rank) for rank in range(half)), half)
    script.completed(2)
    front.hvd.flush()


def initiator(seed: int, number: int, size: int) -> int:
    """SplitMix64 of (seed, round), as the core draws."""
    mask = 2**64 - 1
    x = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) % size


def test_random_majority_closes_when_the_initiator_has_arrived(front: Front, world: World) -> None:
    script = Script(front, world, sync=Majority(initiator="random", seed=5))
    script.first()
    for number in range(1, 4):
        drawn = initiator(5, number, world.size)
        arrival = script.start(value(world.rank)) if world.rank != drawn else None
        script.must_wait(arrival)
        result, info = script.end(arrival or script.start(value(world.rank)))
        assert (result, info.fresh, info.round) == (total(world), world.size, number)
        world.barrier()
    drawn = initiator(5, 4, world.size)
    if world.rank == drawn:
        result, info = script.arrive(value(world.rank))
        assert (result, info.fresh) == (value(drawn), 1)
    script.completed(5)
    front.hvd.flush()


def test_grace_holds_a_satisfied_round_open(front: Front, world: World) -> None:
    script = Script(front, world, sync="solo:grace_ms=1e9")
    script.first()
    arrival = script.start(value(world.rank)) if world.rank == 0 else None
    script.must_wait(arrival)
    result, info = script.end(arrival or script.start(value(world.rank)))
    assert (result, info.fresh, info.round) == (total(world), world.size, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_flush_delivers_what_is_pending(front: Front, world: World, late: int) -> None:
    script = Script(front, world, sync=all_but(late, world))
    script.first()
    if world.rank == late:
        script.completed(2)
    script.arrive(value(world.rank))
    front.hvd.flush()
    result, info = script.arrive(0)
    assert (result, info.late, info.round, info.fresh, info.gradients) == (value(late), True, 2, 0, 1)
    assert front.hvd.partial_stats()[world.name()]["closed_by"]["flush"] == 1


def test_flush_of_nothing_is_no_update(front: Front, world: World) -> None:
    script = Script(front, world, sync="quorum:1.0")
    script.first()
    front.hvd.flush()
    result, info = script.arrive(value(world.rank))
    assert (result, info.late) == (total(world), False)


def test_arrival_offsets_name_the_slow_rank(front: Front, world: World) -> None:
    late = 1
    script = Script(front, world, sync=all_but(late, world))
    script.first()
    for step in range(3):
        if world.rank == late:
            script.completed(2 + step)
            time.sleep(0.05)  # far more than ranks differ by that come together
        script.arrive(0)
        front.fence(world)
    stats = front.hvd.partial_stats()[world.name()]
    assert ("arrival_offset_seconds" in stats) == (world.rank == 0)
    if world.rank == 0:
        offsets = stats["arrival_offset_seconds"]
        assert len(offsets) == world.size
        assert max(offsets) == offsets[late] > 0
    front.hvd.flush()
