"""I6: nobody hangs. Ranks that do unequal work, join, leave, or wait for each other elsewhere (protocol, rules 7 and 8)."""

import threading
import time
from typing import Any

import pytest
import torch
from harness.buckets import collect
from harness.torch_training import MODELS, make_model, sync_of, train, weights, wrap
from harness.world import World

import horovod_partial.torch as hvd

POLICIES = ["solo", "majority", "majority:random", "quorum:0.75", "quorum:1.0"]


every_policy = pytest.mark.parametrize("policy", [*POLICIES, *MODELS])


def make(policy: str) -> tuple[torch.nn.Module, Any]:
    """A model, and its optimizer with a bucket for each layer, or for all if models are averaged."""
    model = make_model()
    groups = {} if policy in MODELS else {"groups": [list(model[0].parameters()), list(model[3].parameters())]}
    return model, wrap(model, sync_of(policy), "sgd", **groups)


def flush(world: World, optimizer: Any, model: torch.nn.Module, policy: str) -> None:
    """Flush an optimizer; models that are averaged are the same then."""
    optimizer.flush()
    if policy in MODELS:
        world.same(weights(model))


def one(value: int = 1) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full_matrix("gloo")
def test_three_times_as_many_steps(world: World, policy: str) -> None:
    """The others wait in a flush meanwhile: the slow ranks go on alone, and everything is delivered."""
    steps = 30 if world.rank == 0 else 10
    delivered = 0
    for step in range(steps):
        own = one(100 * step + world.rank)
        handle = hvd.partial_allreduce_async(own, name=world.name(), op=hvd.Sum, sync=policy)
        delivered += hvd.synchronize(handle).item()
    hvd.flush()
    delivered += collect(world.name(), one()).item()
    assert delivered == sum(100 * s + rank for rank in world.ranks for s in range(30 if rank == 0 else 10))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_rank_to_finish_its_script(world: World, policy: str) -> None:
    """[run] It flushes and then asks nothing of anybody; the last rank is alone when it does its last steps."""
    name = world.name()
    hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync=policy)
    with world.turn(world.rank):
        handle = hvd.partial_allreduce_async(one(), name=name, op=hvd.Sum, sync=policy)
    hvd.synchronize(handle)
    hvd.flush()


@pytest.mark.parametrize("policy", POLICIES)
def test_join_with_unequal_steps(world: World, policy: str) -> None:
    """[run] Joined ranks count as absent: a round is full without them, and closes."""
    delivered = 0
    name = world.name()
    steps = 5 + 3 * world.rank
    for step in range(steps):
        own = one(100 * step + world.rank)
        delivered += hvd.partial_allreduce(own, name=name, op=hvd.Sum, sync=policy).item()
    world.same(hvd.join())
    world.barrier()
    submitted = sum(100 * step + rank for rank in world.ranks for step in range(5 + 3 * rank))
    # Everything has been delivered; a rank that had joined did not see what came afterwards.
    assert max(world.gather(delivered + collect(name, one()).item())) <= submitted


@pytest.mark.launch(full_ranks=(4, 8))
def test_one_joined_rank_in_a_full_round(world: World) -> None:
    """[run] Its zeros must not be cached, or the next round could never be partial."""
    name = world.name()
    joined = world.size - 1
    hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync="quorum:1.0")
    world.barrier()
    if world.rank != joined:
        for _ in range(5):
            result = hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync="quorum:1.0")
            assert result.item() == world.size - 1
            assert hvd.allreduce(one(), name=world.name("beside"), op=hvd.Sum).item() == world.size - 1
    hvd.join()
    # After the join all are back.
    results = world.gather(hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync="quorum:1.0").item())
    hvd.flush()
    assert sum(results) >= world.size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full_matrix("gloo")
def test_evaluation_on_rank_0_only(world: World, policy: str) -> None:
    """The others train on meanwhile; a quorum that needs rank 0 waits for it no longer than it takes."""
    model, optimizer = make(policy)
    for epoch in range(2):
        train(world, optimizer, model, 5)
        if world.rank == 0:
            with torch.no_grad():
                for _ in range(20):
                    model(torch.randn(64, 4))
            world.tell(f"evaluated {epoch}")
    optimizer.flush()


@pytest.mark.launch(full_ranks=(4,), transports=("mpi",))
def test_two_buckets_waited_for_in_another_order(world: World) -> None:
    """[exhaustive model] Each half of the ranks waits for another bucket: without rule 7 nobody would go on."""
    a, b = world.name("a"), world.name("b")
    sync = hvd.Quorum(world.size - 1)
    for name in (a, b):
        hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync=sync)
    order = (a, b) if world.rank < world.size // 2 else (b, a)
    for name in order:
        hvd.partial_allreduce(one(), name=name, op=hvd.Sum, sync=sync)
    hvd.flush()
    reasons = hvd.partial_stats()
    assert reasons[a]["closed_by"].get("liveness", 0) + reasons[b]["closed_by"].get("liveness", 0) >= 1


@pytest.mark.launch(full_ranks=(2, 4))
def test_a_thread_that_waits_in_its_bucket_says_nothing_of_another_threads(world: World) -> None:
    """Each thread trains by itself. Where one computes, its rounds wait for it, whatever the other thread waits for."""
    steps, averages = 6, {}

    def train_by_itself(index: int) -> None:
        name = world.name(str(index))
        for step in range(steps):
            if step > 0 and world.rank % 2 == index:
                time.sleep(0.05)  # ten times as long as it takes until a wait counts
            own = torch.tensor([float(world.rank + step)])
            averages[index, step] = hvd.partial_allreduce(own, name=name, sync="quorum:1.0").item()

    threads = [threading.Thread(target=train_by_itself, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mean = sum(world.ranks) / world.size
    assert averages == {(index, step): pytest.approx(mean + step) for index in range(2) for step in range(steps)}
    stats = hvd.partial_stats()
    for index in range(2):
        assert stats[world.name(str(index))]["closed_by"].get("liveness", 0) == 0, stats
    world.barrier()


@every_policy
@pytest.mark.one_in(3)
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.full_matrix("gloo")
def test_ranks_take_unequal_numbers_of_steps(world: World, policy: str, busy: int) -> None:
    model, optimizer = make(policy)
    train(world, optimizer, model, 25 if world.rank == busy else 8)
    flush(world, optimizer, model, policy)


@pytest.mark.usefixtures("heals")
@every_policy
@pytest.mark.full_matrix("gloo")
@pytest.mark.one_in(2)
def test_join_of_an_optimizer(world: World, policy: str) -> None:
    model, optimizer = make(policy)
    train(world, optimizer, model, 5 + 6 * (world.rank == 1))
    world.same(hvd.join())
    train(world, optimizer, model, 4, first=20)
    flush(world, optimizer, model, policy)


@every_policy
@pytest.mark.one_in(2)
@pytest.mark.full_matrix("gloo")
def test_a_barrier_after_every_epoch(world: World, policy: str) -> None:
    """Ranks that wait in a collective of Horovod cannot come to a round: it closes without them."""
    model, optimizer = make(policy)
    for epoch in range(2):
        train(world, optimizer, model, 4 + 3 * (world.rank == epoch))
        total = hvd.allreduce(one(), name=world.name(f"epoch.{epoch}"), op=hvd.Sum)
        assert total.item() == world.size
    flush(world, optimizer, model, policy)


@pytest.mark.parametrize("policy", ["solo", "group", "ring", "ready"])
@pytest.mark.full_matrix("gloo")
def test_rounds_are_a_common_clock(world: World, policy: str) -> None:
    """Stopping by rounds: all ranks stop when the work is done, whoever did it."""
    model, optimizer = make(policy)
    steps = 0
    while optimizer.rounds < 30:
        train(world, optimizer, model, 1, first=steps)
        steps += 1
    flush(world, optimizer, model, policy)
    rounds = world.same(optimizer.rounds)
    assert rounds >= 30
    assert steps <= rounds
