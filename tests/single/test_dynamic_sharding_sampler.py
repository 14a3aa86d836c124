"""Which samples each micro-batch of `DynamicShardingSampler` has."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch.utils.data import BatchSampler, DistributedSampler

from horovod_partial.torch import micro_batches
from horovod_partial.torch.dynamic_sharding import DynamicShardingSampler


def of_update(sampler: DynamicShardingSampler, size: int, update: int) -> list[int]:
    numbers = range(sampler.backward_passes_per_step * size)
    return [index for number in numbers for index in sampler.indices(update, number)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_own_micro_batches_are_those_of_a_distributed_sampler(shuffle: bool) -> None:
    size, passes, batch_size = 3, 2, 4
    samples = 3 * size * passes * batch_size
    for rank in range(size):
        ranks = Ranks(size, rank)
        sampler = DynamicShardingSampler(samples, batch_size, passes, shuffle=shuffle, seed=5, process_set=ranks)
        theirs = DistributedSampler(range(samples), size, rank, shuffle=shuffle, seed=5)  # type: ignore[arg-type]
        for epoch in range(2):
            sampler.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(sampler) == list(BatchSampler(theirs, batch_size, drop_last=False))
            assert len(sampler) == len(list(sampler)) == 3 * passes


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    passes=st.integers(1, 3),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_updates_are_whole(samples: int, batch_size: int, passes: int, size: int, drop_last: bool) -> None:
    def sampler_of(rank: int) -> DynamicShardingSampler:
        ranks = Ranks(size, rank)
        return DynamicShardingSampler(samples, batch_size, passes, drop_last=drop_last, process_set=ranks)

    of_one = batch_size * passes * size
    if drop_last and samples < of_one:
        with pytest.raises(ValueError, match=f"an update has {of_one} samples, and the dataset only {samples}"):
            sampler_of(0)
        return
    updates = samples // of_one if drop_last else -(-samples // of_one)
    sampler = sampler_of(0)
    planned = [index for update in range(updates) for index in of_update(sampler, size, update)]
    assert len(sampler) == updates * passes
    assert len(planned) == updates * of_one
    own = [index for rank in range(size) for batch in sampler_of(rank) for index in batch]
    assert sorted(own) == sorted(planned)
    if drop_last:
        assert len(set(planned)) == len(planned)
    else:
        times = len(planned) // samples
        assert all(times <= planned.count(index) <= times + 1 for index in range(samples))
    with pytest.raises(IndexError):
        sampler.indices(updates, 0)
    with pytest.raises(IndexError):
        sampler.indices(0, passes * size)


@pytest.mark.parametrize("size", [2, 6, 3])
def test_a_state_goes_on_with_any_number_of_ranks(size: int) -> None:
    """Three ranks have made two updates; the rest of the samples comes once."""
    before = DynamicShardingSampler(96, 2, 2, seed=1, process_set=Ranks(3))
    before.set_epoch(4)
    made = of_update(before, 3, 0) + of_update(before, 3, 1)
    state = {"epoch": 4, "update": 2, "samples": 24}
    after = DynamicShardingSampler(96, 2, 2, seed=1, process_set=Ranks(size))
    after.load_state_dict(state)
    after.set_epoch(4)  # as a loop over epochs does
    assert (after.epoch, after.update, after.state_dict()) == (4, 2, state)
    updates = range(2, 2 + 72 // (4 * size))
    assert sorted(made + [index for update in updates for index in of_update(after, size, update)]) == list(range(96))
    assert len(after) == 2 * len(updates)
    if size == 3:
        assert after.indices(3, 1) == before.indices(3, 1)
    with pytest.raises(IndexError):
        after.indices(1, 0)
    after.set_epoch(5)
    assert after.state_dict() == {"epoch": 5, "update": 0, "samples": 0}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dataset", iter([1])),
        ("dataset", 0),
        ("batch_size", 0),
        ("backward_passes_per_step", 1.5),
        ("seed", None),
        ("shuffle", "yes"),
        ("drop_last", 2),
        ("process_set", 0),
    ],
)
def test_refuses_wrong_arguments(argument: str, value: object) -> None:
    arguments = {"dataset": 10, "batch_size": 1, "backward_passes_per_step": 1, "process_set": Ranks(2)}
    with pytest.raises(ValueError, match=f"{argument} must be "):
        DynamicShardingSampler(**(arguments | {argument: value}))


def test_refuses_wrong_states() -> None:
    sampler = DynamicShardingSampler(10, 1, 1, process_set=Ranks(2))
    for state in ({}, {"epoch": 1}, None, {"epoch": 0, "update": 0, "samples": "0"}):
        with pytest.raises(ValueError, match="state_dict must be one of a DynamicShardingSampler"):
            sampler.load_state_dict(state)  # type: ignore[arg-type]


def test_a_loop_that_steps_after_each_pass_counts_updates_under_any_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 computes the micro-batches 6, 7 and 8 of each update, and the last of them ends the update."""
    monkeypatch.setattr(micro_batches, "runtime", SimpleNamespace(generation=1))
    work, taken = micro_batches.OwnMicroBatches(Ranks(4, 2), 3), []
    for update in range(2):
        for made, number in enumerate((6, 7, 8)):
            assert work.begin_before(2) == number == work.begun
            assert (work.rounds, work.keeps_gradients, work.is_last) == (update, made > 0, made == 2)
            assert work.step(lambda: 0.5, taken.append) == 0.5
            assert (work.begun, work.updated) == (None, made == 2)
    assert (work.rounds, taken) == (2, [None, None])
    assert work.begin_before(2) is None
    work.skipped()
    work.forget()  # a state is loaded
    assert (work.begin_before(3), work.rounds) == (6, 2)
