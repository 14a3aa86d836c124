"""`fusion=hvd.MergedGradients()`: measured plans, and buckets that change between two steps."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from harness.merging import ALL, EVERYBODY, SWITCH, WARMUP
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial import fusion
from horovod_partial.fusion import FusionPlan, MessageCost

pytestmark = pytest.mark.launch(full_ranks=(2, 8))


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers).to(dtype)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.mse_loss(model(x.to(dtype)).float(), y)


def wrap(model: torch.nn.Module, sync: str = "full", *, options: Any = None, **more: Any) -> Any:
    merged = hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **(options or {})})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), sync=sync, fusion=merged, **more)


def train(world: World, optimizer: Any, model: torch.nn.Module, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).tolist()


def reference(world: World, steps: int) -> list[float]:
    """After training one model on all ranks' batches, without Horovod."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in world.ranks:
            (loss_of(model, rank, step) / world.size).backward()
        optimizer.step()
    return weights(model)


def plan_of(model: torch.nn.Module, messages: list[int]) -> FusionPlan:
    named = list(reversed(list(model.named_parameters())))
    names, nbytes = tuple(name for name, _ in named), tuple(4 * p.numel() for _, p in named)
    return FusionPlan("exact", names, nbytes, (0.0,) * len(named), tuple(messages), MessageCost(1.0, 1.0))


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", fusion.RULES)
@pytest.mark.parametrize("sync", ["full", EVERYBODY])
def test_gradients_are_those_without_merging(world: World, sync: str, rule: str, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model, sync, options={"rule": rule})
    train(world, optimizer, model, SWITCH)
    assert optimizer.fusion_plan.rule == rule
    assert optimizer.fusion_plan.cost == known_cost
    train(world, optimizer, model, 4, first=SWITCH)
    optimizer.flush()
    world.same(weights(model))
    assert weights(model) == pytest.approx(reference(world, SWITCH + 4), abs=1e-6)


# What Horovod fuses depends on when it looks; and what travels beside a number decides in which order it is added up.
@pytest.mark.launch(label="unfused", environment={"HOROVOD_FUSION_THRESHOLD": "0"})
def test_full_has_the_bits_of_equal_buckets(world: World) -> None:
    merged, grouped = make_model(), make_model()
    plan = plan_of(merged, [2, 1, 3])
    parameters = dict(grouped.named_parameters())
    groups = [[parameters[name] for name in names] for names in plan.names()]
    sgd = torch.optim.SGD(grouped.parameters(), lr=0.1, momentum=0.9)
    by_groups = hvd.DistributedOptimizer(sgd, grouped.named_parameters(), sync=EVERYBODY, groups=groups)
    by_plan = wrap(merged, options={"plan": plan})
    train(world, by_groups, grouped, 6)
    train(world, by_plan, merged, 1)  # in one bucket, as small models are by default
    first = weights(merged)
    train(world, by_plan, merged, 5, first=1)
    assert first == pytest.approx(reference(world, 1), abs=1e-6)
    assert world.same(weights(merged)) == pytest.approx(weights(grouped), abs=1e-7)
    # From equal weights on, equal buckets make equal bits.
    grouped.load_state_dict(merged.state_dict())
    by_groups.load_state_dict(copy.deepcopy(by_plan.state_dict()))
    train(world, by_groups, grouped, 3, first=6)
    train(world, by_plan, merged, 3, first=6)
    assert weights(merged) == weights(grouped)


@pytest.mark.parametrize("sync", ALL)
def test_a_switch_loses_and_doubles_nothing(world: World, sync: str, known_cost: MessageCost) -> None:
    """Every rank's gradients are powers of two, so that their sum tells which were applied, and how often."""
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(4)]
    options = {"rule": "wait_free", "replan_every": 5}
    steps = 12
    merged = hvd.MergedGradients(warmup_steps=WARMUP, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), sync=sync, op=hvd.Sum, missed="sum", fusion=merged
    )
    random = world.random()
    pauses = [[random.random() < 0.3 for _ in world.ranks] for _ in range(steps)]
    for step in range(steps):
        if pauses[step][world.rank]:
            time.sleep(0.02)
        optimizer.zero_grad()
        # Rank r's gradient of step s is 2**(4 s + r mod 4), which doubles hold exactly.
        gradient = 2.0 ** (4 * step + world.rank % 4)
        sum(gradient * parameter.sum() for parameter in parameters).backward()
        optimizer.step()
    optimizer.flush()
    everything = -sum(2.0 ** (4 * step + rank % 4) for step in range(steps) for rank in world.ranks)
    for parameter in parameters:
        assert parameter.tolist() == [everything] * 3


@pytest.mark.parametrize("sync", ALL)
def test_rounds_go_on(world: World, sync: str, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model, sync, options={"rule": "wait_free"})
    seen = []
    for step in range(SWITCH + 3):
        train(world, optimizer, model, 1, first=step)
        seen.append(optimizer.rounds)
    assert seen == sorted(seen)
    assert seen[0] >= 1
    optimizer.flush()


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_is_rank_0s_and_is_measured(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model)
    assert optimizer.fusion_plan is None
    train(world, optimizer, model, SWITCH)
    plan = world.same(optimizer.fusion_plan)
    assert sorted(plan.gradients) == sorted(name for name, _ in model.named_parameters())
    assert plan.nbytes == tuple(4 * dict(model.named_parameters())[name].numel() for name in plan.gradients)
    assert list(plan.ready) == sorted(plan.ready)
    assert plan.ready[0] == 0.0
    assert plan.predicted > plan.around > 0.0
    assert plan.measured is None
    train(world, optimizer, model, WARMUP + 1, first=SWITCH)
    assert optimizer.fusion_plan.measured > 0.0


@pytest.mark.parametrize("sync", ALL)
def test_a_real_measurement(world: World, sync: str) -> None:
    """On a busy machine the fit may be refused: then the default plan is in use, and says why."""
    model = make_model()
    optimizer = wrap(model, sync)
    train(world, optimizer, model, SWITCH + 2)
    plan = world.gather(optimizer.fusion_plan)[0]
    assert plan.reason or plan.cost.r_squared >= 0.95
    optimizer.flush()
    if sync in ("full", EVERYBODY):
        assert weights(model) == pytest.approx(reference(world, SWITCH + 2), abs=1e-6)


def test_a_fit_that_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> MessageCost:
        raise ValueError("the network sleeps")

    monkeypatch.setattr(MessageCost, "fit", refuse)
    model = make_model()
    optimizer = wrap(model)
    train(world, optimizer, model, SWITCH + 2)
    plan = world.same(optimizer.fusion_plan)
    assert plan.reason == "the network sleeps"
    assert plan.messages == (6,)  # 25 MB to a bucket
    assert "default plan (the network sleeps)" in str(plan)
    assert weights(model) == pytest.approx(reference(world, SWITCH + 2), abs=1e-6)


def test_times_that_drift_make_a_new_plan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [MessageCost(1e-12, 1e-3), MessageCost(10.0, 1e-12)]
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: costs[0]))
    model = make_model()
    optimizer = wrap(model, options={"replan_every": 5})
    train(world, optimizer, model, SWITCH)
    assert world.same(optimizer.fusion_plan.messages) != (6,)
    train(world, optimizer, model, 5, first=SWITCH)
    same = optimizer.fusion_plan
    assert same.cost == costs[0]
    del costs[0]  # a message's latency is everything now
    train(world, optimizer, model, 5, first=SWITCH + 5)
    assert world.same(optimizer.fusion_plan.messages) == (6,)
    train(world, optimizer, model, 2, first=SWITCH + 10)
    assert weights(model) == pytest.approx(reference(world, SWITCH + 12), abs=1e-6)


@pytest.mark.parametrize("sync", ["solo", "majority"])
def test_a_rank_that_has_left_ends_planning(world: World, sync: str, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model, sync, options={"replan_every": 4})
    train(world, optimizer, model, SWITCH + 6 if world.rank == 0 else SWITCH + 2)
    plan = optimizer.fusion_plan
    optimizer.flush()
    assert world.same(plan.gradients)
    if world.rank > 0:
        assert plan.measured is None


def test_a_rank_that_leaves_before_there_is_a_plan(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model, "solo")
    if world.rank == 1:
        train(world, optimizer, model, 1)
        optimizer.flush()
        return
    with pytest.raises(hvd.HorovodInternalError, match="No rank that is missing will ever use this bucket"):
        train(world, optimizer, model, SWITCH)
    optimizer.flush()


def test_a_saved_plan(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model, options={"plan": plan_of(model, [1, 2, 3])})
    train(world, optimizer, model, 1)
    assert optimizer.fusion_plan.messages == (1, 2, 3)
    train(world, optimizer, model, 3, first=1)
    assert weights(model) == pytest.approx(reference(world, 4), abs=1e-6)


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_a_plan_for_another_model(world: World, sync: str) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = make_model()
    optimizer = wrap(model, sync, options={"plan": plan_of(other, [2])})
    with pytest.raises(ValueError, match="the fusion plan is for other parameters"):
        train(world, optimizer, model, 1)


def test_ranks_with_different_plans(world: World) -> None:
    model = make_model()
    optimizer = wrap(model, options={"plan": plan_of(model, [6] if world.rank == 0 else [3, 3])})
    with pytest.raises(ValueError, match=r"ranks 1(, \d)* have another model or another plan than rank 0"):
        train(world, optimizer, model, 1)


def test_one_rank_whose_plan_does_not_fit(world: World) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = make_model()
    optimizer = wrap(
        model, options={"plan": plan_of(other if world.rank == 1 else model, [2] if world.rank == 1 else [6])}
    )
    expected = "for other parameters" if world.rank == 1 else "does not fit the model of ranks 1"
    with pytest.raises(ValueError, match=expected):
        train(world, optimizer, model, 1)


# --- With the rest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_dtypes_do_not_mix(world: World, sync: str, known_cost: MessageCost) -> None:
    model = make_model()
    model[2].to(torch.float64)

    class Widen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double() if x.dtype == torch.float32 else x.float()

    model = torch.nn.Sequential(model[0], Widen(), model[2], Widen(), model[4])
    optimizer = wrap(model, sync, options={"rule": "single"})
    train(world, optimizer, model, SWITCH + 2)
    assert sorted(optimizer.fusion_plan.messages) == [2, 4]
    optimizer.flush()
    if sync == "full":
        world.same(weights(model))


def test_bfloat16_travels_as_float32(world: World, known_cost: MessageCost) -> None:
    model = make_model(torch.bfloat16)
    optimizer = wrap(model)
    train(world, optimizer, model, SWITCH + 2)
    assert sum(optimizer.fusion_plan.nbytes) == 4 * sum(p.numel() for p in model.parameters())
    world.same(weights(model))


def test_a_parameter_without_a_gradient(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    optimizer = wrap(model, options={"rule": "wait_free"})
    train(world, optimizer, model, SWITCH + 3)
    assert optimizer.fusion_plan.gradients[-1] in ("unused", "0.bias", "0.weight")
    assert model.unused.tolist() == [1.0] * 5
    world.same(weights(model))


def test_accumulation(world: World, known_cost: MessageCost) -> None:
    model, plain = make_model(), make_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(SWITCH + 3):
        optimizer.zero_grad()
        sgd.zero_grad()
        for part in range(2):
            loss_of(model, world.rank, 2 * step + part).backward()
            for rank in world.ranks:
                (loss_of(plain, rank, 2 * step + part) / world.size).backward()
        optimizer.step()
        sgd.step()
    assert weights(model) == pytest.approx(weights(plain), abs=1e-6)


def test_clipping_after_synchronize(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model)
    for step in range(SWITCH + 3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    world.same(weights(model))


@pytest.mark.parametrize("sync", ["full", "majority"])
def test_a_grad_scaler_skips_a_step_on_all_ranks(world: World, sync: str, known_cost: MessageCost) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = wrap(model, sync, grad_scaler=scaler)
    for step in range(SWITCH + 3):
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, step)
        scaler.scale(loss * float("inf") if step == 1 and world.rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.flush()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if sync == "full":
        world.same(weights(model))
        assert scaler.get_scale() == 2.0


def test_a_checkpoint(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    optimizer = wrap(model)
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


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"sync": "group_average"}, ValueError, "fusion cannot be used with"),
        ({"groups": 2}, ValueError, "fusion or groups, not both"),
        ({"fusion": "exact"}, TypeError, "fusion must be hvd.MergedGradients"),
    ],
)
def test_arguments_that_do_not_fit(world: World, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    model = make_model()
    given = {"fusion": hvd.MergedGradients(), **arguments}
    with pytest.raises(error, match=match):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **given)


def test_sparse_gradients_are_refused(world: World) -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = wrap(model)
    with pytest.raises(ValueError, match="cannot hold sparse gradients"):
        model(torch.tensor([0])).sum().backward()
    optimizer.zero_grad()
