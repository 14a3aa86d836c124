"""Averages of models in groups of ranks with PyTorch's handles, beside other collectives, with ranks that come and go.

`test_conformance_models.py` has what all front ends share. What a call returns follows from its `round_info`, whoever
was late.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.fronts import front_of
from harness.matrix import alone, four, process_sets
from harness.models import FOR_EVER, Groups, Models, group_of, ring, softmax
from harness.script import value
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.torch.model_operations import signal

pytestmark = pytest.mark.launch(full_ranks=(4, 8))
FRONT = front_of("torch")
DEVICE = torch.zeros(1).get_device()  # Horovod's number for it, on which a rank that has joined has its zeros


def begin(world: World, policy: Any, name: str = "tensor", **options: Any) -> Any:
    """Hand over a model that tells its rank."""
    number = torch.tensor([value(world.rank)], dtype=torch.float64)
    return hvd.average_async(number, policy, world.name(name), **options)


def end(world: World, handle: Any) -> tuple[RoundInfo, float]:
    """The result, after checking that it is the mean of the models of the group, and of its own if this rank is late."""
    result, info = hvd.synchronize(handle).item(), hvd.round_info(handle)
    models = [*info.members, *[world.rank] * info.late]
    assert result == pytest.approx(sum(map(value, models)) / len(models), rel=1e-12), info
    return info, result


def average(world: World, policy: Any, name: str = "tensor") -> RoundInfo:
    return end(world, begin(world, policy, name))[0]


@alone
def test_a_signal_lies_on_the_host(world: World) -> None:
    with torch.device("meta"):  # the default for tensors that are made here
        signal(world.name(), hvd.global_process_set)
    assert hvd.partial_stats()[world.name()]["rounds"] == 1


def same_within_groups(world: World, rounds: list[tuple[RoundInfo, float]]) -> None:
    """All that were on time in a group have the same bits; every on-time member of a group is found."""
    results: Any = defaultdict(dict)
    for rank, theirs in enumerate(world.gather(rounds)):
        for info, result in theirs:
            if not info.late:
                results[info.round, info.members][rank] = (result, info.fresh)
    for (number, members), by_rank in results.items():
        assert len({result for result, _ in by_rank.values()}) == 1, f"round {number} of {members}"
        assert set(by_rank) <= set(members)
        assert {fresh for _, fresh in by_rank.values()} == {len(by_rank)}, f"round {number} of {members}"


@four
def test_all_groups_that_there_are(world: World) -> None:
    """Every partition of the ranks, twice: communicators are made once, before the first round with groups."""
    partitions: list[list[int]] = [[0]]
    for _ in range(world.size - 1):
        partitions = [[*p, group] for p in partitions for group in range(max(p) + 2)]
    assert len(partitions) == 15
    schedule = hvd.Schedule(lambda round, rank: partitions[round][rank], len(partitions))
    script = Groups(FRONT, world, schedule=schedule, grace_ms=FOR_EVER)
    made = 0
    for number in range(2 * len(partitions) + 1):
        result, info = script.arrive(value(world.rank))
        partition = partitions[number % len(partitions)] if number else [0] * world.size
        members = tuple(rank for rank in world.ranks if partition[rank] == partition[world.rank])
        assert (info.round, info.late, info.members) == (number, False, members)
        assert result == pytest.approx(sum(map(value, members)) / len(members), rel=1e-12)
        stats = hvd.partial_stats()[script.name]
        made = made or stats["groups_made"]
        assert stats["groups_made"] == made <= 7  # groups of two and more that hold this rank


@pytest.mark.full_matrix
@pytest.mark.launch(ranks=(9,))
def test_more_groups_than_a_rank_keeps_communicators_for(world: World) -> None:
    """It keeps 128, and is in another group in each of 160 rounds. These groups come twice, and are made anew the second time."""
    partitions = 160  # into two groups; in one of them each rank but rank 0 is alone
    schedule = hvd.Schedule(lambda round, rank: (round + 1) >> (rank - 1) & 1 if rank else 0, partitions)
    script = Groups(FRONT, world, schedule=schedule, grace_ms=FOR_EVER)
    for number in range(2 * partitions + 1):
        result, info = script.arrive(value(world.rank))
        members = group_of(world.rank, schedule.groups(number, world.size)) if number else tuple(world.ranks)
        assert (info.round, info.late, info.members) == (number, False, members)
        assert result == pytest.approx(sum(map(value, members)) / len(members), rel=1e-12)
    assert hvd.partial_stats()[script.name]["groups_made"] == 2 * (partitions - (world.rank > 0))


@process_sets
@pytest.mark.parametrize("kind", ["average", "partial_allreduce"])
def test_a_process_set_of_one_rank(world: World, kind: str) -> None:
    """Its rounds close without anybody else's list of requests."""
    sets = [hvd.add_process_set([rank]) for rank in world.ranks]
    own = sets[world.rank]
    of_models = [{"policy": policy} for policy in (hvd.GroupAverage(), hvd.PartialReduce(2))]
    calls = of_models if kind == "average" else [{"sync": "solo"}]
    for number, options in enumerate(calls):
        name = world.name(str(number))
        for step in range(4):
            tensor = torch.tensor([float(10 * step + world.rank)])
            result = getattr(hvd, kind)(tensor, name=name, process_set=own, **options)
            assert result.item() == 10 * step + world.rank
        hvd.flush(process_set=own)
        assert hvd.partial_stats(process_set=own)[name]["rounds"] >= 4
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


@process_sets
@pytest.mark.parametrize("kind", ["group", "ready"])
def test_a_process_set_of_three(world: World, processes: hvd.ProcessSet, kind: str) -> None:
    """Schedules and members count the ranks of the set."""
    everybody, schedule = (0, 1, 2), ring(3)
    grouped = hvd.GroupAverage(schedule=schedule, period=None, grace_ms=FOR_EVER)
    policy = grouped if kind == "group" else hvd.PartialReduce(3)
    options = {"name": world.name(), "process_set": processes}
    if processes.included():
        own = processes.ranks.index(world.rank)
        for number in range(4):
            members = group_of(own, schedule.groups(number, 3)) if kind == "group" and number else everybody
            handle = hvd.average_async(torch.tensor([float(value(own))]), policy, **options)
            assert hvd.synchronize(handle).item() == pytest.approx(sum(map(value, members)) / len(members))
            assert hvd.round_info(handle).members == members
        hvd.flush(process_set=processes)
        assert world.name() in hvd.partial_stats(process_set=processes)
    else:
        with pytest.raises(ValueError, match=r"not in (the )?process set"):
            hvd.average(torch.zeros(1), policy, **options)
    world.barrier()
    FRONT.check_that_the_job_goes_on(world)


@process_sets
@pytest.mark.parametrize("policy", ["group_average", "partial_reduce:2", "weighted_average:2,0.9"])
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


@four
def test_c3_with_all_others_on_time(world: World) -> None:
    """The late rank asks for a collective of Horovod's own meanwhile, so that a grace without end does not hold."""
    late, partner = 1, 3  # of round 1 of the butterfly
    script = Groups(FRONT, world, schedule=hvd.Butterfly(2), grace_ms=FOR_EVER)
    script.first(value(world.rank))
    gate = hvd.allreduce_async(torch.ones(1), name=world.name("gate")) if world.rank == late else None
    if world.rank == late:
        world.until(lambda: hvd.poll(gate) or completed(script.name) >= 2, "round 1 has ended here")
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


def test_every_period_th_round_all_are_equal(world: World) -> None:
    """Ranks arrive as they can until they have seen a round."""
    groups, period, last = hvd.Butterfly(2), 3, 14
    policy = hvd.GroupAverage(schedule=groups, period=period)
    seen: list[tuple[RoundInfo, float]] = []
    while not seen or seen[-1][0].round < last:
        info, result = end(world, begin(world, policy))
        seen.append((info, result))
        full = info.round == 0 or (info.round + 1) % period == 0
        group = group_of(world.rank, groups.groups(info.round, world.size))
        assert info.members == (tuple(world.ranks) if full else group)
        assert not (full and info.late)
    assert seen[-1][0].round == last
    same_within_groups(world, seen)


def test_several_schedules_in_flight_at_the_same_time(world: World) -> None:
    """One negotiation may close several: groups neither collide nor fuse."""
    schedules = {"one": hvd.Butterfly(2), "two": ring(world.size), "three": hvd.Butterfly(2)}
    policies = {name: hvd.GroupAverage(schedule=schedule, period=None) for name, schedule in schedules.items()}
    seen: dict[str, list[tuple[RoundInfo, float]]] = {name: [] for name in schedules}
    rng = world.random()
    for _ in range(12):
        names = list(schedules)
        rng.shuffle(names)
        handles = {name: begin(world, policies[name], name) for name in names}
        for name in reversed(names):
            info, result = end(world, handles[name])
            seen[name].append((info, result))
            if info.round:
                assert info.members == group_of(world.rank, schedules[name].groups(info.round, world.size))
    for rounds in seen.values():
        same_within_groups(world, rounds)
    hvd.flush()


def test_rank_and_size_stay_while_groups_reduce(world: World) -> None:
    """On GPUs (--device): Horovod makes NCCL's communicator of a group as if the group were the job."""
    over, seen = threading.Event(), set()

    def watch() -> None:
        while not over.is_set():
            seen.add((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.global_process_set.size()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(6):
            average(world, hvd.GroupAverage(schedule=ring(world.size), period=None), str(step % 2))
    finally:
        over.set()
        watcher.join()
    assert seen == {(world.rank, world.size, hvd.local_rank(), hvd.local_size(), world.size)}
    hvd.flush()


# --- Groups: ranks that come and go -----------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [None, 4])
@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_calls_more_often(world: World, period: int | None, busy: int) -> None:
    """The others wait in a flush: their models stand in for them, also where a round waits for all."""
    policy = hvd.GroupAverage(schedule=ring(world.size), period=period)
    for _ in range(24 if world.rank == busy else 6):
        average(world, policy)
    hvd.flush()


def test_flush_delivers_no_model(world: World) -> None:
    """A flush is no round: nothing is averaged, and the groups go on where they were."""
    schedule = hvd.Butterfly(2)
    script = Groups(FRONT, world, schedule=schedule, grace_ms=FOR_EVER)
    script.first(value(world.rank))
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
    grouped = hvd.GroupAverage(schedule=ring(world.size), period=3 if kind == "full rounds" else None)
    policy = hvd.PartialReduce(2) if kind == "ready" else grouped
    for _ in range(4 + 4 * world.rank):
        average(world, policy)
    world.same(hvd.join(DEVICE))
    for _ in range(4):
        average(world, policy)
    hvd.flush()
    FRONT.check_that_the_job_goes_on(world)


def test_a_first_round_without_a_joined_rank(world: World) -> None:
    """It has never used the bucket, and its groups have a rank less."""
    if world.rank != 1:
        for _ in range(4):
            assert 1 not in average(world, hvd.GroupAverage(period=None)).members
    hvd.join(DEVICE)
    FRONT.check_that_the_job_goes_on(world)


def test_statistics(world: World) -> None:
    pairs = hvd.GroupAverage(schedule=hvd.Schedule(lambda round, rank: rank // 2, 1), period=None)
    for _ in range(8):
        hvd.average(torch.zeros(2), pairs, name=world.name("group"))
        hvd.average(torch.zeros(2), hvd.PartialReduce(2), name=world.name("ready"))
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


def test_a_rank_that_waits_in_a_collective_of_horovod(world: World) -> None:
    """The others need not be a multiple of the group's size: those that are left over go on alone."""
    models = Models(FRONT, world)
    models.reduce()
    for _ in range(4 * world.rank):
        models.reduce()
    assert hvd.allreduce(torch.tensor([1]), name=world.name("full"), op=hvd.Sum).item() == world.size
    models.reduce()
    hvd.flush()
    models.check()


def test_a_rank_that_never_comes_again(world: World) -> None:
    """The others go on with all that Horovod has."""
    models = Models(FRONT, world, size=3)
    models.reduce()
    for step in range(4):
        if world.rank != 1:
            models.reduce()
        assert hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum).item() == step * world.size
    hvd.flush()
    models.check()


@pytest.mark.parametrize(("sync", "every"), [("majority", 4), ("quorum:1.0", 1)])
def test_averages_beside_other_collectives(world: World, sync: str, every: int) -> None:
    """Two partial reduces and a group's average, and in one of so many steps collectives that all ranks wait for."""
    one, two = Models(FRONT, world, "one"), Models(FRONT, world, "two", size=3)
    rng = world.random()
    for step in range(8):
        both = [one, two]
        rng.shuffle(both)
        handles = [models.start() for models in both]
        group = begin(world, hvd.GroupAverage(period=None), "group")
        partial = hvd.partial_allreduce_async(torch.ones(2), name=world.name("partial"), op=hvd.Sum, sync=sync)
        if step % every == every // 2:
            rows = hvd.allgather_async(torch.full((1, 2), world.rank), name=world.name("rows"))
            full = hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum)
            assert full.item() == step * world.size
            assert hvd.synchronize(rows)[:, 0].tolist() == list(world.ranks)
        for models, handle in zip(reversed(both), reversed(handles), strict=True):
            models.end(handle)
        hvd.synchronize(partial)
        end(world, group)
    hvd.flush()
    one.check()
    two.check()


# --- Weighted average -------------------------------------------------------------------------------------------------


def test_a_weighted_average_without_a_joined_rank(world: World) -> None:
    policy, steps = hvd.WeightedAverage(1, 0.9), 2 * world.rank
    hvd.synchronize(begin(world, policy, steps=steps))
    if world.rank != 1:
        handle = begin(world, policy, steps=steps)
        others = [rank for rank in world.ranks if rank != 1]
        weights = softmax([2 * rank for rank in others], 0.9)
        expected = sum(weight * value(rank) for weight, rank in zip(weights, others, strict=True))
        assert hvd.synchronize(handle).item() == pytest.approx(expected)
        assert hvd.round_info(handle).members == tuple(others)
    hvd.join(DEVICE)
    FRONT.check_that_the_job_goes_on(world)
