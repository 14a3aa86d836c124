"""Process sets that come and go while ranks train: made and removed in different rounds, used again, and overlapping."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness.matrix import process_sets, scripted
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = scripted


def make() -> tuple[torch.nn.Linear, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: torch.nn.Module, optimizer: Any, world: World, steps: int, seconds: float = 0.0) -> None:
    for step in range(steps):
        time.sleep(seconds)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + world.rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_a_process_set_is_made_and_removed_while_ranks_are_in_different_rounds(world: World, policy: str) -> None:
    """Fast ranks wait in Horovod's function for the slow one, which waits in a round for them."""
    model, bare = make()
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=policy)
    slow = 0.03 if world.rank == world.size - 1 else 0.0
    train(model, optimizer, world, 6, slow)
    process_set = hvd.add_process_set(list(world.ranks)[:-1])
    hvd.assert_replicas_equal(model, optimizer)  # both functions flush
    train(model, optimizer, world, 6, slow)
    assert hvd.remove_process_set(process_set)
    hvd.assert_replicas_equal(model, optimizer)
    train(model, optimizer, world, 3, slow)
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)


def test_the_number_of_a_removed_process_set_is_used_again(world: World) -> None:
    """Horovod gives it to a set of other ranks, of which one has wrapped an optimizer for the earlier set, and one has not."""
    for ranks in ([0, 1], [1, 2], [0, 1]):
        process_set = hvd.add_process_set(ranks)
        if process_set.included():
            model, bare = make()
            optimizer = hvd.DistributedOptimizer(
                bare, model.named_parameters(), sync="majority", process_set=process_set
            )
            train(model, optimizer, world, 4)
            optimizer.flush()
            hvd.assert_replicas_equal(model, optimizer, process_set)
            del optimizer
        assert hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_nothing_that_is_pending_in_a_removed_process_set_is_lost(world: World) -> None:
    """A flush delivers it first."""
    process_set = hvd.add_process_set([0, 1])
    if process_set.included():
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), sync="solo", op=hvd.Sum, process_set=process_set
        )
        for _ in range(10):
            time.sleep(0.01 * world.rank)
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
    assert hvd.remove_process_set(process_set)
    if world.rank < 2:
        assert parameter.item() == -20.0


@process_sets
@pytest.mark.parametrize("policy", ["full", "majority"])
def test_each_rank_trains_in_one_of_two_process_sets(world: World, policy: str) -> None:
    """All ranks wrap an optimizer for each. The one for the other ranks takes no parameters over."""
    model, _ = make()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sync=policy, process_set=one
        )
        for one in sets
    ]
    mine = world.rank // 2
    train(model, optimizers[mine], world, 3)
    optimizers[mine].flush()
    hvd.assert_replicas_equal(model, optimizers[mine], sets[mine])
    for one in sets:
        assert hvd.remove_process_set(one)
