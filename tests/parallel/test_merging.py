"""`merging=hvd.MergedGradients()`: measured plans, and buckets that change between two steps."""

import copy
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.matrix import WITH_TWO_RANKS, alone, bare
from harness.torch_training import loss_of, make_model, train, weights, wrap
from harness.torch_training import reference as reference_of
from harness.trainers import EVERYBODY, Trainer, Training, batch, linear, network, table
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial import merging
from horovod_partial.merging import MergingPlan, MessageCost, planner

# Ranks that plan differently, or fail alone, see parameters in different orders afterwards, and names that follow from
# that order would not agree in the tests of other files.
pytestmark = [pytest.mark.launch(**WITH_TWO_RANKS), pytest.mark.turn("last"), pytest.mark.trainers("torch")]

ALL = ["full", "solo", "majority", EVERYBODY]
WARMUP = 2
SWITCH = WARMUP + 1  # steps until the plan is there
OF_PLANS = ("plan", "rule", "replan_every", "warmup_steps")


SMALL = [np.ones((4, 2)), np.ones(2)]  # a model of one layer, whose gradients fit no other model's plan
MIDDLE = ["float32", "float32", "float64", "float64", "float32", "float32"]  # another layer in the middle


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> MessageCost:
    """A network that is never busy: probes travel, but their times do not count."""
    cost = MessageCost(1e-4, 1e-9)
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: cost))
    monkeypatch.setattr(planner, "_PROBES", 1)
    return cost


def merged(trainer: Trainer, world: World, sync: Any = "full", *training: Any, **options: Any) -> Training:
    """Make a training with merged gradients. Its options may be those of `MergedGradients`, too."""
    of_plans = {name: options.pop(name) for name in OF_PLANS if name in options}
    defaults = {"rule": "exact", "warmup_steps": WARMUP, "replan_every": None}
    options["merging"] = trainer.hvd.MergedGradients(**(defaults | of_plans))
    return trainer.training(world, sync, *training, **options)


def gradients(one: Training) -> list[tuple[str, int]]:
    """The name and the bytes of each gradient, in the order in which they come."""
    numbered = list(enumerate(one.parameters))[::-1]
    return [(one.trainer.name_of(number, each), 4 * int(np.prod(each.shape))) for number, each in numbered]


def plan_of(one: Training, messages: list[int]) -> MergingPlan:
    """A plan with so many gradients in each message."""
    names, nbytes = zip(*gradients(one), strict=True)
    return MergingPlan(
        "exact", names, nbytes, (0.0,) * len(names), tuple(messages), MessageCost(1.0, 1.0), measured=9.0
    )


def reference(trainer: Trainer, world: World, steps: int, **options: Any) -> Any:
    """What the weights are after training one model on all ranks' batches, without Horovod."""
    return pytest.approx(trainer.training(world, None, **options).train_alone(steps).weights(), abs=1e-5)


@pytest.mark.parametrize("rule", merging.RULES)
@pytest.mark.parametrize("sync", ["full", EVERYBODY])
def test_gradients_are_those_without_merging(
    trainer: Trainer, world: World, sync: str, rule: str, known_cost: MessageCost
) -> None:
    one = merged(trainer, world, sync, rule=rule)
    one.train(SWITCH)
    plan = world.same(one.optimizer.merging_plan)
    assert (plan.rule, plan.cost, plan.measured) == (rule, known_cost, None)
    assert sorted(zip(plan.gradients, plan.nbytes, strict=True)) == sorted(gradients(one))
    assert list(plan.ready) == sorted(plan.ready)
    assert plan.ready[0] == 0.0
    assert plan.predicted > plan.around > 0.0
    one.train(WARMUP + 2, first=SWITCH)
    assert one.optimizer.merging_plan.measured > 0.0
    world.same(one.weights())
    assert one.weights() == reference(trainer, world, SWITCH + WARMUP + 2)
    trainer.hvd.flush()


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_plans_are_tried(trainer: Trainer, world: World, sync: str, known_cost: MessageCost) -> None:
    """All ranks try the same plans in the same steps, and keep the same one. Nothing of the others is left."""
    one = merged(trainer, world, sync, rule="measured", replan_every=5 * SWITCH)
    tried = set()
    for number in range(5 * SWITCH):
        one.train(1, first=number)
        plan = one.optimizer.merging_plan
        assert len(set(world.gather(None if plan is None else (plan.rule, plan.messages)))) == 1
        tried.add(None if plan is None else plan.messages)
    assert {(1,) * 6, (6,)} <= tried
    assert world.same(one.optimizer.merging_plan.measured) > 0.0
    own = [name for name in hvd.partial_stats() if name.startswith(trainer.buckets(one.optimizer)[0].split(".plan")[0])]
    assert len({name.rpartition(".")[0] for name in own if not name.endswith(".wait")}) == 1
    one.train(SWITCH, first=5 * SWITCH)
    if sync == "full":
        assert one.weights() == reference(trainer, world, 6 * SWITCH)
    trainer.hvd.flush()


def test_a_rank_that_leaves_during_the_trial(trainer: Trainer, world: World, known_cost: MessageCost) -> None:
    one = merged(trainer, world, "solo", rule="measured")
    one.train(SWITCH + 1 if world.rank == 1 else 4 * SWITCH)
    trainer.hvd.flush()
    assert len(set(world.gather(one.optimizer.merging_plan.messages))) == 1


def test_steps_without_gradients(trainer: Trainer, world: World, known_cost: MessageCost) -> None:
    """A rank whose data ran out takes empty steps while the others measure."""
    one = merged(trainer, world, "full", rule="measured")
    for number in range(3 * SWITCH):
        if world.rank == 1:
            one.optimizer.step()
        else:
            one.train(1, first=number)
    assert world.same(one.optimizer.merging_plan.messages)
    trainer.hvd.flush()


def test_options_that_differ(trainer: Trainer, world: World) -> None:
    with pytest.raises(trainer.disagreement, match="merging=exact, 2 steps, never again"):
        merged(trainer, world, warmup_steps=WARMUP + world.rank).train(1)


@pytest.mark.parametrize("sync", ALL)
def test_a_real_measurement(trainer: Trainer, world: World, sync: str) -> None:
    """On a busy machine the fit may be refused: then the default plan is in use, and says why."""
    one = merged(trainer, world, sync)
    one.train(SWITCH + 2)
    plan = world.gather(one.optimizer.merging_plan)[0]
    assert re.search("do not (lie|grow)", plan.reason) or plan.cost.r_squared >= 0.95
    if sync in ("full", EVERYBODY):
        assert one.weights() == reference(trainer, world, SWITCH + 2)
    trainer.hvd.flush()


def test_a_fit_that_is_refused(trainer: Trainer, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> MessageCost:
        raise ValueError("the network sleeps")

    monkeypatch.setattr(MessageCost, "fit", refuse)
    monkeypatch.setattr(planner, "_PROBES", 1)
    one = merged(trainer, world)
    one.train(SWITCH + 2)
    plan = world.same(one.optimizer.merging_plan)
    assert (plan.reason, plan.messages) == ("the network sleeps", (6,))  # 25 MB to a bucket
    assert "default plan (the network sleeps)" in str(plan)
    assert one.weights() == reference(trainer, world, SWITCH + 2)


def test_times_that_drift_make_a_new_plan(trainer: Trainer, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [MessageCost(1e-12, 1e-3), MessageCost(10.0, 1e-12)]
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: costs[0]))
    monkeypatch.setattr(planner, "_PROBES", 1)
    one = merged(trainer, world, replan_every=5)
    one.train(SWITCH)
    assert world.same(one.optimizer.merging_plan.messages) != (6,)
    one.train(5, first=SWITCH)
    assert one.optimizer.merging_plan.cost == costs[0]
    del costs[0]  # a message's latency is everything now
    one.train(5, first=SWITCH + 5)
    assert world.same(one.optimizer.merging_plan.messages) == (6,)
    one.train(2, first=SWITCH + 10)
    assert one.weights() == reference(trainer, world, SWITCH + 12)


@pytest.mark.parametrize("sync", ["solo", pytest.param("majority", marks=pytest.mark.full_matrix)])
def test_a_rank_that_has_left_leaves_the_plan_as_it_is(
    trainer: Trainer, world: World, sync: str, known_cost: MessageCost
) -> None:
    one = merged(trainer, world, sync, replan_every=4)
    one.train(SWITCH + 6 if world.rank == 0 else SWITCH + 2)
    plan = one.optimizer.merging_plan
    trainer.hvd.flush()
    assert world.same(plan.gradients)
    assert world.rank == 0 or plan.measured is None


def test_a_saved_plan(trainer: Trainer, world: World, known_cost: MessageCost, tmp_path: Path) -> None:
    plan_of(trainer.training(world, None), [1, 2, 3]).save(tmp_path / "plan.json")
    one = merged(trainer, world, plan=tmp_path / "plan.json")
    one.train(1)
    assert (one.optimizer.merging_plan.messages, one.optimizer.merging_plan.measured) == ((1, 2, 3), None)
    one.train(3, first=1)
    assert one.weights() == reference(trainer, world, 4)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_a_plan_for_another_model(trainer: Trainer, world: World, sync: str) -> None:
    plan = plan_of(trainer.training(world, None, arrays=SMALL), [2])
    with pytest.raises(ValueError, match="the merging plan is for other parameters"):
        merged(trainer, world, sync, plan=plan).train(1)


def test_ranks_with_different_plans(trainer: Trainer, world: World) -> None:
    plan = plan_of(trainer.training(world, None), [6] if world.rank == 0 else [3, 3])
    with pytest.raises(ValueError, match=r"ranks 1(, \d)* have another model or another plan than rank 0"):
        merged(trainer, world, plan=plan).train(1)


def test_one_rank_whose_plan_does_not_fit(trainer: Trainer, world: World) -> None:
    odd = world.rank == 1
    plan = plan_of(trainer.training(world, None, arrays=SMALL if odd else None), [2] if odd else [6])
    expected = "for other parameters" if odd else "does not fit the model of ranks 1"
    with pytest.raises(ValueError, match=expected):
        merged(trainer, world, plan=plan).train(1)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_dtypes_do_not_mix(trainer: Trainer, world: World, sync: str, known_cost: MessageCost) -> None:
    one = merged(trainer, world, sync, dtypes=MIDDLE, rule="single")
    one.train(SWITCH + 2)
    assert sorted(one.optimizer.merging_plan.messages) == [2, 4]
    trainer.hvd.flush()
    if sync == "full":
        world.same(one.weights())
        assert one.weights() == reference(trainer, world, SWITCH + 2, dtypes=MIDDLE)


# --- Steps around the switch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ALL)
def test_a_switch_loses_and_doubles_nothing(trainer: Trainer, world: World, sync: str, known_cost: MessageCost) -> None:
    """Every rank's gradients are powers of two, so that their sum tells which were applied, and how often."""
    arrays = [np.zeros(3)] * 4
    options = {"op": trainer.hvd.Sum, "rule": "wait_free", "replan_every": 5}
    one = merged(trainer, world, sync, "unit", linear, arrays, ["float64"], **options)
    random = world.random()
    steps, rounds = 12, 0
    pauses = [[random.random() < 0.3 for _ in world.ranks] for _ in range(steps)]
    for number in range(steps):
        if pauses[number][world.rank]:
            time.sleep(0.02)
        # Rank r's gradient of step s is 2**(4 s + r mod 4), which doubles hold exactly.
        one.step(*[np.full(3, 2.0 ** (4 * number + world.rank % 4))] * 4)
        assert one.optimizer.rounds >= max(rounds, 1)
        rounds = one.optimizer.rounds
    one.flush()
    assert one.optimizer.merging_plan.messages == (1,) * 4
    everything = -sum(2.0 ** (4 * number + rank % 4) for number in range(steps) for rank in world.ranks)
    assert one.weights() == [everything] * 12


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_before_the_switch(
    trainer: Trainer, world: World, late: int, known_cost: MessageCost
) -> None:
    """What it has missed by then comes with the results of the step in which the plan is made."""
    sync = trainer.hvd.Quorum(world.size - 1, grace_ms=0)
    options = {"op": trainer.hvd.Sum, "rule": "wait_free"}
    one = merged(trainer, world, sync, "unit", linear, [np.zeros(3)] * 4, ["float64"], **options)

    def run(number: int) -> None:
        one.step(*[np.full(3, 10.0 ** (world.size * number + world.rank))] * 4)

    run(0)
    world.barrier()
    if world.rank == late:
        for rank in set(world.ranks) - {late}:
            world.wait_for(f"rank {rank} is through step 1")
    run(1)
    world.tell(f"rank {world.rank} is through step 1")
    run(2)
    assert one.optimizer.merging_plan.messages == (1,) * 4
    everything = -sum(10.0 ** (world.size * number + rank) for number in range(3) for rank in world.ranks)
    assert one.weights() == [everything] * 12  # without a flush of one's own
    run(3)
    one.flush()


# --- With the rest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("bfloat16", 4)])
def test_half_precision(trainer: Trainer, world: World, dtype: str, width: int, known_cost: MessageCost) -> None:
    """bfloat16 travels as float32."""
    one = merged(trainer, world, dtypes=[dtype])
    one.train(SWITCH + 2)
    assert sum(one.optimizer.merging_plan.nbytes) == width * len(one.weights())
    world.same(one.weights())


def test_compression(trainer: Trainer, world: World, known_cost: MessageCost) -> None:
    one = merged(trainer, world, compression=trainer.hvd.Compression.fp16)
    one.train(SWITCH + 2)
    assert sum(one.optimizer.merging_plan.nbytes) == 2 * len(one.weights())
    expected = trainer.training(world, None).train_alone(SWITCH + 2)
    assert one.weights() == pytest.approx(expected.weights(), abs=1e-2)


def test_accumulation_and_clipping(trainer: Trainer, world: World, known_cost: MessageCost) -> None:
    one = merged(trainer, world, passes=2, clip=0.1)
    one.train(2 * SWITCH + 4)
    doubled = lambda *inputs: 2.0 * network(*inputs)
    expected = trainer.training(world, None, loss=doubled, clip=0.1).train_alone(SWITCH + 2, passes=2)
    assert one.weights() == pytest.approx(expected.weights(), abs=1e-5)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_a_scaled_loss(trainer: Trainer, world: World, sync: str, known_cost: MessageCost) -> None:
    """A step whose gradients are not finite is skipped on all ranks."""
    one = merged(trainer, world, sync, scale=4.0)
    for number in range(SWITCH + 3):
        x, y = batch(world.rank, number)
        one.step(x, y + np.float32(np.inf if number == 1 and world.rank == 1 else 0.0))
    one.flush()
    assert np.isfinite(one.weights()).all()
    assert sync != "full" or trainer.scale_of(one) == 2.0


def test_sparse_gradients_are_refused(trainer: Trainer, world: World) -> None:
    one = merged(trainer, world, "full", "unit", table, [np.zeros((4, 2))])
    with pytest.raises(ValueError, match="cannot hold sparse gradients"):
        one.step([0])


@alone
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"sync": "group_average"}, "merging cannot be used with|averages models"),
        ({"groups": 2}, "merging or groups, not both"),
        ({"merging": "exact"}, "merging must be hvd.MergedGradients"),
    ],
)
def test_arguments_that_do_not_fit(trainer: Trainer, world: World, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        trainer.wrap(**({"merging": trainer.hvd.MergedGradients()} | arguments))


# --- With an optimizer of PyTorch by hand ----------------------------------------------------------------------------


def merge(model: torch.nn.Module, sync: str = "full", *, options: Any = None, **more: Any) -> Any:
    merged = hvd.MergedGradients(**{"rule": "exact", "warmup_steps": WARMUP, "replan_every": None, **(options or {})})
    return wrap(model, sync, merging=merged, **more)


# What Horovod fuses depends on when it looks; and what travels beside a number decides in which order it is added up.
@bare
def test_full_has_the_bits_of_equal_buckets(world: World) -> None:
    merged, grouped = make_model(), make_model()
    named = [(name, 4 * parameter.numel()) for name, parameter in reversed(list(merged.named_parameters()))]
    plan = MergingPlan("exact", *zip(*named, strict=True), (0.0,) * 3, (1, 2), MessageCost(1.0, 1.0))
    parameters = dict(grouped.named_parameters())
    groups = [[parameters[name] for name in names] for names in plan.names()]
    sgd = torch.optim.SGD(grouped.parameters(), lr=0.1, momentum=0.9)
    by_groups = hvd.DistributedOptimizer(sgd, grouped.named_parameters(), sync=EVERYBODY, groups=groups)
    by_plan = merge(merged, options={"plan": plan})
    train(world, by_groups, grouped, 6)
    train(world, by_plan, merged, 1)  # in one bucket, as small models are by default
    first = weights(merged)
    train(world, by_plan, merged, 5, first=1)
    assert first == pytest.approx(reference_of(world, "momentum", 1), abs=1e-6)
    assert world.same(weights(merged)) == pytest.approx(weights(grouped), abs=1e-7)
    # From equal weights on, equal buckets make equal bits.
    grouped.load_state_dict(merged.state_dict())
    by_groups.load_state_dict(copy.deepcopy(by_plan.state_dict()))
    train(world, by_groups, grouped, 3, first=6)
    train(world, by_plan, merged, 3, first=6)
    assert weights(merged) == weights(grouped)


def test_a_rank_that_leaves_before_there_is_a_plan(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = merge(model, "solo")
    if world.rank == 1:
        train(world, optimizer, model, 1)
        optimizer.flush()
        return
    with pytest.raises(hvd.HorovodInternalError, match="No rank that is missing will ever use this bucket"):
        train(world, optimizer, model, SWITCH)
    optimizer.flush()


def test_a_parameter_without_a_gradient(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    optimizer = merge(model, options={"rule": "wait_free"})
    train(world, optimizer, model, SWITCH + 3)
    assert optimizer.merging_plan.gradients[-1] in ("unused", "0.weight")
    assert model.unused.tolist() == [1.0] * 5
    world.same(weights(model))


def test_clipping_after_synchronize(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = merge(model)
    for step in range(SWITCH + 3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    world.same(weights(model))


def test_a_checkpoint(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = merge(model)
    train(world, optimizer, model, SWITCH + 1)
    before, state = weights(model), {key: value.clone() for key, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    saved = {
        "state": {k: {n: v.clone() for n, v in s.items()} for k, s in saved["state"].items()},
        "param_groups": saved["param_groups"],
    }
    train(world, optimizer, model, 2, first=10)
    after = weights(model)
    model.load_state_dict(state)
    optimizer.load_state_dict(saved)
    assert weights(model) == before
    train(world, optimizer, model, 2, first=10)
    assert weights(model) == after


@pytest.mark.launch(ranks=(4,))
@pytest.mark.parametrize("sync", ["majority", "solo"])
def test_a_slow_rank_is_waited_for(world: World, sync: str, known_cost: MessageCost) -> None:
    """The last rank has taken fewer steps when the others are where the next plan is made or tried."""
    model = make_model()
    optimizer = merge(model, sync, options={"rule": "measured"})
    tried = set()
    for step in range(5 * SWITCH):
        time.sleep(0.02 if world.rank == world.size - 1 else 0.0)
        train(world, optimizer, model, 1, first=step)
        tried.add(optimizer.merging_plan and optimizer.merging_plan.messages)
    assert {(1, 1, 1), (3,)} <= tried
    optimizer.flush()
    assert len(set(world.gather(optimizer.merging_plan.messages))) == 1
    world.same(weights(model))
