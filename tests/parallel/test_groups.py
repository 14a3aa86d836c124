"""`hvd.group_allreduce`, `hvd.partial_reduce`, `hvd.weighted_average`: averages of models in groups of ranks.

What a call returns follows from its `round_info`, whoever was late: that is checked where ranks race. Where the order of
arrivals is scripted, so are the results.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from harness.buckets import completed
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial import _core

STEADY = {"HOROVOD_PARTIAL_PARKED_MS": "1e7", "HOROVOD_PARTIAL_WAITING_MS": "1e7", "HOROVOD_PARTIAL_GRACE_MS": "0"}
pytestmark = pytest.mark.launch(full_ranks=(4, 8))
scripted = pytest.mark.launch(label="scripted", environment=STEADY | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
four = pytest.mark.launch(full_ranks=(4,))

FOR_EVER = 1e9  # milliseconds: a round with this grace closes when everybody is there
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FORMS = {
    "group_allreduce": (
        hvd.group_allreduce,
        hvd.group_allreduce_,
        lambda *args, **kwargs: hvd.synchronize(hvd.group_allreduce_async(*args, **kwargs)),
        lambda *args, **kwargs: hvd.synchronize(hvd.group_allreduce_async_(*args, **kwargs)),
    ),
    "partial_reduce": (
        hvd.partial_reduce,
        hvd.partial_reduce_,
        lambda *args, **kwargs: hvd.synchronize(hvd.partial_reduce_async(*args, **kwargs)),
        lambda *args, **kwargs: hvd.synchronize(hvd.partial_reduce_async_(*args, **kwargs)),
    ),
    "weighted_average": (
        hvd.weighted_average,
        hvd.weighted_average_,
        lambda *args, **kwargs: hvd.synchronize(hvd.weighted_average_async(*args, **kwargs)),
        lambda *args, **kwargs: hvd.synchronize(hvd.weighted_average_async_(*args, **kwargs)),
    ),
}


def value(rank: int, step: int = 0) -> float:
    """A model of one number: each contribution is a digit of its own in a sum."""
    return float(10**rank * (step + 1))


def model(rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (37,)) -> torch.Tensor:
    """A model of random numbers, which every rank can make."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def mean(models: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([m.double() for m in models]).mean(0)


def ended(handle: hvd.PartialHandle) -> tuple[torch.Tensor, hvd.RoundInfo]:
    return hvd.synchronize(handle), hvd.round_info(handle)


def group_of(rank: int, groups: list[list[int]]) -> tuple[int, ...]:
    (mine,) = [members for members in groups if rank in members]
    return tuple(mine)


def same_within_groups(world: World, rounds: list[tuple[hvd.RoundInfo, torch.Tensor]]) -> None:
    """All that were on time in a group have the same bits; every on-time member of a group is found."""
    results = defaultdict(dict)
    for rank, theirs in enumerate(world.gather([(info, result.numpy().tobytes()) for info, result in rounds])):
        for info, result in theirs:
            if not info.late:
                results[info.round, info.members][rank] = (result, info.fresh)
    for (number, members), by_rank in results.items():
        assert len({result for result, _ in by_rank.values()}) == 1, f"round {number} of {members}"
        assert set(by_rank) <= set(members)
        assert {fresh for _, fresh in by_rank.values()} == {len(by_rank)}, f"round {number} of {members}"


def check_that_the_job_goes_on(world: World) -> None:
    result = hvd.group_allreduce(torch.tensor([value(world.rank)]), name=world.name("after"), op=hvd.Sum)
    assert result.item() == sum(map(value, world.ranks))
    assert hvd.allreduce(torch.tensor([1]), name=world.name("after.full"), op=hvd.Sum).item() == world.size


class Script:
    """A group allreduce of one number, driven step by step."""

    def __init__(self, world: World, schedule: Any, **options: Any) -> None:
        self.world = world
        self.name = world.name()
        self.options = {"name": self.name, "schedule": schedule, **options}
        self.fences = count()

    def start(self, number: float) -> hvd.PartialHandle:
        return hvd.group_allreduce_async(torch.tensor([number], dtype=torch.float64), **self.options)

    def end(self, handle: hvd.PartialHandle) -> tuple[float, hvd.RoundInfo]:
        result, info = ended(handle)
        return result.item(), info

    def arrive(self, number: float) -> tuple[float, hvd.RoundInfo]:
        return self.end(self.start(number))

    def first(self) -> None:
        """Round 0, of all ranks together."""
        result, info = self.arrive(value(self.world.rank))
        assert (result, info.round, info.late) == (sum(map(value, self.world.ranks)) / self.world.size, 0, False)
        assert info.members == tuple(self.world.ranks)
        self.world.barrier()

    def completed(self, rounds: int) -> None:
        """Wait until this rank has seen a number of rounds end."""
        self.world.until(lambda: completed(self.name) >= rounds, f"round {rounds - 1} has ended here")

    def fence(self) -> None:
        """When this returns, the coordinator knows of all that any rank has done before."""
        for _ in range(2):
            hvd.allreduce(torch.zeros(1), name=self.world.name(f"fence.{next(self.fences)}"))

    def must_wait(self, handle: hvd.PartialHandle | None) -> None:
        """A handle that is there has no result yet, although the coordinator has had its chance to close the round."""
        self.fence()
        assert handle is None or not hvd.poll(handle)
        self.world.barrier()


# --- Group allreduce: everybody on time -------------------------------------------------------------------------------

SCHEDULES = {
    "butterfly": lambda: hvd.Butterfly(2),
    "butterfly of 3": lambda: hvd.Butterfly(3),
    "ring": lambda: hvd.Ring(2),
    "ring of 3": lambda: hvd.Ring(3),
    "larger than the job": lambda: hvd.Butterfly(64),
    "function": lambda: hvd.Schedule(lambda round, rank: (rank + round) // 2 % 2, 4),
    "one rank alone": lambda: hvd.Schedule(lambda round, rank: min(rank, 1), 1),
}


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_of_a_schedule(world: World, schedule: str, op: str) -> None:
    groups = SCHEDULES[schedule]()
    script = Script(world, groups, op=getattr(hvd, op), grace_ms=FOR_EVER)
    for number in range(5):
        result, info = script.arrive(value(world.rank, number))
        members = group_of(world.rank, groups.groups(number, world.size)) if number else tuple(world.ranks)
        assert (info.round, info.late, info.members, info.staleness) == (number, False, members, 0)
        assert info.fresh == info.gradients == len(members)
        total = sum(value(rank, number) for rank in members)
        assert result == (total if op == "Sum" else pytest.approx(total / len(members), rel=1e-12))


def test_the_default_schedule(world: World) -> None:
    script = Script(world, None, grace_ms=FOR_EVER)
    script.first()
    members = group_of(world.rank, hvd.Butterfly(2).groups(1, world.size))
    assert script.arrive(value(world.rank))[1].members == members


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_forms_of_group_allreduce(world: World, dtype: torch.dtype) -> None:
    schedule = hvd.Butterfly(2)
    options = {"name": world.name(), "schedule": schedule, "grace_ms": FOR_EVER}
    for number, form in enumerate(FORMS["group_allreduce"]):
        tensor = model(world.rank, dtype, (5, 7))
        result = form(tensor, **options)
        members = group_of(world.rank, schedule.groups(number, world.size)) if number else tuple(world.ranks)
        expected = mean([model(rank, dtype, (5, 7)) for rank in members])
        assert (result.dtype, result.shape) == (dtype, (5, 7))
        assert torch.allclose(result.double(), expected, atol=TOLERANCE.get(dtype, 1e-6))
        in_place = number % 2 == 1
        assert (result.data_ptr() == tensor.data_ptr()) == in_place
        assert torch.equal(tensor, result if in_place else model(world.rank, dtype, (5, 7)))
        everybody = world.gather(result.double().tolist())
        assert all(everybody[rank] == everybody[world.rank] for rank in members)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sums_of_integers(world: World, dtype: torch.dtype) -> None:
    schedule = hvd.Butterfly(2)
    options = {"name": world.name(), "schedule": schedule, "op": hvd.Sum, "grace_ms": FOR_EVER}
    for number in range(3):
        result = hvd.group_allreduce(torch.tensor([10**world.rank], dtype=dtype), **options)
        members = group_of(world.rank, schedule.groups(number, world.size)) if number else tuple(world.ranks)
        assert result.tolist() == [sum(10**rank for rank in members)]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (70_000,)], ids=str)
def test_shapes(world: World, shape: tuple[int, ...]) -> None:
    for start in (hvd.group_allreduce_async, hvd.partial_reduce_async):
        options = {"grace_ms": FOR_EVER} if start is hvd.group_allreduce_async else {"size": world.size}
        for _ in range(3):
            result, info = ended(
                start(torch.full(shape, value(world.rank)), name=world.name(start.__name__), **options)
            )
            assert result.shape == shape
            expected = torch.full(shape, sum(value(rank) for rank in info.members) / len(info.members))
            assert torch.allclose(result, expected)


@four
def test_all_groups_that_there_are(world: World) -> None:
    """Every partition of the ranks, twice: communicators are made once, before the first round with groups."""
    partitions: list[list[int]] = [[0]]
    for _ in range(world.size - 1):
        partitions = [[*p, group] for p in partitions for group in range(max(p) + 2)]
    assert len(partitions) == 15
    schedule = hvd.Schedule(lambda round, rank: partitions[round][rank], len(partitions))
    script = Script(world, schedule, op=hvd.Sum, grace_ms=FOR_EVER)
    made = 0
    for number in range(2 * len(partitions) + 1):
        result, info = script.arrive(value(world.rank))
        partition = partitions[number % len(partitions)] if number else [0] * world.size
        members = tuple(rank for rank in world.ranks if partition[rank] == partition[world.rank])
        assert (info.round, info.late, info.members) == (number, False, members)
        assert result == sum(map(value, members))
        stats = hvd.partial_stats()[script.name]
        made = made or stats["groups_made"]
        assert stats["groups_made"] == made <= 7  # groups of two and more that hold this rank


@scripted
@pytest.mark.parametrize("kind", ["group_allreduce", "partial_reduce"])
def test_a_process_set_of_three(world: World, processes: hvd.ProcessSet, kind: str) -> None:
    """Schedules and members count the ranks of the set."""
    schedule = hvd.Ring(2)
    for number in range(4):
        if not processes.included():
            break
        own = processes.ranks.index(world.rank)
        arguments = {"name": world.name(), "process_set": processes}
        if kind == "group_allreduce":
            arguments |= {"schedule": schedule, "grace_ms": FOR_EVER}
            members = group_of(own, schedule.groups(number, 3)) if number else (0, 1, 2)
        else:
            arguments |= {"size": 3}
            members = (0, 1, 2)
        start = hvd.group_allreduce_async if kind == "group_allreduce" else hvd.partial_reduce_async
        result, info = ended(start(torch.tensor([value(own)]), **arguments))
        assert info.members == members
        assert result.item() == pytest.approx(sum(map(value, members)) / len(members))
    if processes.included():
        hvd.flush(process_set=processes)
        assert world.name() in hvd.partial_stats(process_set=processes)
    else:
        with pytest.raises(ValueError, match=r"not in (the )?process set"):
            getattr(hvd, kind)(torch.zeros(1), name=world.name(), process_set=processes)
    world.barrier()
    check_that_the_job_goes_on(world)


@scripted
@pytest.mark.parametrize("policy", ["group_average", "partial_reduce:2", "weighted_average:2:0.9"])
def test_an_optimizer_on_a_process_set_of_three(world: World, processes: hvd.ProcessSet, policy: str) -> None:
    """The rank outside trains by itself."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync=policy, process_set=processes)
    for _ in range(2):
        optimizer.zero_grad()
        (weight.sum() * (world.rank + 1)).backward()
        optimizer.step()
    optimizer.flush()
    everybody = world.gather(weight.tolist())
    assert everybody[1] == [-4.0] * 3
    assert everybody[0] == everybody[2] == everybody[3] != everybody[1]
    assert optimizer.rounds >= 1


@scripted
@pytest.mark.parametrize("kind", ["group_allreduce", "partial_reduce", "partial_allreduce"])
def test_a_process_set_of_one_rank(world: World, kind: str) -> None:
    """Its rounds close without anybody else's list of requests."""
    sets = [hvd.add_process_set([rank]) for rank in world.ranks]
    own = sets[world.rank]
    options = {"sync": "solo"} if kind == "partial_allreduce" else {}
    for step in range(4):
        value = torch.tensor([float(10 * step + world.rank)])
        result = getattr(hvd, kind)(value, name=world.name(), process_set=own, **options)
        assert result.item() == 10 * step + world.rank
    hvd.flush(process_set=own)
    assert hvd.partial_stats(process_set=own)[world.name()]["rounds"] >= 4
    world.barrier()
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.fixture
def processes(world: World) -> Iterator[hvd.ProcessSet | None]:
    if world is None:  # here only the outcome is asked for
        yield None
        return
    process_set = hvd.add_process_set([0, 2, 3])
    yield process_set
    world.barrier()
    hvd.remove_process_set(process_set)


# --- Group allreduce: late ranks --------------------------------------------------------------------------------------


@scripted
@four
@pytest.mark.parametrize("late", [0, 1])
def test_c3_a_late_rank(world: World, late: int) -> None:
    """papers.md, C3: the partner gets (W + old W1) / 2, and rank 1 (Wsum + W1) / 3. The late rank may coordinate."""
    partner = 1 - late
    script = Script(world, hvd.Schedule(lambda round, rank: rank // 2, 1))
    script.first()
    old, new = value(late), value(late, 4)
    if world.rank == partner:
        result, info = script.arrive(value(partner, 1))
        assert (info.round, info.late, info.fresh, info.gradients) == (1, False, 1, 2)
        assert result == (value(partner, 1) + old) / 2
    script.completed(2)
    if world.rank == late:
        result, info = script.arrive(new)
        assert (info.round, info.late, info.staleness) == (1, True, 1)
        assert result == pytest.approx((value(partner, 1) + old + new) / 3, rel=1e-15)
    elif world.rank != partner:  # their group ran without them, with both their models of round 0
        result, info = script.arrive(value(world.rank, 1))
        assert (info.round, info.late, info.fresh, info.gradients) == (1, True, 0, 2)
        assert result == pytest.approx((value(2) + value(3) + value(world.rank, 1)) / 3)
    assert info.members == ((0, 1) if world.rank < 2 else (2, 3))
    script.fence()
    # From now on the new model stands in for it.
    if world.rank == partner:
        result, info = script.arrive(value(partner, 2))
        assert (result, info.round, info.late) == ((value(partner, 2) + new) / 2, 2, False)
    script.completed(3)
    hvd.flush()


@four
def test_c3_with_all_others_on_time(world: World) -> None:
    """The late rank waits in a collective of Horovod's own meanwhile, so that a grace without end does not hold."""
    late, partner = 1, 3  # of round 1 of the butterfly
    script = Script(world, hvd.Butterfly(2), grace_ms=FOR_EVER)
    script.first()
    gate = hvd.allreduce_async(torch.ones(1), name=world.name("gate")) if world.rank == late else None
    if world.rank == late:
        script.completed(2)
        result, info = script.arrive(value(late, 1))
        assert (info.round, info.late, info.fresh, info.gradients) == (1, True, 1, 2)
        assert result == pytest.approx((value(partner, 1) + value(late) + value(late, 1)) / 3)
    else:
        result, info = script.arrive(value(world.rank, 1))
        assert (info.round, info.late) == (1, False)
        if world.rank == partner:
            assert (result, info.fresh) == ((value(partner, 1) + value(late)) / 2, 1)
        else:
            assert (result, info.fresh) == ((value(0, 1) + value(2, 1)) / 2, 2)
    assert info.members == ((1, 3) if world.rank % 2 else (0, 2))
    world.barrier()
    gate = gate or hvd.allreduce_async(torch.ones(1), name=world.name("gate"))
    hvd.synchronize(gate)
    result, info = script.arrive(value(world.rank, 2))
    assert (info.round, info.late, info.fresh) == (2, False, 2)
    assert result == sum(value(rank, 2) for rank in info.members) / 2
    assert hvd.partial_stats()[script.name]["closed_by"]["liveness"] == 1


@scripted
@four
def test_several_rounds_late(world: World) -> None:
    """It takes the newest result, in the group that it was in then; the model that it had sent last is in all of them."""
    late, first = 1, 0
    schedule = hvd.Ring(2)
    script = Script(world, schedule)
    script.first()
    for number in (1, 2, 3):
        if world.rank == first:
            result, info = script.arrive(value(first, number))
            members = group_of(first, schedule.groups(number, world.size))
            (partner,) = set(members) - {first}
            assert (info.members, info.late) == (members, False)
            assert result == (value(first, number) + value(partner)) / 2
    script.completed(4)
    if world.rank != first:
        members = group_of(world.rank, schedule.groups(3, world.size))
        result, info = script.arrive(value(world.rank, 9))
        assert (info.round, info.late, info.staleness, info.members) == (3, True, 3, members)
        total = sum(value(rank, 3 if rank == first else 0) for rank in members)
        assert result == pytest.approx((total + value(world.rank, 9)) / 3)
        assert (late in members) == (world.rank in (late, 2))
    hvd.flush()


@scripted
@four
def test_sum_of_a_late_rank_has_its_older_model(world: World) -> None:
    script = Script(world, hvd.Schedule(lambda round, rank: rank // 2, 1), op=hvd.Sum)
    script.arrive(value(world.rank))
    world.barrier()
    if world.rank == 0:
        assert script.arrive(value(0, 1))[0] == value(0, 1) + value(1)
    script.completed(2)
    if world.rank == 1:
        result, info = script.arrive(value(1, 4))
        assert (result, info.late) == (value(0, 1) + value(1), True)
    hvd.flush()


@scripted
def test_max_staleness_of_kept_models(world: World) -> None:
    """The same model stands in for its rank in so many rounds, then the others wait for that rank."""
    schedule = hvd.Butterfly(2)
    script = Script(world, schedule, max_staleness=2)
    script.first()
    handle = None
    if world.rank == 0:
        for number in (1, 2):
            assert script.arrive(value(0, number))[1].fresh == 1
        handle = script.start(value(0, 3))
    script.must_wait(handle)
    if world.rank != 0:
        result, info = script.arrive(value(world.rank, 1))  # late; what it has sent now is as good as an arrival
        assert (info.round, info.late, info.staleness) == (2, True, 2)
    else:
        result, info = script.end(handle)
        assert (info.round, info.late, info.fresh) == (3, False, 1)
        (partner,) = set(info.members) - {0}
        assert result == (value(0, 3) + value(partner, 1)) / 2
    script.completed(4)
    hvd.flush()
    assert max(hvd.partial_stats()[script.name]["staleness_histogram"]) == 2


@scripted
def test_a_full_round_waits_for_everybody(world: World) -> None:
    script = Script(world, hvd.Butterfly(2), period=2)
    script.first()
    for number in (1, 2, 3):
        full = number % 2 == 1
        handle = script.start(value(world.rank, number)) if world.rank != 1 and full else None
        if full:
            script.must_wait(handle)
            result, info = script.end(handle or script.start(value(world.rank, number)))
            assert (info.round, info.late, info.members) == (number, False, tuple(world.ranks))
            assert result == sum(value(rank, number) for rank in world.ranks) / world.size
        else:
            if world.rank == 0:
                assert len(script.arrive(value(0, number))[1].members) == 2
            script.completed(number + 1)
            if world.rank != 0:
                assert script.arrive(value(world.rank, number))[1].late
        world.barrier()


def check_race(world: World, start: Callable[[float], hvd.PartialHandle], last: int, groups: Any, period: int) -> None:
    """Ranks arrive as they can, with the same model each time, until they have seen a round."""
    own = value(world.rank)
    seen = []
    while not seen or seen[-1][0].round < last:
        result, info = ended(start(own))
        seen.append((info, result))
        full = info.round == 0 or (info.round + 1) % period == 0
        members = tuple(world.ranks) if full else group_of(world.rank, groups.groups(info.round, world.size))
        assert info.members == members
        assert not (full and info.late)
        total, models = sum(map(value, members)), len(members)
        expected = (total + own) / (models + 1) if info.late else total / models
        assert result.item() == pytest.approx(expected, rel=1e-12)
    assert seen[-1][0].round == last
    same_within_groups(world, seen)


def test_every_period_th_round_all_are_equal(world: World) -> None:
    groups = hvd.Butterfly(2)
    arguments = {"name": world.name(), "schedule": groups, "period": 3}
    check_race(
        world,
        lambda own: hvd.group_allreduce_async(torch.tensor([own], dtype=torch.float64), **arguments),
        14,
        groups,
        3,
    )


def test_two_schedules_in_flight_at_the_same_time(world: World) -> None:
    """One negotiation may close both: groups neither collide nor fuse."""
    schedules = {"one": hvd.Butterfly(2), "two": hvd.Ring(2), "three": hvd.Butterfly(2)}
    seen: dict[str, list[tuple[hvd.RoundInfo, torch.Tensor]]] = {name: [] for name in schedules}
    rng = world.random()
    for _ in range(12):
        names = list(schedules)
        rng.shuffle(names)
        handles = {
            name: hvd.group_allreduce_async(
                torch.tensor([value(world.rank)] * 3), name=world.name(name), schedule=schedules[name]
            )
            for name in names
        }
        for name in reversed(names):
            result, info = ended(handles[name])
            seen[name].append((info, result))
            if info.round:
                assert info.members == group_of(world.rank, schedules[name].groups(info.round, world.size))
            total = sum(map(value, info.members)) + (value(world.rank) if info.late else 0)
            expected = torch.full((3,), total / (len(info.members) + info.late))
            assert torch.allclose(result, expected), (name, info)
    for rounds in seen.values():
        same_within_groups(world, rounds)
    hvd.flush()


def test_groups_beside_other_collectives(world: World) -> None:
    for step in range(6):
        handle = hvd.group_allreduce_async(torch.tensor([value(world.rank)]), name=world.name("group"))
        partial = hvd.partial_allreduce_async(torch.ones(2), name=world.name("partial"), op=hvd.Sum, sync="quorum:1.0")
        rows = hvd.allgather_async(torch.full((1, 2), world.rank), name=world.name("rows"))
        full = hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum)
        assert full.item() == step * world.size
        assert hvd.synchronize(rows)[:, 0].tolist() == list(world.ranks)
        hvd.synchronize(partial)
        result, info = ended(handle)
        total = sum(map(value, info.members)) + (value(world.rank) if info.late else 0)
        assert result.item() == pytest.approx(total / (len(info.members) + info.late))
    hvd.flush()


# --- Group allreduce: ranks that come and go --------------------------------------------------------------------------


@pytest.mark.parametrize("period", [None, 4])
@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_calls_more_often(world: World, period: int | None, busy: int) -> None:
    """The others wait in a flush: their models stand in for them, also where a round waits for all."""
    own = value(world.rank)
    for _ in range(24 if world.rank == busy else 6):
        result, info = ended(
            hvd.group_allreduce_async(
                torch.tensor([own], dtype=torch.float64), name=world.name(), schedule=hvd.Ring(2), period=period
            )
        )
        total = sum(map(value, info.members)) + (own if info.late else 0)
        assert result.item() == pytest.approx(total / (len(info.members) + info.late), rel=1e-12)
    hvd.flush()


def test_flush_delivers_no_model(world: World) -> None:
    """A flush is no round: nothing is averaged, and the groups go on where they were."""
    schedule = hvd.Butterfly(2)
    script = Script(world, schedule, grace_ms=FOR_EVER)
    script.first()
    for number in (1, 2, 3):
        hvd.flush()
        result, info = script.arrive(value(world.rank, number))
        members = group_of(world.rank, schedule.groups(number, world.size))
        assert (info.round, info.late, info.members) == (number, False, members)
        assert result == sum(value(rank, number) for rank in members) / 2
    hvd.flush()
    stats = hvd.partial_stats()[script.name]
    assert stats["rounds"] == 4
    assert stats["on_time"] == [4] * world.size


@pytest.mark.parametrize("kind", ["group", "full rounds", "ready"])
def test_join(world: World, kind: str) -> None:
    """A joined rank has no model in any average, and is back after the join."""
    arguments: dict[str, Any] = {"name": world.name()}
    if kind == "ready":
        start = hvd.partial_reduce_async
    else:
        start = hvd.group_allreduce_async
        arguments |= {"schedule": hvd.Ring(2), "period": 3 if kind == "full rounds" else None}

    def calls(number: int) -> None:
        own = value(world.rank)
        for _ in range(number):
            result, info = ended(start(torch.tensor([own], dtype=torch.float64), **arguments))
            models = [value(rank) for rank in info.members] + [own] * info.late
            assert result.item() == pytest.approx(sum(models) / len(models), rel=1e-12)

    calls(4 + 4 * world.rank)
    world.same(hvd.join())
    calls(4)
    hvd.flush()
    check_that_the_job_goes_on(world)


def test_a_first_round_without_a_joined_rank(world: World) -> None:
    """It has never used the bucket, and its groups have a rank less."""
    if world.rank != 1:
        for _ in range(4):
            result, info = ended(hvd.group_allreduce_async(torch.tensor([value(world.rank)]), name=world.name()))
            assert 1 not in info.members
            models = [value(rank) for rank in info.members] + [value(world.rank)] * info.late
            assert result.item() == pytest.approx(sum(models) / len(models))
    hvd.join()
    check_that_the_job_goes_on(world)


# --- Errors -----------------------------------------------------------------------------------------------------------

group, ready, weighted = hvd.group_allreduce_async, hvd.partial_reduce_async, hvd.weighted_average_async


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        ((group, {"schedule": hvd.Ring(2)}), (group, {}), ("Ring(size=2)", "GroupAverage(")),
        ((group, {"schedule": hvd.Butterfly(3)}), (group, {"schedule": hvd.Butterfly(2)}), ("size=3", "size=2")),
        (
            (group, {"schedule": hvd.Schedule(lambda round, rank: rank % 2, 2)}),
            (group, {"schedule": hvd.Schedule(lambda round, rank: rank // 2, 2)}),
            ("Schedule(rounds=2, groups",),
        ),
        ((group, {"period": 4}), (group, {"period": 5}), ("period=4", "period=5")),
        ((group, {"op": hvd.Sum}), (group, {}), ("op=Sum", "op=Average")),
        ((ready, {"size": 3}), (ready, {"size": 2}), ("size=3", "size=2")),
        ((ready, {"weights": "staleness"}), (ready, {}), ("weights='staleness'", "weights='constant'")),
        ((ready, {"alpha": 0.5}), (ready, {}), ("alpha=0.5", "alpha=0.9")),
        ((ready, {"window": 5}), (ready, {}), ("window=5", "window=None")),
        ((ready, {}), (group, {}), ("PartialReduce(", "GroupAverage(")),
        (
            (weighted, {"steps": 1, "contraction": 0.9}),
            (weighted, {"steps": 1, "contraction": 0.8}),
            ("contraction=0.9", "contraction=0.8"),
        ),
    ],
    ids=[
        "kind",
        "size of groups",
        "function",
        "period",
        "op",
        "size",
        "weights",
        "alpha",
        "window",
        "operation",
        "contraction",
    ],
)
def test_the_ranks_disagree(world: World, odd: int, own: Any, others: Any, words: tuple[str, ...]) -> None:
    start, options = own if world.rank == odd else others
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(start(torch.zeros(3), name=world.name(), **options))
    text = world.same(str(caught.value))
    assert all(part in text for part in ("Mismatched sync policies", "rank 0", "rank 1", *words)), text
    # The name is free again.
    assert hvd.group_allreduce(torch.tensor([1.0]), name=world.name(), op=hvd.Sum).item() == world.size


def test_wrong_arguments(world: World) -> None:
    tensor = torch.zeros(4, 4)
    name = world.name()
    for start, options in ((group, {}), (ready, {}), (weighted, {"steps": 1, "contraction": 0.9})):
        with pytest.raises(ValueError, match="needs a name"):
            start(tensor, **options)
        with pytest.raises(ValueError, match="required to be contiguous"):
            start(tensor.t()[:2], name=name, **options)
        with pytest.raises(ValueError, match="not differentiable"):
            start(torch.zeros(2, requires_grad=True), name=name, **options)
        with pytest.raises(ValueError, match="meta"):
            start(torch.zeros(3, device="meta"), name=name, **options)
        with pytest.raises(ValueError, match=r"not supported|floating-point"):
            start(torch.zeros(3, dtype=torch.complex64), name=name, **options)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (group, {"op": hvd.Max}, ValueError, r"hvd.Average or hvd.Sum"),
        (group, {"op": hvd.Adasum}, ValueError, r"hvd.Average or hvd.Sum"),
        (group, {"schedule": "ring"}, TypeError, "schedule must be"),
        (group, {"schedule": 2}, TypeError, "schedule must be"),
        (group, {"period": 0}, ValueError, "period must be 1 or more"),
        (group, {"max_staleness": -1}, ValueError, "max_staleness must be"),
        (group, {"grace_ms": "long"}, ValueError, "grace_ms must be"),
        (ready, {"size": 1}, ValueError, "size must be 2 or more"),
        (ready, {"size": 2.0}, TypeError, "size must be an int"),
        (ready, {"weights": "equal"}, ValueError, "weights must be"),
        (ready, {"alpha": 0.0}, ValueError, "alpha must be"),
        (ready, {"window": 0}, ValueError, "window must be"),
        (weighted, {"steps": -1, "contraction": 0.9}, ValueError, "steps must be 0 or more"),
        (weighted, {"steps": 2**31, "contraction": 0.9}, ValueError, "steps must be 0 or more, and below"),
        (weighted, {"steps": 1.5, "contraction": 0.9}, TypeError, "steps must be an int"),
        (weighted, {"steps": True, "contraction": 0.9}, TypeError, "steps must be an int"),
        (weighted, {"steps": 1, "contraction": 0.0}, ValueError, "contraction must be above 0"),
        (weighted, {"steps": 1, "contraction": 1.1}, ValueError, "contraction must be above 0"),
    ]
    for start, options, error, text in cases:
        with pytest.raises(error, match=text):
            start(tensor, name=name, **options)
    for start, options in ((ready, {}), (weighted, {"steps": 1, "contraction": 0.9})):
        with pytest.raises(ValueError, match=r"needs floating-point tensors, not torch.int64"):
            start(torch.zeros(3, dtype=torch.int64), name=name, **options)
    assert name not in hvd.partial_stats()
    check_that_the_job_goes_on(world)


@pytest.mark.parametrize("policy", ["group_average", "partial_reduce:2", "weighted_average:2:0.9"])
def test_partial_allreduce_takes_no_model_policy(world: World, policy: str) -> None:
    with pytest.raises(ValueError, match=r"averages models: use hvd.group_allreduce, hvd.partial_reduce or"):
        hvd.partial_allreduce(torch.zeros(1), name=world.name(), sync=policy)


def test_name_bound_to_another_declaration(world: World) -> None:
    name = world.name()
    group_options = {"name": name, "grace_ms": FOR_EVER}
    hvd.group_allreduce(torch.zeros(3), **group_options)
    for start, options in (
        (group, {**group_options, "schedule": hvd.Ring(2)}),
        (group, {**group_options, "period": 3}),
        (group, {**group_options, "op": hvd.Sum}),
        (ready, {"name": name}),
        (weighted, {"name": name, "steps": 1, "contraction": 0.9}),
        (hvd.partial_allreduce_async, {"name": name, "sync": "solo"}),
    ):
        with pytest.raises(ValueError, match=rf"the name {re.escape(name)} is bound to another"):
            start(torch.zeros(3), **options)
    assert hvd.group_allreduce(torch.ones(3), **group_options).tolist() == [1.0] * 3


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_statistics(world: World) -> None:
    schedule = hvd.Schedule(lambda round, rank: rank // 2, 1)
    for _ in range(8):
        hvd.group_allreduce(torch.zeros(2), name=world.name("group"), schedule=schedule)
        hvd.partial_reduce(torch.zeros(2), name=world.name("ready"))
    hvd.flush()
    everything = hvd.partial_stats()
    for kind in ("group", "ready"):
        stats = everything[world.name(kind)]
        keys = {"rounds", "closed_by", "on_time", "late", "fresh_mean", "fresh_histogram", "staleness_histogram"}
        assert keys | {"waited_seconds", "dropped", "bytes_held", "groups_made", "setup_seconds"} <= set(stats)
        assert sum(stats["closed_by"].values()) == stats["rounds"] == sum(stats["fresh_histogram"].values())
        assert (stats["setup_seconds"] > 0) == (stats["groups_made"] > 0)
        assert ("arrival_offset_seconds" in stats) == (world.rank == 0)
        assert ("unconnected_windows" in stats) == (world.rank == 0 and kind == "ready")
    group_stats = everything[world.name("group")]
    for on_time, late in zip(group_stats["on_time"], group_stats["late"], strict=True):
        assert on_time + late == group_stats["rounds"]
    assert group_stats["bytes_held"] >= 2 * 4  # a kept model
    ready_stats = everything[world.name("ready")]
    assert ready_stats["late"] == [0] * world.size
    assert ready_stats["on_time"] == [8] * world.size  # every arrival was in one group
    assert ready_stats["bytes_held"] == 0  # non-members allocate nothing
    world.same([group_stats[key] for key in ("rounds", "closed_by", "on_time", "late", "fresh_histogram")])
    world.same([ready_stats[key] for key in ("rounds", "closed_by", "on_time", "late", "fresh_histogram")])


# --- Partial reduce ---------------------------------------------------------------------------------------------------


class Models:
    """One rank's model and what became of it, in a job without gradients."""

    def __init__(self, world: World, name: str = "model", **options: Any) -> None:
        self.world = world
        self.name = world.name(name)
        self.options = {"name": self.name, **options}
        self.model = model(world.rank)
        self.calls: list[tuple[hvd.RoundInfo, torch.Tensor, torch.Tensor]] = []

    def start(self) -> hvd.PartialHandle:
        return hvd.partial_reduce_async(self.model, **self.options)

    def end(self, handle: hvd.PartialHandle) -> hvd.RoundInfo:
        result, info = ended(handle)
        assert not info.late
        assert self.world.rank in info.members
        assert info.fresh == info.gradients == len(info.members)
        self.calls.append((info, self.model, result))
        self.model = result
        return info

    def reduce(self) -> hvd.RoundInfo:
        return self.end(self.start())

    def check(self, weights: Callable[[Sequence[int]], Sequence[float]] | None = None) -> None:
        """Every call was in one group, alone or with those that say so too, and got the weighted mean of its inputs."""
        groups = defaultdict(dict)
        for rank, calls in enumerate(self.world.gather(self.calls)):
            for info, given, got in calls:
                assert rank not in groups[info.round, info.members]
                groups[info.round, info.members][rank] = (given, got, info.work)
        for (number, members), by_rank in groups.items():
            assert tuple(sorted(by_rank)) == members, f"round {number}"
            work = by_rank[members[0]][2]
            shares = weights(work) if weights else [1 / len(members)] * len(members)
            expected = sum(
                share * given for share, (_, (given, _, _)) in zip(shares, sorted(by_rank.items()), strict=True)
            )
            results = [got for _, got, _ in by_rank.values()]
            assert all(torch.equal(got, results[0]) for got in results), f"round {number} of {members}"
            assert torch.allclose(results[0], expected, atol=1e-12), f"round {number} of {members}"
        rounds = sorted({number for number, _ in groups})
        assert rounds == list(range(len(rounds)))

    def check_mean(self) -> None:
        """E4: the mean of all models is what it was."""
        everybody = self.world.gather(self.model)
        assert torch.allclose(mean(everybody), mean([model(rank) for rank in self.world.ranks]), atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("extra", [{}, {0: 7}, {1: 7, 2: 2}], ids=["equal", "rank 0 more", "ranks 1 and 2 more"])
def test_e1_every_ready_rank_is_in_one_group(world: World, size: int, extra: dict[int, int]) -> None:
    """Who is left at the end averages with who else is left, in the end with itself."""
    models = Models(world, size=size)
    assert models.reduce().members == tuple(world.ranks)  # the first round is of all
    for _ in range(10 + extra.get(world.rank, 0)):
        assert len(models.reduce().members) <= size
    hvd.flush()
    models.check()
    models.check_mean()


def test_a_lone_rank_averages_with_itself(world: World) -> None:
    models = Models(world)
    models.reduce()
    if world.rank == 1:
        before = models.model
        for _ in range(3):
            assert models.reduce().members == (1,)
        assert torch.equal(models.model, before)
    hvd.flush()
    models.check()
    if world.rank == 0:
        assert hvd.partial_stats()[models.name]["closed_by"]["liveness"] == 3


def test_a_group_larger_than_the_job(world: World) -> None:
    models = Models(world, size=99)
    for _ in range(3):
        assert models.reduce().members == tuple(world.ranks)
    models.check()
    assert torch.allclose(models.model, mean([model(rank) for rank in world.ranks]))


@scripted
@four
def test_groups_in_the_order_of_arrival(world: World) -> None:
    """Ranks that are not there are neither waited for nor disturbed; they do not even see the round."""
    models = Models(world)
    models.reduce()
    world.barrier()
    for pair in ((3, 1), (0, 2)):
        if world.rank in pair:
            assert models.reduce().members == tuple(sorted(pair))
        world.barrier()
    if world.rank in (0, 3):
        assert models.reduce().members == (0, 3)
    world.barrier()
    models.check()
    models.check_mean()
    assert hvd.partial_stats()[models.name]["bytes_held"] == 0


@scripted
@four
@pytest.mark.parametrize("alone", [0, 1])
def test_fewer_than_a_group_wait(world: World, alone: int) -> None:
    models = Models(world, size=3)
    models.reduce()
    script = Script(world, None)
    handle = models.start() if world.rank in (alone, 3) else None
    script.must_wait(handle)
    if world.rank == 2:
        handle = models.start()
    if handle is not None:
        assert models.end(handle).members == tuple(sorted((alone, 2, 3)))
    models.check()


@scripted
@four
def test_ranks_that_never_came_back(world: World) -> None:
    """E3: two ranks that are always ready together would form a clique; they wait for others, but not for ever."""
    models = Models(world, window=3)
    models.reduce()
    world.barrier()
    if world.rank < 2:
        for _ in range(5):
            assert models.reduce().members == (0, 1)
    world.barrier()
    if world.rank == 0:
        assert hvd.partial_stats()[models.name]["unconnected_windows"] >= 1
    # Then all are ready at the same time: 0 and 1 are not together again.
    handle = models.start() if world.rank in (0, 2) else None
    if handle is not None:
        assert models.end(handle).members == (0, 2)
    world.barrier()
    models.check()
    models.check_mean()


@scripted
@four
def test_staleness_weights(world: World) -> None:
    """Iterations are calls, and are taken to the newest of the group."""
    models = Models(world, weights="staleness", alpha=0.8)
    assert models.reduce().work == (1, 1, 1, 1)
    world.barrier()
    for pair, work in (((0, 1), (2, 2)), ((0, 1), (3, 3)), ((0, 2), (4, 2)), ((2, 3), (5, 2)), ((1, 3), (4, 6))):
        if world.rank in pair:
            info = models.reduce()
            assert (info.members, info.work) == (pair, work)
        world.barrier()
    models.check(lambda work: _core.staleness_weights(list(work), 0.8))


@pytest.mark.parametrize("size", [2, 3])
def test_staleness_weights_in_a_race(world: World, size: int) -> None:
    models = Models(world, size=size, weights="staleness")
    for _ in range(8 + 3 * (world.rank == 2)):
        models.reduce()
    hvd.flush()
    models.check(lambda work: _core.staleness_weights(list(work), 0.9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["constant", "staleness"])
def test_dtypes_and_forms_of_partial_reduce(world: World, dtype: torch.dtype, weights: str) -> None:
    expected = mean([model(rank, dtype, (5, 7)) for rank in world.ranks])
    for number, form in enumerate(FORMS["partial_reduce"]):
        tensor = model(world.rank, dtype, (5, 7))
        result = form(tensor, name=world.name(), size=world.size, weights=weights)
        assert (result.dtype, result.shape) == (dtype, (5, 7))
        assert torch.allclose(result.double(), expected, atol=TOLERANCE.get(dtype, 1e-6))
        in_place = number % 2 == 1
        assert (result.data_ptr() == tensor.data_ptr()) == in_place
        assert torch.equal(tensor, result if in_place else model(world.rank, dtype, (5, 7)))
        world.same(result.double().tolist())


@four
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_is_away_is_not_waited_for(world: World, absent: int) -> None:
    """It does something else for as long as the others like, and is back then."""
    models = Models(world)
    models.reduce()
    pair = [rank for rank in world.ranks if rank != absent][:2]
    if world.rank in pair:
        for _ in range(5):
            assert models.reduce().members == tuple(pair)
        if world.rank == pair[0]:
            world.tell("done")
    world.wait_for("done")
    models.reduce()
    hvd.flush()
    models.check()
    models.check_mean()


def test_a_rank_that_waits_in_a_collective_of_horovod(world: World) -> None:
    """The others need not be a multiple of the group's size: those that are left over go on alone."""
    models = Models(world)
    models.reduce()
    for _ in range(4 * world.rank):
        models.reduce()
    assert hvd.allreduce(torch.tensor([1]), name=world.name("full"), op=hvd.Sum).item() == world.size
    models.reduce()
    hvd.flush()
    models.check()
    models.check_mean()


def test_a_rank_that_never_comes_again(world: World) -> None:
    """The others go on with all that Horovod has."""
    models = Models(world, size=3)
    models.reduce()
    for step in range(4):
        if world.rank != 1:
            models.reduce()
        assert hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum).item() == step * world.size
    hvd.flush()
    models.check()
    models.check_mean()


def test_two_partial_reduces_beside_other_collectives(world: World) -> None:
    one, two = Models(world, "one"), Models(world, "two", size=3)
    rng = world.random()
    for step in range(8):
        both = [one, two]
        rng.shuffle(both)
        handles = [models.start() for models in both]
        partial = hvd.partial_allreduce_async(
            torch.tensor([1.0]), name=world.name("partial"), op=hvd.Sum, sync="majority"
        )
        if step % 4 == 2:
            full = hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum)
            assert full.item() == step * world.size
        for models, handle in zip(reversed(both), reversed(handles), strict=True):
            models.end(handle)
        hvd.synchronize(partial)
    hvd.flush()
    for models in (one, two):
        models.check()
        models.check_mean()


def test_name_in_use(world: World) -> None:
    models = Models(world, size=world.size)
    models.reduce()
    handle = models.start() if world.rank == 0 else None
    if handle is not None:
        with pytest.raises(ValueError, match=rf"rank 0: the name {re.escape(models.name)} is in use by an operation"):
            models.start()
    world.barrier()
    assert models.end(handle or models.start()).members == tuple(world.ranks)


# --- Weighted average -------------------------------------------------------------------------------------------------


def softmax(steps: Sequence[int], contraction: float) -> np.ndarray:
    logits = (max(steps) - np.array(steps, dtype=np.float64)) * np.log(contraction)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("contraction", [1.0, 0.999, 0.5, 1e-3])
def test_weighted_average(world: World, contraction: float) -> None:
    for number, steps_of in enumerate((lambda r: 5 * r, lambda r: 0, lambda r: 10**6 * (r == 1), lambda r: 7 - r % 2)):
        steps = [steps_of(rank) for rank in world.ranks]
        result, info = ended(
            hvd.weighted_average_async(model(world.rank), steps[world.rank], contraction, name=world.name())
        )
        assert (info.round, info.late, info.fresh, info.members) == (number, False, world.size, tuple(world.ranks))
        assert info.work == tuple(steps)
        expected = sum(
            weight * model(rank) for rank, weight in zip(world.ranks, softmax(steps, contraction), strict=True)
        )
        assert torch.allclose(result, expected, atol=1e-12)
        if contraction == 1.0 or len(set(steps)) == 1:
            assert torch.allclose(result, mean([model(rank) for rank in world.ranks]), atol=1e-12)
        world.same(result.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_forms_of_weighted_average(world: World, dtype: torch.dtype) -> None:
    steps = [3 * rank for rank in world.ranks]
    models = [model(rank, dtype, (5, 7)).double() for rank in world.ranks]
    expected = sum(weight * m for weight, m in zip(softmax(steps, 0.9), models, strict=True))
    for number, form in enumerate(FORMS["weighted_average"]):
        tensor = model(world.rank, dtype, (5, 7))
        result = form(tensor, steps[world.rank], 0.9, name=world.name())
        assert (result.dtype, result.shape) == (dtype, (5, 7))
        assert torch.allclose(result.double(), expected, atol=TOLERANCE.get(dtype, 1e-6))
        in_place = number % 2 == 1
        assert (result.data_ptr() == tensor.data_ptr()) == in_place
        assert torch.equal(tensor, result if in_place else model(world.rank, dtype, (5, 7)))
        world.same(result.double().tolist())


@scripted
def test_a_weighted_average_waits_for_everybody(world: World) -> None:
    script = Script(world, None)  # for its fence
    start = lambda: hvd.weighted_average_async(torch.tensor([value(world.rank)]), 1, 0.9, name=world.name("w"))
    hvd.synchronize(start())
    handle = start() if world.rank != 1 else None
    script.must_wait(handle)
    assert hvd.synchronize(handle or start()).item() == pytest.approx(sum(map(value, world.ranks)) / world.size)


def test_a_weighted_average_without_a_joined_rank(world: World) -> None:
    name, steps = world.name(), 2 * world.rank
    hvd.weighted_average(torch.tensor([value(world.rank)]), steps, 0.9, name=name)
    if world.rank != 1:
        result, info = ended(hvd.weighted_average_async(torch.tensor([value(world.rank)]), steps, 0.9, name=name))
        others = [rank for rank in world.ranks if rank != 1]
        assert info.members == tuple(others)
        weights = softmax([2 * rank for rank in others], 0.9)
        assert result.item() == pytest.approx(sum(w * value(r) for w, r in zip(weights, others, strict=True)))
    hvd.join()
    check_that_the_job_goes_on(world)
