"""`fusion=hvd.MergedGradients()` of PyTorch; `test_conformance_merging.py` has what all front ends share."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from harness.matrix import alone, front_end
from harness.merging import ALL, EVERYBODY, SWITCH, WARMUP
from harness.torch_training import loss_of, make_model, reference, train, weights, wrap
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial.fusion import FusionPlan, MessageCost

pytestmark = front_end


def merge(model: torch.nn.Module, sync: str = "full", *, options: Any = None, **more: Any) -> Any:
    merged = hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **(options or {})})
    return wrap(model, sync, fusion=merged, **more)


# What Horovod fuses depends on when it looks; and what travels beside a number decides in which order it is added up.
@pytest.mark.launch(label="unfused", environment={"HOROVOD_FUSION_THRESHOLD": "0"}, ranks=(2,))
def test_full_has_the_bits_of_equal_buckets(world: World) -> None:
    merged, grouped = make_model(), make_model()
    named = [(name, 4 * parameter.numel()) for name, parameter in reversed(list(merged.named_parameters()))]
    plan = FusionPlan("exact", *zip(*named, strict=True), (0.0,) * 3, (1, 2), MessageCost(1.0, 1.0))
    parameters = dict(grouped.named_parameters())
    groups = [[parameters[name] for name in names] for names in plan.names()]
    sgd = torch.optim.SGD(grouped.parameters(), lr=0.1, momentum=0.9)
    by_groups = hvd.DistributedOptimizer(sgd, grouped.named_parameters(), sync=EVERYBODY, groups=groups)
    by_plan = merge(merged, options={"plan": plan})
    train(world, by_groups, grouped, 6)
    train(world, by_plan, merged, 1)  # in one bucket, as small models are by default
    first = weights(merged)
    train(world, by_plan, merged, 5, first=1)
    assert first == pytest.approx(reference(world, "momentum", 1), abs=1e-6)
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
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), sync=sync, op=hvd.Sum, fusion=merged)
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
    optimizer = merge(model, sync, options={"rule": "wait_free"})
    seen = []
    for step in range(SWITCH + 3):
        train(world, optimizer, model, 1, first=step)
        seen.append(optimizer.rounds)
    assert seen == sorted(seen)
    assert seen[0] >= 1
    optimizer.flush()


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


def test_bfloat16_travels_as_float32(world: World, known_cost: MessageCost) -> None:
    model = make_model().to(torch.bfloat16)
    optimizer = merge(model)
    train(world, optimizer, model, SWITCH + 2)
    assert sum(optimizer.fusion_plan.nbytes) == 4 * sum(p.numel() for p in model.parameters())
    world.same(weights(model))


def test_a_parameter_without_a_gradient(world: World, known_cost: MessageCost) -> None:
    model = make_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    optimizer = merge(model, options={"rule": "wait_free"})
    train(world, optimizer, model, SWITCH + 3)
    assert optimizer.fusion_plan.gradients[-1] in ("unused", "0.weight")
    assert model.unused.tolist() == [1.0] * 5
    world.same(weights(model))


def test_accumulation(world: World, known_cost: MessageCost) -> None:
    model, plain = make_model(), make_model()
    optimizer = merge(model, backward_passes_per_step=2)
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
    optimizer = merge(model)
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
    optimizer = merge(model, sync, grad_scaler=scaler)
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


@alone
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"sync": "group_average"}, ValueError, "fusion cannot be used with"),
        ({"groups": 2}, ValueError, "fusion or groups, not both"),
        ({"fusion": "exact"}, ValueError, "fusion must be hvd.MergedGradients"),
    ],
)
def test_arguments_that_do_not_fit(world: World, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    model = make_model()
    given = {"fusion": hvd.MergedGradients(), **arguments}
    with pytest.raises(error, match=match):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **given)


def test_sparse_gradients_are_refused(world: World) -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = merge(model)
    with pytest.raises(ValueError, match="cannot hold sparse gradients"):
        model(torch.tensor([0])).sum().backward()
    optimizer.zero_grad()
