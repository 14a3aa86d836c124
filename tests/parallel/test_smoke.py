"""A little of everything, with few and with many ranks."""

import pytest
import torch
from harness.buckets import collect
from harness.matrix import OVER_MPI
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = [pytest.mark.launch(ranks=(8,), full_ranks=(2, 8), **OVER_MPI), pytest.mark.one_in(4)]


@pytest.mark.parametrize("policy", ["solo", "majority", "majority:random", "quorum:0.75"])
def test_every_contribution_is_delivered(world: World, policy: str) -> None:
    steps = 10
    delivered = 0
    for step in range(steps):
        tensor = torch.tensor([1000 * step + world.rank])
        delivered += hvd.partial_allreduce_(tensor, name=world.name(), op=hvd.Sum, sync=policy).item()
    hvd.flush()
    delivered += collect(world.name(), torch.zeros(1, dtype=torch.int64)).item()
    assert delivered == sum(1000 * step + rank for step in range(steps) for rank in world.ranks)


@pytest.mark.parametrize("policy", ["majority", "full", "solo"])
def test_training(world: World, policy: str) -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync=policy)
    hvd.broadcast_parameters(model.state_dict(), 0)
    target = torch.tensor([[1.0, -2.0, 3.0]])
    for _ in range(60):
        x = torch.randn(16, 3)
        optimizer.zero_grad()
        ((model(x) - x @ target.T) ** 2).mean().backward()
        optimizer.step()
    optimizer.flush()
    assert torch.allclose(model.weight, target, atol=0.1)


def test_group_collectives_of_horovod_beside(world: World) -> None:
    handle = hvd.partial_allreduce_async(torch.ones(4), name=world.name("partial"), op=hvd.Sum, sync="solo")
    assert hvd.allgather(torch.tensor([world.rank]), name=world.name("rows")).tolist() == list(world.ranks)
    assert hvd.broadcast(torch.tensor([world.rank]), 1, name=world.name("broadcast")).item() == 1
    assert hvd.synchronize(handle).tolist() == [world.size] * 4
