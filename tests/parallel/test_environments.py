"""Horovod's own settings: each works with partial collectives beside ordinary ones."""

import pytest
import torch
from harness.buckets import collect
from harness.matrix import TRANSPORTS, WITH_TWO_RANKS, bare
from harness.torch_training import train, weights, wrapped
from harness.world import World

import horovod_partial.torch as hvd

OBSERVED = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_TIMELINE": "/dev/null",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    "HOROVOD_PARTIAL_LOG_LEVEL": "debug",
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
}


def partial_rounds_beside_horovods_collectives(world: World) -> None:
    names = [world.name(str(index)) for index in range(3)]
    delivered = [torch.zeros(50, dtype=torch.int64) for _ in names]
    for step in range(15):
        own = torch.full((50,), 100 * step + world.rank)
        handles = [hvd.partial_allreduce_async(own, name=name, op=hvd.Sum, sync="majority") for name in names]
        group = hvd.grouped_allreduce([torch.ones(4), torch.ones(8)], name=world.name("group"), op=hvd.Sum)
        assert [tensor[0].item() for tensor in group] == [world.size] * 2
        rows = hvd.allgather(torch.full((1, 2), world.rank), name=world.name("rows"))
        assert rows[:, 0].tolist() == list(world.ranks)
        for index, handle in enumerate(handles):
            delivered[index] += hvd.synchronize(handle)
    hvd.flush()
    expected = sum(100 * step + rank for step in range(15) for rank in world.ranks)
    for index, name in enumerate(names):
        delivered[index] += collect(name, delivered[index])
        assert delivered[index].tolist() == [expected] * 50
    world.barrier()  # what a faster rank does next is no part of this


def training(world: World, policy: str) -> None:
    model, optimizer = wrapped(policy, groups=2)
    train(world, optimizer, model, 20)
    optimizer.flush()
    everybody = world.gather(weights(model))
    assert all(other == pytest.approx(everybody[0], abs=1e-5) for other in everybody)


def uneven_ranks(world: World) -> None:
    for _ in range(5 + 5 * world.rank):
        hvd.partial_allreduce(torch.ones(3), name=world.name("uneven"), sync="quorum:0.75")
    hvd.flush()


@bare
def test_without_cache_and_fusion(world: World) -> None:
    partial_rounds_beside_horovods_collectives(world)
    training(world, "majority")
    uneven_ranks(world)


@pytest.mark.launch(label="observed", environment=OBSERVED, **WITH_TWO_RANKS)
def test_autotune_with_a_timeline_and_every_line_of_the_log_and_without_group_fusion(world: World) -> None:
    for _ in range(2):
        partial_rounds_beside_horovods_collectives(world)
    training(world, "solo")
    training(world, "majority")
    uneven_ranks(world)


@pytest.mark.launch(ranks=(1,), transports=("none",), full_transports=("none", *TRANSPORTS))
@pytest.mark.parametrize("policy", ["full", "solo", "majority", "majority:random", "quorum:3", "quorum:0.5"])
def test_one_rank(world: World, policy: str) -> None:
    for step in range(3):
        result = hvd.partial_allreduce(torch.tensor([1.0 + step]), name=world.name(), op=hvd.Sum, sync=policy)
        assert result.item() == 1.0 + step
    hvd.flush()
    hvd.join()
    training(world, policy)
