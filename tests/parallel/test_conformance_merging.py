"""`fusion=hvd.MergedGradients()` of every front end: measured plans, and buckets that change between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.fronts import Front
from harness.matrix import WITH_TWO_RANKS
from harness.merging import ALL, EVERYBODY, SWITCH, WARMUP, trainee
from harness.world import World

from horovod_partial import fusion
from horovod_partial.fusion import MessageCost, planner

# In launches of their own: ranks that plan differently, or fail alone, see variables in different orders afterwards, and
# names that follow from that order would not agree in the tests behind.
pytestmark = pytest.mark.launch(**WITH_TWO_RANKS, label="merging")


def reference(front: Front, world: World, steps: int, **options: Any) -> Any:
    """What the weights are after training one model on all ranks' batches, without Horovod."""
    return pytest.approx(trainee(front, world, None, **options).train_alone(steps), abs=1e-5)


@pytest.mark.parametrize("rule", fusion.RULES)
@pytest.mark.parametrize("sync", ["full", EVERYBODY])
def test_gradients_are_those_without_merging(
    front: Front, world: World, sync: str, rule: str, known_cost: MessageCost
) -> None:
    one = trainee(front, world, sync, rule=rule)
    one.train(SWITCH)
    plan = world.same(one.plan)
    assert (plan.rule, plan.cost, plan.measured) == (rule, known_cost, None)
    assert sorted(zip(plan.gradients, plan.nbytes, strict=True)) == sorted(one.gradients())
    assert list(plan.ready) == sorted(plan.ready)
    # Threads of a graph make gradients in any order, so that none is always the first.
    assert plan.ready[0] >= 0.0 if front.framework == "tensorflow" and front.one_by_one else plan.ready[0] == 0.0
    assert plan.predicted > plan.around > 0.0
    one.train(WARMUP + 2, first=SWITCH)
    assert one.plan.measured > 0.0
    world.same(one.weights())
    assert one.weights() == reference(front, world, SWITCH + WARMUP + 2)
    front.hvd.flush()


@pytest.mark.parametrize("sync", ALL)
def test_a_real_measurement(front: Front, world: World, sync: str) -> None:
    """On a busy machine the fit may be refused: then the default plan is in use, and says why."""
    one = trainee(front, world, sync)
    one.train(SWITCH + 2)
    plan = world.gather(one.plan)[0]
    assert plan.reason or plan.cost.r_squared >= 0.95
    if sync in ("full", EVERYBODY):
        assert one.weights() == reference(front, world, SWITCH + 2)
    front.hvd.flush()


def test_a_fit_that_is_refused(front: Front, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> MessageCost:
        raise ValueError("the network sleeps")

    monkeypatch.setattr(MessageCost, "fit", refuse)
    monkeypatch.setattr(planner, "_PROBES", 1)
    one = trainee(front, world)
    one.train(SWITCH + 2)
    plan = world.same(one.plan)
    assert (plan.reason, plan.messages) == ("the network sleeps", (6,))  # 25 MB to a bucket
    assert "default plan (the network sleeps)" in str(plan)
    assert one.weights() == reference(front, world, SWITCH + 2)


def test_times_that_drift_make_a_new_plan(front: Front, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [MessageCost(1e-12, 1e-3), MessageCost(10.0, 1e-12)]
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: costs[0]))
    monkeypatch.setattr(planner, "_PROBES", 1)
    one = trainee(front, world, replan_every=5)
    one.train(SWITCH)
    assert world.same(one.plan.messages) != (6,) or not front.one_by_one
    one.train(5, first=SWITCH)
    assert one.plan.cost == costs[0]
    del costs[0]  # a message's latency is everything now
    one.train(5, first=SWITCH + 5)
    assert world.same(one.plan.messages) == (6,)
    one.train(2, first=SWITCH + 10)
    assert one.weights() == reference(front, world, SWITCH + 12)


@pytest.mark.parametrize("sync", ["solo", pytest.param("majority", marks=pytest.mark.full_matrix)])
def test_a_rank_that_has_left_ends_planning(front: Front, world: World, sync: str, known_cost: MessageCost) -> None:
    one = trainee(front, world, sync, replan_every=4)
    one.train(SWITCH + 6 if world.rank == 0 else SWITCH + 2)
    plan = one.plan
    front.hvd.flush()
    assert world.same(plan.gradients)
    assert world.rank == 0 or plan.measured is None


def test_a_saved_plan(front: Front, world: World, known_cost: MessageCost, tmp_path: Path) -> None:
    trainee(front, world, None).plan_of([1, 2, 3]).save(tmp_path / "plan.json")
    one = trainee(front, world, plan=tmp_path / "plan.json")
    one.train(1)
    assert one.plan.messages == (1, 2, 3)
    one.train(3, first=1)
    assert one.weights() == reference(front, world, 4)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_a_plan_for_another_model(front: Front, world: World, sync: str) -> None:
    plan = trainee(front, world, None, small=True).plan_of([2])
    with pytest.raises(front.misfit, match="the fusion plan is for other parameters"):
        trainee(front, world, sync, plan=plan).train(1)


def test_ranks_with_different_plans(front: Front, world: World) -> None:
    plan = trainee(front, world, None).plan_of([6] if world.rank == 0 else [3, 3])
    with pytest.raises(front.misfit, match=r"ranks 1(, \d)* have another model or another plan than rank 0"):
        trainee(front, world, plan=plan).train(1)


def test_one_rank_whose_plan_does_not_fit(front: Front, world: World) -> None:
    odd = world.rank == 1
    plan = trainee(front, world, None, small=odd).plan_of([2] if odd else [6])
    expected = "for other parameters" if odd else "does not fit the model of ranks 1"
    with pytest.raises(front.misfit, match=expected):
        trainee(front, world, plan=plan).train(1)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_dtypes_do_not_mix(front: Front, world: World, sync: str, known_cost: MessageCost) -> None:
    one = trainee(front, world, sync, middle="float64", rule="single")
    one.train(SWITCH + 2)
    assert sorted(one.plan.messages) == [2, 4]
    front.hvd.flush()
    if sync == "full":
        world.same(one.weights())
        assert one.weights() == reference(front, world, SWITCH + 2, middle="float64")
