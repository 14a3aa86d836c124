"""`hvd.average` of every front end, under each policy of models.

What a call returns follows from its round, whoever was late: that is checked where ranks race. Where the order of
arrivals is scripted, so are the results.
"""

import re
from typing import Any

import numpy as np
import pytest
from harness.fronts import Front
from harness.matrix import alone, four, scripted
from harness.models import FOR_EVER, Groups, Models, group_of, model, ring, softmax
from harness.script import Script, same_error, value
from harness.world import World

from horovod_partial import _core
from horovod_partial.policies import Butterfly, GroupAverage, PartialReduce, Schedule, WeightedAverage

pytestmark = [pytest.mark.launch(full_ranks=(4, 8)), pytest.mark.full_matrix("gloo")]

ATOL = {"float16": 2e-3, "bfloat16": 1e-2}

# Policies under which all ranks average in every round, each with the steps that a rank has taken.
OF_ALL: dict[str, Any] = {
    "group": (GroupAverage(schedule=Butterfly(64), grace_ms=FOR_EVER), lambda rank: None),
    "ready": (PartialReduce(99), lambda rank: None),
    "staleness": (PartialReduce(99, weights="staleness"), lambda rank: None),
    "weighted": (WeightedAverage(1, 0.9), lambda rank: 3 * rank),
}


@pytest.mark.parametrize("kind", OF_ALL)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types(front: Front, world: World, dtype: str, kind: str) -> None:
    policy, steps = OF_ALL[kind]
    begin = front.bind("average", policy=policy, name=world.name(), steps=steps(world.rank))
    models = [front.array(front.tensor(model(rank, (5, 7)), dtype)) for rank in world.ranks]
    shares = softmax([steps(rank) or 0 for rank in world.ranks], 0.9)
    for _ in range(2):
        tensor = front.tensor(models[world.rank], dtype)
        result, info = begin(tensor).end()
        assert (front.dtype(result), info.members) == (dtype, tuple(world.ranks))
        average = front.array(result)
        assert np.allclose(average, np.average(models, 0, shares), atol=ATOL.get(dtype, 1e-6))
        assert np.array_equal(front.array(tensor), models[world.rank])
        world.same(average.tolist())


@pytest.mark.parametrize("kind", OF_ALL)
def test_shapes(front: Front, world: World, kind: str) -> None:
    policy, steps = OF_ALL[kind]
    for shape in ((), (0,), (3, 0, 2), (70_000,)):
        begin = front.bind("average", policy=policy, name=world.name(str(shape)), steps=steps(0))
        for _ in range(3):
            result, _ = begin(front.tensor(np.full(shape, value(world.rank)))).end()
            assert tuple(result.shape) == shape
            assert np.allclose(front.array(result), np.full(shape, sum(map(value, world.ranks)) / world.size))


# --- Groups -----------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "butterfly": lambda: Butterfly(2),
    "butterfly of 3": lambda: Butterfly(3),
    "larger than the job": lambda: Butterfly(64),
    "ring": lambda: ring(4),
    "one rank alone": lambda: Schedule(lambda round, rank: min(rank, 1), 1),
}


@pytest.mark.parametrize("period", [None, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_of_a_schedule(front: Front, world: World, schedule: str, period: int | None) -> None:
    groups = SCHEDULES[schedule]()
    script = Groups(front, world, schedule=groups, period=period, grace_ms=FOR_EVER)
    for number in range(5):
        result, info = script.arrive(value(world.rank, number))
        full = number == 0 or (period is not None and (number + 1) % period == 0)
        members = tuple(world.ranks) if full else group_of(world.rank, groups.groups(number, world.size))
        assert (info.round, info.late, info.members, info.staleness) == (number, False, members, 0)
        assert info.fresh == info.gradients == len(members)
        assert result == pytest.approx(sum(value(rank, number) for rank in members) / len(members), rel=1e-12)


def test_the_default_schedule(front: Front, world: World) -> None:
    script = Groups(front, world, grace_ms=FOR_EVER)
    script.first(value(world.rank))
    members = group_of(world.rank, Butterfly(2).groups(1, world.size))
    assert script.arrive(value(world.rank))[1].members == members


@scripted
@four
@pytest.mark.parametrize("late", [0, 1])
def test_c3_a_late_rank(front: Front, world: World, late: int) -> None:
    """WAGMA-SGD, Algorithm 2: the partner gets (W + old W1) / 2, and rank 1 (Wsum + W1) / 3. The late rank may coordinate."""
    partner = 1 - late
    script = Groups(front, world, schedule=Schedule(lambda round, rank: rank // 2, 1))
    script.first(value(world.rank))
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
    front.fence(world)
    # From now on the new model stands in for it.
    if world.rank == partner:
        result, info = script.arrive(value(partner, 2))
        assert (result, info.round, info.late) == ((value(partner, 2) + new) / 2, 2, False)
    script.completed(3)
    front.hvd.flush()


@scripted
@four
def test_several_rounds_late(front: Front, world: World) -> None:
    """It takes the newest result, in the group that it was in then; the model that it had sent last is in all of them."""
    late, first = 1, 0
    schedule = ring(4)
    script = Groups(front, world, schedule=schedule)
    script.first(value(world.rank))
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
    front.hvd.flush()


@scripted
def test_max_staleness_of_kept_models(front: Front, world: World) -> None:
    """The same model stands in for its rank in so many rounds, then the others wait for that rank."""
    schedule = Butterfly(2)
    script = Groups(front, world, schedule=schedule, max_staleness=2)
    script.first(value(world.rank))
    arrival = None
    if world.rank == 0:
        for number in (1, 2):
            assert script.arrive(value(0, number))[1].fresh == 1
        arrival = script.start(value(0, 3))
    script.must_wait(arrival)
    if world.rank != 0:
        result, info = script.arrive(value(world.rank, 1))  # late; what it has sent now is as good as an arrival
        assert (info.round, info.late, info.staleness) == (2, True, 2)
    else:
        result, info = script.end(arrival)
        assert (info.round, info.late, info.fresh) == (3, False, 1)
        (partner,) = set(info.members) - {0}
        assert result == (value(0, 3) + value(partner, 1)) / 2
    script.completed(4)
    front.hvd.flush()
    assert max(front.hvd.partial_stats()[script.name]["staleness_histogram"]) == 2


@scripted
def test_a_full_round_waits_for_everybody(front: Front, world: World) -> None:
    script = Groups(front, world, schedule=Butterfly(2), period=2)
    script.first(value(world.rank))
    for number in (1, 2, 3):
        full = number % 2 == 1
        arrival = script.start(value(world.rank, number)) if world.rank != 1 and full else None
        if full:
            script.must_wait(arrival)
            result, info = script.end(arrival or script.start(value(world.rank, number)))
            assert (info.round, info.late, info.members) == (number, False, tuple(world.ranks))
            assert result == sum(value(rank, number) for rank in world.ranks) / world.size
        else:
            if world.rank == 0:
                assert len(script.arrive(value(0, number))[1].members) == 2
            script.completed(number + 1)
            if world.rank != 0:
                assert script.arrive(value(world.rank, number))[1].late
        world.barrier()


# --- Errors -----------------------------------------------------------------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "kind": (GroupAverage(schedule=ring(2)), GroupAverage(), ("Schedule(rounds=2", "GroupAverage(")),
    "size of groups": (GroupAverage(3), GroupAverage(2), ("size=3", "size=2")),
    "function": (
        GroupAverage(schedule=Schedule(lambda round, rank: rank % 2, 2)),
        GroupAverage(schedule=Schedule(lambda round, rank: rank // 2, 2)),
        ("Schedule(rounds=2, groups",),
    ),
    "period": (GroupAverage(period=4), GroupAverage(period=5), ("period=4", "period=5")),
    "max_staleness": (GroupAverage(max_staleness=3), GroupAverage(), ("max_staleness=3", "GroupAverage(")),
    "size": (PartialReduce(3), PartialReduce(2), ("size=3", "size=2")),
    "weights": (PartialReduce(2, "staleness"), PartialReduce(2), ("weights='staleness'", "PartialReduce(")),
    "alpha": (PartialReduce(2, alpha=0.5), PartialReduce(2), ("alpha=0.5", "PartialReduce(")),
    "policy": (PartialReduce(2), GroupAverage(2), ("PartialReduce(", "GroupAverage(")),
    "contraction": (WeightedAverage(1, 0.9), WeightedAverage(1, 0.8), ("contraction=0.9", "contraction=0.8")),
}


def steps_for(policy: Any) -> dict[str, int]:
    return {"steps": 1} if isinstance(policy, WeightedAverage) else {}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_the_ranks_disagree(front: Front, world: World, odd: int, kind: str) -> None:
    own, others, words = DISAGREEMENTS[kind]
    policy = own if world.rank == odd else others
    text = ("Mismatched sync policies", "rank 0", "rank 1", *words)
    same_error(front, world, front.tensor(np.zeros(3)), *text, kind="average", policy=policy, **steps_for(policy))


@alone
def test_wrong_arguments(front: Front, world: World) -> None:
    floats = np.zeros((4, 4))
    group, weighted = {"policy": "group_average"}, {"policy": WeightedAverage(1, 0.9)}
    every = [group, {"policy": PartialReduce(2)}, weighted | {"steps": 1}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        *(("float32", options | {"name": None}, "needs a name") for options in every),
        *(("complex64", options, "not supported|floating-point") for options in every),
        *(("int64", options, r"needs floating-point tensors, not .*int64") for options in every),
        ("float32", {"policy": "average"}, "unknown sync policy 'average'"),
        ("float32", {"policy": "solo"}, "policy must be one that averages models, .* not 'solo'"),
        ("float32", {"policy": None}, "policy must be one that averages models, .* not None"),
        ("float32", {"policy": GroupAverage(overlap=True)}, "overlap of a policy cannot be used with hvd.average"),
        (
            "float32",
            {"policy": GroupAverage(average=("parameters", "state"), overlap=True)},
            "average, overlap of a policy cannot be used with hvd.average",
        ),
        ("float32", group | {"steps": 1}, r"steps must be left out under GroupAverage\("),
        *(("float32", weighted | {"steps": n}, "steps must be an int, 0 or more") for n in (None, -1, 1.5, True)),
        ("float32", weighted | {"steps": 2**31}, "steps must be an int, 0 or more and below"),
    ]
    for dtype, options, text in cases:
        with pytest.raises(ValueError, match=text):
            front.run(front.tensor(floats, dtype), "average", **({"name": world.name()} | options))
    assert world.name() not in front.hvd.partial_stats()
    front.check_that_the_job_goes_on(world)


def test_name_bound_to_another_declaration(front: Front, world: World) -> None:
    begin = front.bind("average", policy=GroupAverage(grace_ms=FOR_EVER), name=world.name())
    begin(front.tensor(np.zeros(3))).end()
    others: list[Any] = [
        GroupAverage(schedule=ring(4), grace_ms=FOR_EVER),
        GroupAverage(period=3, grace_ms=FOR_EVER),
        PartialReduce(2),
        WeightedAverage(1, 0.9),
    ]
    calls = [("average", {"policy": policy, **steps_for(policy)}) for policy in others]
    for kind, options in (*calls, ("partial_allreduce", {"sync": "solo"})):
        with pytest.raises(front.misfit, match=rf"the name {re.escape(world.name())} is bound to another"):
            front.run(front.tensor(np.zeros(3)), kind, name=world.name(), **options)
    assert front.array(begin(front.tensor(np.ones(3))).end()[0]).tolist() == [1.0] * 3


# --- Partial reduce ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("extra", [{}, {0: 7}, {1: 7, 2: 2}], ids=["equal", "rank 0 more", "ranks 1 and 2 more"])
def test_e1_every_ready_rank_is_in_one_group(front: Front, world: World, size: int, extra: dict[int, int]) -> None:
    """Who is left at the end averages with who else is left, in the end with itself."""
    models = Models(front, world, size=size)
    assert models.reduce().members == tuple(world.ranks)  # the first round is of all
    for _ in range(10 + extra.get(world.rank, 0)):
        assert len(models.reduce().members) <= size
    front.hvd.flush()
    models.check()


def test_a_lone_rank_averages_with_itself(front: Front, world: World) -> None:
    models = Models(front, world)
    models.reduce()
    if world.rank == 1:
        before = models.model
        for _ in range(3):
            assert models.reduce().members == (1,)
        assert np.array_equal(models.model, before)
    front.hvd.flush()
    models.check()
    if world.rank == 0:
        assert front.hvd.partial_stats()[models.name]["closed_by"]["liveness"] == 3


@scripted
@four
def test_groups_in_the_order_of_arrival(front: Front, world: World) -> None:
    """Ranks that are not there are neither waited for nor disturbed; they do not even see the round."""
    models = Models(front, world)
    for ranks in (world.ranks, (3, 1), (0, 2), (0, 3)):
        models.together(*ranks)
    models.check()
    assert front.hvd.partial_stats()[models.name]["bytes_held"] == 0


@scripted
@four
@pytest.mark.parametrize("alone", [0, 1])
def test_fewer_than_a_group_wait(front: Front, world: World, alone: int) -> None:
    models = Models(front, world, size=3)
    models.reduce()
    arrival = models.start() if world.rank in (alone, 3) else None
    front.fence(world)
    assert arrival is None or not arrival.done()
    world.barrier()
    if world.rank == 2:
        arrival = models.start()
    if arrival is not None:
        assert models.end(arrival).members == tuple(sorted((alone, 2, 3)))
    models.check()


@scripted
@four
def test_ranks_that_never_came_back(front: Front, world: World) -> None:
    """E3: two ranks that are always ready together would form a clique; they wait for others, but not for ever."""
    models = Models(front, world)
    models.together(*world.ranks)
    for _ in range(2 * world.size):  # the window, which so does not connect all ranks
        models.together(0, 1)
    if world.rank == 0:
        assert front.hvd.partial_stats()[models.name]["unconnected_windows"] >= 1
    models.together(0, 2)
    models.check()


@scripted
@four
def test_staleness_weights(front: Front, world: World) -> None:
    """Iterations are calls, and are taken to the newest of the group."""
    models = Models(front, world, weights="staleness", alpha=0.8)
    assert models.reduce().work == (1, 1, 1, 1)
    world.barrier()
    for pair, work in (((0, 1), (2, 2)), ((0, 1), (3, 3)), ((0, 2), (4, 2)), ((2, 3), (5, 2)), ((1, 3), (4, 6))):
        info = models.together(*pair)
        assert info is None or info.work == work
    models.check(lambda work: _core.staleness_weights(list(work), 0.8))


@pytest.mark.parametrize("size", [2, 3])
def test_staleness_weights_in_a_race(front: Front, world: World, size: int) -> None:
    models = Models(front, world, size=size, weights="staleness")
    for _ in range(8 + 3 * (world.rank == 2)):
        models.reduce()
    front.hvd.flush()
    models.check(lambda work: _core.staleness_weights(list(work), 0.9))


@four
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_is_away_is_not_waited_for(front: Front, world: World, absent: int) -> None:
    """It does something else for as long as the others like, and is back then."""
    models = Models(front, world)
    models.reduce()
    pair = [rank for rank in world.ranks if rank != absent][:2]
    if world.rank in pair:
        for _ in range(5):
            assert models.reduce().members == tuple(pair)
        if world.rank == pair[0]:
            world.tell("done")
    world.wait_for("done")
    models.reduce()
    front.hvd.flush()
    models.check()


# --- Weighted average -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contraction", [1.0, 0.999, 0.5, 1e-3])
def test_weighted_average(front: Front, world: World, contraction: float) -> None:
    own = front.tensor(model(world.rank), "float64")
    for number, steps_of in enumerate((lambda r: 5 * r, lambda r: 0, lambda r: 10**6 * (r == 1), lambda r: 7 - r % 2)):
        steps = [steps_of(rank) for rank in world.ranks]
        options = {"policy": WeightedAverage(1, contraction), "name": world.name(), "steps": steps[world.rank]}
        result, info = front.run(own, "average", **options)
        assert (info.round, info.late, info.fresh, info.members) == (number, False, world.size, tuple(world.ranks))
        assert info.work == tuple(steps)
        models = [model(rank) for rank in world.ranks]
        expected = np.average(models, 0, softmax(steps, contraction))
        assert np.allclose(front.array(result), expected, atol=1e-12)
        if contraction == 1.0 or len(set(steps)) == 1:
            assert np.allclose(front.array(result), np.mean(models, 0), atol=1e-12)
        world.same(front.array(result).tolist())


@scripted
def test_a_weighted_average_waits_for_everybody(front: Front, world: World) -> None:
    script = Script(front, world, "average", policy=WeightedAverage(1, 0.9), steps=1)
    script.arrive(value(world.rank))
    arrival = script.start(value(world.rank)) if world.rank != 1 else None
    script.must_wait(arrival)
    result, _ = script.end(arrival or script.start(value(world.rank)))
    assert result == pytest.approx(sum(map(value, world.ranks)) / world.size)
