"""I1 and I7, with PyTorch's tensors; `test_conformance_invariants.py` has the others, and says where each is."""

from __future__ import annotations

import random

import pytest
import torch
from harness.buckets import collect, completed
from harness.world import World, delay

import horovod_partial.torch as hvd

POLICIES = ["solo", "majority", "majority:random", "quorum:0.75"]


@pytest.mark.parametrize("policy", POLICIES)
def test_i1_exactly_once(world: World, policy: str) -> None:
    rounds = {"mpi": 1000, "gloo": 200}[world.transport] if world.long else 40
    rng = random.Random(world.random().random() + world.rank)
    names = [world.name(f"bucket.{index}") for index in range(3)]
    submitted = [torch.zeros(7, dtype=torch.int64) for _ in names]
    delivered = [torch.zeros(7, dtype=torch.int64) for _ in names]
    for step in range(rounds):
        delay(rng)
        torch.manual_seed(rng.randrange(2**32))
        own = [torch.randint(-1000, 1000, (7,)) for _ in names]
        in_place = rng.random() < 0.5
        start = hvd.partial_allreduce_async_ if in_place else hvd.partial_allreduce_async
        handles = []
        for index, name in enumerate(names):
            submitted[index] += own[index]
            handles.append(start(own[index], name=name, op=hvd.Sum, sync=policy))
        if step % 10 == 0:
            beside = hvd.allreduce_async(torch.tensor([step + world.rank]), name=world.name("beside"), op=hvd.Sum)
        if step % 14 == 0:
            rows = hvd.allgather(torch.full((world.rank + 1, 2), world.rank), name=world.name("rows"))
            assert rows[:, 0].tolist() == [rank for rank in world.ranks for _ in range(rank + 1)]
        for index, handle in enumerate(handles):
            delivered[index] += hvd.synchronize(handle)
        if step % 10 == 0:
            assert hvd.synchronize(beside).item() == sum(step + rank for rank in world.ranks)
    hvd.flush()
    for index, name in enumerate(names):
        delivered[index] += collect(name, delivered[index])
    totals = torch.tensor(world.gather([tensor.tolist() for tensor in submitted])).sum(0)
    assert [tensor.tolist() for tensor in delivered] == totals.tolist()


def test_i7_no_torn_data(world: World) -> None:
    """The application writes into its tensor as soon as it may; a round's sum is of whole contributions."""
    rng = random.Random(world.random().random() + world.rank)
    tensor = torch.zeros(1 << 18, dtype=torch.int32)
    for step in range(60):
        delay(rng)
        tensor.fill_((step << 4) + world.rank)
        result = hvd.partial_allreduce_(tensor, name=world.name(), op=hvd.Sum, sync="solo")
        assert result.min() == result.max(), f"step {step}"
    hvd.flush()


@pytest.mark.parametrize("late", [0, 1])
def test_i1_a_flush_covers_all_buckets(world: World, late: int) -> None:
    """When `flush` returns, the flush round of every bucket has ended here."""
    names = [world.name(str(index)) for index in range(8)]
    sync = hvd.Quorum(world.size - 1)
    ones = torch.ones(200_000, dtype=torch.int64)

    def reduce_all() -> int:
        handles = [hvd.partial_allreduce_async(ones, name=name, op=hvd.Sum, sync=sync) for name in names]
        return sum(hvd.synchronize(handle)[0].item() for handle in handles)

    delivered = reduce_all()
    for step in range(3):
        if world.rank == late:
            for name in names:
                world.until(lambda name=name, step=step: completed(name) >= 2 * step + 2, "the round has ended here")
        delivered += reduce_all()
        hvd.flush()
        delivered += sum(collect(name, ones)[0].item() for name in names)
        assert delivered == len(names) * (step + 2) * world.size
        world.barrier()
