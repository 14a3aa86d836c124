"""`merging=hvd.MergedGradients()` of PyTorch; `test_conformance_merging.py` has what all front ends share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.matrix import bare, front_end
from harness.merging import EVERYBODY, SWITCH, WARMUP
from harness.torch_training import loss_of, make_model, reference, train, weights, wrap
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial.merging import MergingPlan, MessageCost

pytestmark = front_end


def merge(model: torch.nn.Module, sync: str = "full", *, options: Any = None, **more: Any) -> Any:
    merged = hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **(options or {})})
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
    assert first == pytest.approx(reference(world, "momentum", 1), abs=1e-6)
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
