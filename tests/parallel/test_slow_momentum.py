"""`hvd.SlowMomentum`: momentum of the averages over all ranks, against the recursion of SlowMo (ICLR 2020, Algorithm 1)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.matrix import front_end
from harness.torch_training import make_model, train, weights
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = front_end

BETA, ALPHA = 0.6, 0.8
MOMENTUM = hvd.SlowMomentum(BETA, ALPHA)


class Walk:
    """A model of one number, of which rank r takes away its gradient in each step: 1 + r + step."""

    def __init__(self, world: World, sync: Any) -> None:
        self.world = world
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0), [("weight", self.weight)], sync=sync
        )
        self.step_number = 0

    def step(self) -> float:
        self.optimizer.zero_grad()
        (self.weight * (1.0 + self.world.rank + self.step_number)).sum().backward()
        self.optimizer.step()
        self.step_number += 1
        return self.weight.item()

    def mean_gradient(self, step: int) -> float:
        return sum(1.0 + rank + step for rank in self.world.ranks) / self.world.size


class Outer:
    """The recursion, from the average of round 0 on."""

    def __init__(self, anchor: float) -> None:
        self.anchor, self.momentum = anchor, 0.0

    def average(self, plain: float) -> float:
        self.momentum = BETA * self.momentum + self.anchor - plain
        self.anchor -= ALPHA * self.momentum
        return self.anchor


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("period", [1, 3])
def test_full_rounds_of_groups(world: World, period: int, overlap: bool) -> None:
    """The groups of other rounds move nothing but models, whose mean they preserve."""
    policy = hvd.GroupAverage(2, period=period, overlap=overlap, slow_momentum=MOMENTUM, grace_ms=1e9)
    walk = Walk(world, policy)
    mean = 0.0
    outer = None
    for number in range(10):
        walk.step()
        walk.optimizer.synchronize()
        mean -= walk.mean_gradient(number)
        if number == 0:
            outer = Outer(mean)
        elif (number + 1) % period == 0:
            assert outer is not None
            mean = outer.average(mean)
        if number == 0 or (number + 1) % period == 0:
            assert world.same(walk.weight.item()) == pytest.approx(mean, abs=1e-9)
    walk.optimizer.flush()


def test_weighted_averages_and_flushes(world: World) -> None:
    """A flush is a plain average, from which the next period goes on; the momentum stays."""
    walk = Walk(world, hvd.WeightedAverage(2, 1.0, slow_momentum=MOMENTUM))
    mean, outer = 0.0, None
    for number in range(8):
        walk.step()
        mean -= walk.mean_gradient(number)
        if number % 2 == 1:
            mean = mean if outer is None else outer.average(mean)
            outer = outer or Outer(mean)
            assert world.same(walk.weight.item()) == pytest.approx(mean, abs=1e-9)
        world.barrier()
    assert outer is not None
    walk.optimizer.flush()
    assert walk.weight.item() == pytest.approx(mean, abs=1e-9)
    walk.step()
    walk.optimizer.flush()
    outer.anchor = mean = mean - walk.mean_gradient(8)
    assert world.same(walk.weight.item()) == pytest.approx(mean, abs=1e-9)
    for number in (9, 10):
        world.barrier()
        walk.step()
        mean -= walk.mean_gradient(number)
    assert world.same(walk.weight.item()) == pytest.approx(outer.average(mean), abs=1e-9)


def test_saved_and_loaded(world: World) -> None:
    """The momentum goes on in a new optimizer, where it began anew without the saved state."""
    policy = hvd.WeightedAverage(1, 1.0, slow_momentum=MOMENTUM)
    walk = Walk(world, policy)
    for _ in range(4):
        walk.step()
    saved = walk.optimizer.state_dict()
    resumed, plain = Walk(world, policy), Walk(world, policy)
    for other in (resumed, plain):
        other.step_number = walk.step_number
        with torch.no_grad():
            other.weight.copy_(walk.weight)
    plain.optimizer.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    resumed.optimizer.load_state_dict(saved)
    expected = [walk.step() for _ in range(3)]
    assert [resumed.step() for _ in range(3)] == pytest.approx(expected, abs=1e-9)
    assert plain.step() != pytest.approx(expected[0], abs=0.1)


def test_groups_that_are_resumed_begin_with_a_plain_average(world: World) -> None:
    """The round with which a new optimizer begins is no end of a period, so the momentum moves nothing there."""
    policy = hvd.GroupAverage(world.size, period=2, slow_momentum=MOMENTUM, grace_ms=1e9)
    walk = Walk(world, policy)
    for _ in range(6):
        walk.step()
    walk.optimizer.flush()
    momentum = walk.optimizer.state_dict()["slow_momentum"]["momentum"].item()
    assert momentum != 0.0
    resumed = Walk(world, policy)
    resumed.step_number = walk.step_number
    with torch.no_grad():
        resumed.weight.copy_(walk.weight)
    resumed.optimizer.load_state_dict(walk.optimizer.state_dict())
    expected = walk.weight.item() - walk.mean_gradient(walk.step_number)
    assert resumed.step() == pytest.approx(expected, abs=1e-9)
    outer = Outer(expected)
    outer.momentum = momentum
    expected = outer.average(expected - walk.mean_gradient(resumed.step_number))
    assert resumed.step() == pytest.approx(expected, abs=1e-9)
    resumed.optimizer.flush()


def test_a_rank_that_is_late(world: World) -> None:
    """The next round is of all ranks, but what a late rank comes with now is taken as its model, without momentum."""
    late, partner = 1, 0
    pairs = hvd.Schedule(lambda round, rank: rank // 2, 1)
    walk = Walk(world, hvd.GroupAverage(schedule=pairs, period=4, slow_momentum=MOMENTUM, grace_ms=0))

    def step_until(round: int) -> None:
        while walk.optimizer.last_round is None or walk.optimizer.last_round.round < round:
            walk.step()

    step_until(3)
    bucket = walk.optimizer._exchange.name
    world.barrier()
    if world.rank == partner:
        step_until(6)
    world.until(lambda: completed(bucket) >= 7, "the partner's rounds have ended here")
    of_partner = world.gather(walk.weight.item())[partner]
    if world.rank == late:
        own = walk.weight.item() - (1.0 + world.rank + walk.step_number)
        assert walk.step() == pytest.approx((2 * of_partner + own) / 3)
        assert walk.optimizer.last_round.late
    step_until(7)
    world.same(walk.weight.item())
    walk.optimizer.flush()


def test_racing_ranks_have_one_model_after_each_full_round(world: World) -> None:
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        sync=hvd.GroupAverage(2, period=4, average=("parameters", "state"), slow_momentum=hvd.SlowMomentum(0.5)),
    )
    step = 0
    for number in (3, 7, 11, 15):
        while optimizer.last_round is None or optimizer.last_round.round < number:
            if (step + world.rank) % 5 == 0:
                time.sleep(0.003)
            train(world, optimizer, model, 1, first=step)
            step += 1
        world.same(weights(model))
    optimizer.flush()
