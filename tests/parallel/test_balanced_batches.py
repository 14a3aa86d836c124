"""`hvd.BalancedBatchSampler` on several ranks: what they must know alike, and samples of their own."""

import itertools
import time
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from harness.matrix import front_end
from harness.world import World
from torch.utils.data import DataLoader

import horovod_partial.torch as hvd

pytestmark = front_end


def lengths_of(rank: int, samples: int = 60) -> Any:
    return np.random.default_rng(rank).uniform(1, 100, samples)


def train_on(sampler: hvd.BalancedBatchSampler) -> None:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for _ in sampler:
            time.sleep(0.01)


def test_ranks_share_all_samples(world: World) -> None:
    samples = 20 * world.size - 1
    loader = DataLoader(
        range(samples), batch_sampler=hvd.BalancedBatchSampler(lengths_of(0, samples), 5), num_workers=1
    )
    found = world.gather([batch.tolist() for batch in loader])
    assert {len(batches) for batches in found} == {4}
    assert set(itertools.chain(*itertools.chain(*found))) == set(range(samples))


def test_lengths_of_own_samples_are_refused(world: World) -> None:
    sampler = hvd.BalancedBatchSampler(lengths_of(world.rank), 5)
    others = ", ".join(map(str, world.ranks[1:]))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"rank {world.rank}: ranks {others} made .* other lengths .* sharded=True"
        ):
            train_on(sampler)


def test_other_arguments_are_refused(world: World) -> None:
    last = world.size - 1
    sampler = hvd.BalancedBatchSampler(lengths_of(0), 5, seed=int(world.rank == last))
    with pytest.raises(ValueError, match=f"rank {world.rank}: ranks {last} made their BalancedBatchSampler with other"):
        train_on(sampler)
    with pytest.raises(ValueError, match=f"rank {world.rank}: ranks {last} made their BalancedBatchSampler with other"):
        train_on(hvd.BalancedBatchSampler(lengths_of(0), 5, sharded=world.rank != last))


def test_a_rank_may_look_at_a_batch_alone(world: World) -> None:
    sampler = hvd.BalancedBatchSampler(lengths_of(0), 5)
    if world.rank == 0:
        next(iter(sampler))
    hvd.barrier()
    assert len(list(sampler)) == 60 // (5 * world.size)
    hvd.barrier()


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_rank_has_its_own_samples(world: World, drop_last: bool) -> None:
    own = lengths_of(world.rank, 200 + 4 * world.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = hvd.BalancedBatchSampler(own, 5, sharded=True, drop_last=drop_last)
    seen: Counter[int] = Counter()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) == world.same(len(batches))
        assert all(len(batch) == 5 for batch in batches)
        epoch_counts = Counter(itertools.chain(*batches))
        assert max(epoch_counts.values()) <= (1 if drop_last else 2)
        assert len(epoch_counts) >= 0.94 * len(own)
        seen += epoch_counts
        longest = np.array(world.gather([own[batch].max() for batch in batches]))
        assert np.mean(longest.max(0) - longest.min(0)) < 15  # of 100
    assert set(seen) == set(range(len(own)))
    hvd.barrier()


def test_unlike_samples_of_ranks_are_told(world: World) -> None:
    own = lengths_of(0) if world.rank == 0 else lengths_of(0) / 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.BalancedBatchSampler(own, 5, sharded=True)
    assert [str(each.message)[:44] for each in caught] == ["the samples of the ranks have unlike lengths"] * (
        world.rank == 0
    )


def test_a_state_of_own_samples_needs_as_many_ranks(world: World) -> None:
    sampler = hvd.BalancedBatchSampler(lengths_of(world.rank), 5, sharded=True)
    whole = list(sampler)
    sampler.load_state_dict({"epoch": 0, "done": [[world.size, 3]]})
    assert list(sampler) == whole[3:]
    sampler.load_state_dict({"epoch": 0, "done": [[world.size + 1, 3]]})
    with pytest.raises(ValueError, match="a state of another number of ranks cannot be loaded with sharded=True"):
        len(sampler)


def test_an_elastic_state_has_the_place(world: World) -> None:
    sampler = hvd.BalancedBatchSampler(lengths_of(0), 1)
    state = hvd.elastic.TorchState(sampler=sampler)
    batches = []
    for number, batch in enumerate(sampler):
        if number == 4:
            break
        batches.append(batch)
        sampler.record_batch(number)
        state.commit() if number == 2 else None
    state.restore()
    whole = list(hvd.BalancedBatchSampler(lengths_of(0), 1))
    assert list(sampler) == whole[3:]
    hvd.barrier()
