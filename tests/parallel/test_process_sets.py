"""Process sets that come and go while ranks train: made and removed in different rounds, used again, and overlapping."""

import time

import pytest
import torch
from harness.matrix import process_sets, scripted
from harness.torch_training import loss_of, make_model, take_step, train, wrap, wrapped
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = scripted


@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_a_process_set_is_made_and_removed_while_ranks_are_in_different_rounds(world: World, policy: str) -> None:
    """Fast ranks wait in Horovod's function for the slow one, which waits in a round for them."""
    model, optimizer = wrapped(policy)
    slow = 0.03 if world.rank == world.size - 1 else 0.0
    train(world, optimizer, model, 6, seconds=slow)
    process_set = hvd.add_process_set(list(world.ranks)[:-1])
    hvd.assert_replicas_equal(model, optimizer)  # both functions flush
    train(world, optimizer, model, 6, seconds=slow)
    assert hvd.remove_process_set(process_set)
    hvd.assert_replicas_equal(model, optimizer)
    train(world, optimizer, model, 3, seconds=slow)
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)


def test_the_number_of_a_removed_process_set_is_used_again(world: World) -> None:
    """Horovod gives it to a set of other ranks, of which one has wrapped an optimizer for the earlier set, and one has not."""
    for ranks in ([0, 1], [1, 2], [0, 1]):
        process_set = hvd.add_process_set(ranks)
        if process_set.included():
            model, optimizer = wrapped("majority", process_set=process_set)
            train(world, optimizer, model, 4)
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
        sgd = torch.optim.SGD([parameter], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, sync="solo", op=hvd.Sum, process_set=process_set)
        for _ in range(10):
            time.sleep(0.01 * world.rank)
            take_step(optimizer, parameter.sum)
    assert hvd.remove_process_set(process_set)
    if world.rank < 2:
        assert parameter.item() == -20.0
        for use in (
            lambda: optimizer.rounds,
            optimizer.flush,
            optimizer.step,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
        ):
            with pytest.raises(ValueError, match="the process set of this optimizer was removed"):
                use()
        for function in (hvd.flush, hvd.partial_stats):
            with pytest.raises(ValueError, match="that is registered, and was not removed"):
                function(process_set)


def test_work_sharing_in_a_removed_process_set(world: World) -> None:
    process_set = hvd.add_process_set([0, 1])
    if process_set.included():
        model, optimizer = wrapped(hvd.WorkSharing(), process_set=process_set, backward_passes_per_step=2)
        train(world, optimizer, model, 2)
        optimizer.flush()
    assert hvd.remove_process_set(process_set)
    if world.rank < 2:
        with pytest.raises(ValueError, match="the process set is not registered"):
            loss_of(model, world.rank, 0).backward()
        with pytest.raises(ValueError, match="the process set of this optimizer was removed"):
            optimizer.step()


@process_sets
@pytest.mark.parametrize("policy", ["full", "majority"])
def test_each_rank_trains_in_one_of_two_process_sets(world: World, policy: str) -> None:
    """All ranks wrap an optimizer for each. The one for the other ranks takes no parameters over."""
    model = make_model()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    optimizers = [wrap(model, policy, process_set=one) for one in sets]
    mine = world.rank // 2
    train(world, optimizers[mine], model, 3)
    optimizers[mine].flush()
    hvd.assert_replicas_equal(model, optimizers[mine], sets[mine])
    other = make_model()
    wrap(other, policy, process_set=sets[1 - mine])
    loss_of(other, world.rank, 0).backward()  # that wrapper is gone, but had no task on this rank
    for one in sets:
        assert hvd.remove_process_set(one)
