"""Rounds under a script: who arrives when is fixed by events between the ranks, and every figure is known beforehand.

The thresholds of rule 7 (a blocked rank) are out of reach here; `test_liveness.py` is about them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.world import World

import horovod_partial.torch as hvd

STEADY = {"HOROVOD_PARTIAL_PARKED_MS": "1e7", "HOROVOD_PARTIAL_WAITING_MS": "1e7", "HOROVOD_PARTIAL_GRACE_MS": "0"}
pytestmark = pytest.mark.launch(label="scripted", environment=STEADY)


class Script:
    """A bucket of one number, driven step by step. Sums, so that each contribution can be told from the result."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.options = {"name": world.name(), "op": hvd.Sum, "dtype": torch.float64} | options
        self.dtype = self.options.pop("dtype")
        self.fences = 0

    def start(self, value: float) -> hvd.PartialHandle:
        return hvd.partial_allreduce_async(torch.tensor([value], dtype=self.dtype), **self.options)

    def end(self, handle: hvd.PartialHandle) -> tuple[float, hvd.RoundInfo]:
        result = hvd.synchronize(handle).item()
        return result, hvd.round_info(handle)

    def arrive(self, value: float) -> tuple[float, hvd.RoundInfo]:
        return self.end(self.start(value))

    def first(self) -> None:
        """Round 0, which is always full."""
        result, info = self.arrive(0)
        assert (result, info.round, info.late, info.fresh) == (0, 0, False, self.world.size)
        self.world.barrier()

    def fence(self) -> None:
        """When this returns, the coordinator has decided on everything that any rank has submitted before.

        An ordinary collective of all ranks is negotiated behind what was submitted before it.
        """
        for _ in range(2):
            hvd.allreduce(torch.zeros(1), name=self.world.name(f"fence.{self.fences}"))
            self.fences += 1

    def completed(self, rounds: int) -> None:
        """Wait until this rank has seen a number of rounds end."""
        name = self.options["name"]
        self.world.until(lambda: completed(name) >= rounds, f"round {rounds - 1} has ended here")

    def must_wait(self, handle: hvd.PartialHandle | None) -> None:
        """A handle that is there has no result yet, although the coordinator has had its chance to close the round."""
        self.fence()
        assert handle is None or not hvd.poll(handle)
        self.world.barrier()


def all_but(rank: int, world: World) -> hvd.Quorum:
    """The policy that closes a round as soon as all ranks but one are there."""
    assert 0 <= rank < world.size
    return hvd.Quorum(world.size - 1)


def total(world: World, *, without: int | None = None, step: int = 0) -> int:
    """The sum of `10 ** rank * (step + 1)`, so that each contribution is a digit of its own."""
    return sum(value(rank, step) for rank in world.ranks if rank != without)


def value(rank: int, step: int = 0) -> int:
    return 10**rank * (step + 1)


def test_round_0_waits_for_every_rank(world: World) -> None:
    script = Script(world, sync="solo")
    handle = script.start(value(world.rank)) if world.rank != 1 else None
    script.must_wait(handle)
    result, info = script.end(handle or script.start(value(world.rank)))
    assert result == total(world)
    assert (info.round, info.fresh, info.gradients, info.late, info.staleness) == (0, world.size, world.size, False, 0)


@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_gets_the_result_at_once_and_delivers_in_its_next_round(world: World, late: int) -> None:
    script = Script(world, sync=all_but(late, world))
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
        handle = script.start(value(late, 1))
    script.fence()
    if world.rank != late:
        handle = script.start(value(world.rank, 1))
    if world.size > 2:  # with two ranks the one that was late is the quorum
        result, info = script.end(handle)
        expected = total(world, step=1) + value(late, 0)
        absent = [rank for rank in world.ranks if result == expected - value(rank, 1)]
        assert result == expected or len(absent) == 1, result
    else:
        script.end(handle)
    hvd.flush()


@pytest.mark.parametrize("late", [0, 1])
def test_late_contribution_travels_without_its_rank(world: World, late: int) -> None:
    """A notice tells the coordinator; the rank itself does not come again."""
    script = Script(world, sync=all_but(late, world))
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
        script.fence()
    if world.rank == late:
        result, info = script.arrive(0)
        assert (result, info.round, info.staleness) == (total(world, without=late, step=1) + value(late, 0), 2, 1)
    hvd.flush()


@pytest.mark.parametrize("missed", ["sum", "latest"])
def test_missed_results(world: World, missed: str) -> None:
    late = 1
    script = Script(world, sync=all_but(late, world), missed=missed)
    script.first()
    if world.rank != late:
        for step in range(3):
            script.arrive(value(world.rank, step))
    else:
        script.completed(4)
        result, info = script.arrive(0)
        rounds = [total(world, without=late, step=step) for step in range(3)]
        assert result == (sum(rounds) if missed == "sum" else rounds[-1])
        assert (info.round, info.late, info.staleness) == (3, True, 3)
    hvd.flush()


def test_divisor_contributors(world: World) -> None:
    late = 1
    script = Script(world, sync=all_but(late, world), op=hvd.Average, divisor="contributors")
    script.first()
    if world.rank == late:
        script.completed(2)
        result, info = script.arrive(value(late, 0))
    else:
        result, info = script.arrive(value(world.rank, 0))
    assert info.gradients == world.size - 1
    assert result == pytest.approx(total(world, without=late) / (world.size - 1))
    script.fence()
    if world.rank == late:
        script.completed(3)
        result, info = script.arrive(0)
    else:
        result, info = script.arrive(value(world.rank, 1))
    assert info.gradients == world.size
    assert result == pytest.approx((total(world, without=late, step=1) + value(late, 0)) / world.size)
    hvd.flush()


def test_divisor_ranks(world: World) -> None:
    late = 1
    script = Script(world, sync=all_but(late, world), op=hvd.Average)
    script.first()
    if world.rank == late:
        script.completed(2)
    result, _ = script.arrive(value(world.rank, 0))
    assert result == pytest.approx(total(world, without=late) / world.size)
    hvd.flush()


def test_i4_a_round_does_not_close_without_a_rank_that_is_too_stale(world: World) -> None:
    late = 1
    script = Script(world, sync=all_but(late, world), max_staleness=2)
    script.first()
    handle = None
    if world.rank != late:
        for step in range(2):
            script.arrive(value(world.rank, step))
        handle = script.start(value(world.rank, 2))
    script.must_wait(handle)
    if world.rank == late:
        result, info = script.arrive(value(late, 0))  # late; what it has pending is as good as an arrival
        assert result == sum(total(world, without=late, step=step) for step in range(2))
        assert (info.late, info.staleness) == (True, 2)
        script.completed(4)
    else:
        result, info = script.end(handle)
        assert result == total(world, without=late, step=2) + value(late, 0)
        assert (info.round, info.fresh, info.gradients) == (3, world.size - 1, world.size)
    world.barrier()
    stats = world.same(hvd.partial_stats()[world.name()]["staleness_histogram"])
    assert max(stats) == 2
    hvd.flush()


@pytest.mark.launch(full_ranks=(4, 8))
def test_majority_closes_when_half_have_arrived(world: World) -> None:
    script = Script(world, sync="majority")
    script.first()
    half = world.size // 2
    handle = script.start(value(world.rank)) if world.rank < half - 1 else None
    script.must_wait(handle)
    if world.rank == half - 1:
        handle = script.start(value(world.rank))
    if handle is not None:
        result, info = script.end(handle)
        assert (result, info.fresh) == (sum(value(rank) for rank in range(half)), half)
    script.completed(2)
    hvd.flush()


def initiator(seed: int, number: int, size: int) -> int:
    """SplitMix64 of (seed, round), as the core draws."""
    mask = 2**64 - 1
    x = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) % size


def test_random_majority_closes_when_the_initiator_has_arrived(world: World) -> None:
    script = Script(world, sync=hvd.Majority(initiator="random", seed=5))
    script.first()
    for number in range(1, 4):
        drawn = initiator(5, number, world.size)
        handle = script.start(value(world.rank)) if world.rank != drawn else None
        script.must_wait(handle)
        result, info = script.end(handle or script.start(value(world.rank)))
        assert (result, info.fresh, info.round) == (total(world), world.size, number)
        world.barrier()
    drawn = initiator(5, 4, world.size)
    if world.rank == drawn:
        result, info = script.arrive(value(world.rank))
        assert (result, info.fresh) == (value(drawn), 1)
    script.completed(5)
    hvd.flush()


def test_grace_holds_a_satisfied_round_open(world: World) -> None:
    script = Script(world, sync="solo", grace_ms=1e9)
    script.first()
    handle = script.start(value(world.rank)) if world.rank == 0 else None
    script.must_wait(handle)
    result, info = script.end(handle or script.start(value(world.rank)))
    assert (result, info.fresh, info.round) == (total(world), world.size, 1)


def test_buckets_are_late_on_their_own(world: World) -> None:
    late = 1
    one = Script(world, sync=all_but(late, world), name=world.name("one"))
    two = Script(world, sync=all_but(late, world), name=world.name("two"))
    one.first()
    two.first()
    if world.rank == late:
        one.completed(2)
        assert one.arrive(value(late))[1].late
        handle = two.start(value(late))  # before the others, so it is on time
        world.tell("arrived")
        assert not two.end(handle)[1].late
    else:
        one.arrive(value(world.rank))
        world.wait_for("arrived")
        two.arrive(value(world.rank))
    hvd.flush()


@pytest.mark.parametrize("late", [0, 1])
def test_flush_delivers_what_is_pending(world: World, late: int) -> None:
    script = Script(world, sync=all_but(late, world))
    script.first()
    if world.rank == late:
        script.completed(2)
    script.arrive(value(world.rank))
    hvd.flush()
    result, info = script.arrive(0)
    assert (result, info.late, info.round, info.fresh, info.gradients) == (value(late), True, 2, 0, 1)
    assert hvd.partial_stats()[world.name()]["closed_by"]["flush"] == 1


def test_flush_of_nothing_is_no_update(world: World) -> None:
    script = Script(world, sync="quorum:1.0")
    script.first()
    hvd.flush()
    result, info = script.arrive(value(world.rank))
    assert (result, info.late) == (total(world), False)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_beside_an_allgather(world: World, late: int) -> None:
    """[run] Fusing looks tensors up behind an allgather before the responses are sent: the late entry must be there."""
    script = Script(world, sync=all_but(late, world))
    script.first()
    for step in range(5):
        handle = script.start(value(world.rank)) if world.rank != late else None
        rows = hvd.allgather_async(torch.full((1, 3), world.rank), name=world.name("rows"))
        if handle is not None:
            assert script.end(handle)[0] == total(world, without=late)
        assert hvd.synchronize(rows)[:, 0].tolist() == list(world.ranks)
        script.completed(2 + step)
        world.barrier()
    if world.rank == late:
        assert script.arrive(0)[0] == 5 * total(world, without=late)
    hvd.flush()


@pytest.mark.launch(label="slow-cycle", environment=STEADY | {"HOROVOD_CYCLE_TIME": "100"})
def test_fused_buckets(world: World) -> None:
    """[run] Rounds that close in one cycle travel fused, with their like only."""
    late = 1
    scales = [1.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    scripts = [
        Script(world, sync=all_but(late, world), name=world.name(str(i)), prescale_factor=scale)
        for i, scale in enumerate(scales)
    ]
    for handle in [script.start(0) for script in scripts]:
        hvd.synchronize(handle)
    world.barrier()
    for step in range(3):
        beside = hvd.allreduce_async(torch.ones(1), name=world.name("beside"), op=hvd.Sum)
        if world.rank != late:
            handles = [script.start(value(world.rank) * (i + 1)) for i, script in enumerate(scripts)]
            for i, (script, handle) in enumerate(zip(scripts, handles, strict=True)):
                assert script.end(handle)[0] == total(world, without=late) * (i + 1) * scales[i]
        assert hvd.synchronize(beside).item() == world.size
        for script in scripts:
            script.completed(2 + step)
        world.barrier()
    if world.rank == late:
        for i, script in enumerate(scripts):
            assert script.arrive(0)[0] == 3 * total(world, without=late) * (i + 1) * scales[i]
    hvd.flush()


@pytest.mark.launch(label="slow-cycle", environment=STEADY | {"HOROVOD_CYCLE_TIME": "100"})
def test_large_buckets_beside_fused_ones(world: World) -> None:
    """Rounds that close in one cycle: buckets of 4 MiB are taken out of what Horovod has fused."""
    late = 1
    elements = [10, 1 << 20, 20, (1 << 20) + 1, 30]
    arguments = {"op": hvd.Sum, "sync": all_but(late, world)}
    tensors = [torch.empty(count) for count in elements]
    names = [world.name(str(i)) for i in range(len(tensors))]

    def arrive(value: float) -> None:
        handles = [
            hvd.partial_allreduce_async_(tensor.fill_(value * (i + 1)), name=names[i], **arguments)
            for i, tensor in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def expect(value: float) -> None:
        for i, tensor in enumerate(tensors):
            assert tensor.eq(value * (i + 1)).all()

    arrive(1)
    expect(world.size)
    for step in range(2):
        world.barrier()
        if world.rank != late:
            arrive(1)
            expect(world.size - 1)
        for name in names:
            world.until(lambda name=name, step=step: completed(name) >= 2 + step, "the round has ended here")
    if world.rank == late:
        arrive(0)
        expect(2 * (world.size - 1))
    hvd.flush()


def test_round_info_of_an_operation_under_way(world: World) -> None:
    script = Script(world, sync="quorum:1.0")
    handle = script.start(1.0) if world.rank == 0 else None
    script.must_wait(handle)
    if handle is not None:
        with pytest.raises(ValueError, match="has not finished"):
            hvd.round_info(handle)
    world.barrier()
    handle = handle or script.start(1.0)
    world.until(lambda: hvd.poll(handle), "the operation has finished")
    assert hvd.round_info(handle).round == 0
    assert script.end(handle)[0] == world.size


def test_arrival_offsets_name_the_slow_rank(world: World) -> None:
    late = 1
    script = Script(world, sync=all_but(late, world))
    script.first()
    for step in range(3):
        if world.rank == late:
            script.completed(2 + step)
            script.arrive(0)
        else:
            script.arrive(0)
        script.fence()
    stats = hvd.partial_stats()[world.name()]
    assert ("arrival_offset_seconds" in stats) == (world.rank == 0)
    if world.rank == 0:
        offsets = stats["arrival_offset_seconds"]
        assert len(offsets) == world.size
        assert max(offsets) == offsets[late] > 0
    hvd.flush()
