"""`hvd.BalancedBatchSampler`: which samples each rank has in a step."""

import itertools
import math
import pickle
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

import horovod_partial.torch as hvd

Step = list[list[int]]


class Sampler(hvd.BalancedBatchSampler):
    """One of several ranks that have all passed the same."""

    _runtime: Any = SimpleNamespace(
        generation=0, gather_bytes=lambda data, name, process_set: [data] * process_set.size()
    )


def samplers(lengths: object, batch_size: int | None, size: int, **options: Any) -> list[Sampler]:
    return [Sampler(lengths, batch_size, process_set=Ranks(size, rank), **options) for rank in range(size)]


def epoch_of(lengths: object, batch_size: int | None, size: int, epoch: int = 0, **options: Any) -> list[Step]:
    """The batches of all ranks: steps, of ranks, of samples."""
    return loop(samplers(lengths, batch_size, size, **options), epoch)


def loop(of_ranks: list[Sampler], epoch: int) -> list[Step]:
    for sampler in of_ranks:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*of_ranks, strict=True)]


def samples_of(steps: list[Step]) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch]


def pairs_that_meet_again(before: list[Step], after: list[Step]) -> float:
    """The share of the pairs of a step that share a step in the other epoch, too."""
    step_of = {sample: number for number, step in enumerate(after) for sample in samples_of([step])}
    groups = [Counter(step_of[sample] for sample in samples_of([step])) for step in before]
    pairs = sum(math.comb(group.total(), 2) for group in groups)
    return sum(math.comb(together, 2) for group in groups for together in group.values()) / pairs


def costs_of(lengths: NDArray[np.float64], steps: list[Step]) -> NDArray[np.float64]:
    """What each step costs: the largest padded batch of a rank."""
    return np.array([max(len(batch) * lengths[batch].max() for batch in step) for step in steps])


DISTRIBUTIONS = {
    "uniform": lambda draw, samples: draw.uniform(1, 100, samples),
    "log-normal": lambda draw, samples: draw.lognormal(3, 0.6, samples),
    "exponential": lambda draw, samples: 1 + draw.exponential(20, samples),
    "normal": lambda draw, samples: draw.normal(50, 10, samples).clip(1),
    "two kinds": lambda draw, samples: np.where(
        draw.random(samples) < 0.8, draw.normal(20, 3, samples), draw.normal(90, 8, samples)
    ).clip(1),
}


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    batch_size=st.integers(1, 4),
    size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    by_tokens=st.booleans(),
)
def test_each_sample_comes_once(
    lengths: list[int], batch_size: int, size: int, epoch: int, shuffle: bool, by_tokens: bool
) -> None:
    most = max(*lengths, 1) * batch_size
    kind = {"batch_size": None, "max_tokens": most} if by_tokens else {"batch_size": batch_size}
    steps = epoch_of(lengths, size=size, epoch=epoch, shuffle=shuffle, **kind)
    counts = Counter(samples_of(steps))
    assert set(counts) == set(range(len(lengths)))
    assert counts.total() == math.ceil(len(lengths) / size) * size  # as DistributedSampler
    assert all(len({len(batch) for batch in step}) == 1 for step in steps)
    if by_tokens:
        assert all(len(batch) * max(lengths[sample] for sample in batch) <= most for step in steps for batch in step)
    else:
        sizes = [len(step[0]) for step in steps]
        assert sum(each != batch_size for each in sizes) <= 1
        assert max(sizes) <= batch_size
    if not shuffle:
        spans = [[lengths[sample] for sample in samples_of([step])] for step in steps]
        assert all(min(before) >= max(after) for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_other_samples_meet_in_the_next_epoch_at_little_cost(name: str) -> None:
    lengths = DISTRIBUTIONS[name](np.random.default_rng(1), 10_000)
    ordered = costs_of(lengths, epoch_of(lengths, 8, 4, shuffle=False)).sum()
    ranks = samplers(lengths, 8, 4)
    epochs = [loop(ranks, epoch) for epoch in range(5)]
    assert [len(steps) for steps in epochs] == [313] * 5
    assert np.mean([costs_of(lengths, steps).sum() for steps in epochs]) <= 1.021 * ordered  # a smaller batch is longer
    assert max(pairs_that_meet_again(*both) for both in itertools.pairwise(epochs)) < 0.2


def test_samples_of_one_length_are_shuffled() -> None:
    assert pairs_that_meet_again(epoch_of([3] * 400, 2, 2, 0), epoch_of([3] * 400, 2, 2, 1)) < 0.1


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None, "max_tokens": 150}])
def test_the_largest_batch_comes_first(options: dict[str, Any]) -> None:
    lengths = np.random.default_rng(0).uniform(1, 100, 400)
    for epoch in range(3):
        costs = costs_of(lengths, epoch_of(lengths, size=2, epoch=epoch, **options))
        assert costs.argmax() == 0
    assert costs_of(lengths, epoch_of(lengths, size=2, longest_first=False, **options)).argmax() > 0
    ordered = [epoch_of(lengths, size=2, shuffle=False, longest_first=first, **options) for first in (True, False)]
    assert ordered[0] != ordered[1]
    assert set(samples_of(ordered[0][-1:])) == set(samples_of(ordered[1][:1]))


def test_losses_of_samples_weigh_the_same_under_max_tokens() -> None:
    ranks = samplers(np.random.default_rng(0).uniform(1, 100, 401), None, 2, max_tokens=200)
    steps = loop(ranks, 3)
    assert len({len(step[0]) for step in steps}) > 5
    assert ranks[0].mean_batch_size == pytest.approx(402 / 2 / len(steps))
    assert len(ranks[0]) == len(steps)


@pytest.mark.parametrize("sizes", [[4], [4, 4], [4, 2], [4, 2, 4], [2, 3, 1]])
def test_a_loaded_state_goes_on_in_the_epoch(sizes: list[int]) -> None:
    lengths = np.random.default_rng(0).uniform(1, 100, 241)
    whole = epoch_of(lengths, 4, sizes[0], epoch=2)
    state, used = samplers(lengths, 4, sizes[0])[0].state_dict(), []
    assert state == {"epoch": 0, "done": []}
    state["epoch"] = 2
    for size in sizes:
        ranks = samplers(lengths, 4, size)
        for rank in ranks:
            rank.load_state_dict(state)
        steps = loop(ranks, 2)
        used += steps[:3]
        for rank in ranks:
            rank.load_state_dict(state)
            assert len(rank) == len(steps)
            for batch, _ in zip(range(3), rank, strict=False):
                rank.record_batch(batch)
        state = ranks[-1].state_dict()
    used += steps[3:]
    assert set(samples_of(used)) == set(range(241))
    assert len(samples_of(used)) - 241 < sum(sizes)
    if set(sizes) == {4}:
        assert used == whole
    after = loop(ranks, 3)
    assert set(samples_of(after)) == set(range(241))


def test_a_state_counts_only_what_was_recorded() -> None:
    sampler = samplers(range(40), 2, 2)[0]
    batches = iter(sampler)
    for _ in range(4):  # a loader loads ahead
        next(batches)
    assert sampler.state_dict() == {"epoch": 0, "done": []}
    sampler.record_batch(1)
    sampler._process_set = Ranks(3)  # Horovod begins anew with other ranks before the state is saved
    assert sampler.state_dict() == {"epoch": 0, "done": [[2, 2]]}
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "done": []}


@pytest.mark.parametrize(
    "state", [None, {}, {"epoch": -1, "done": []}, {"epoch": 0, "done": 3}, {"epoch": 0, "done": [[0, 1]]}]
)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state_dict must be one of a BalancedBatchSampler"):
        samplers(range(40), 2, 2)[0].load_state_dict(state)


def test_an_epoch_that_begins_again_is_told() -> None:
    sampler = samplers(range(40), 2, 2)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(sampler))  # a look at the first batch
        for epoch in range(3):
            sampler.sampler.set_epoch(epoch)  # as Lightning does
            list(sampler)
        list(samplers(range(40), 2, 2, shuffle=False)[0])
    with pytest.warns(UserWarning, match=r"a loop begins epoch 2 again, .* call BalancedBatchSampler.set_epoch"):
        list(sampler)


def test_what_is_left_out_changes_with_the_epoch() -> None:
    left_out = set()
    for epoch in range(20):
        steps = epoch_of(range(10), 2, 2, epoch, drop_last=True)
        assert len(steps) == 2
        left_out |= set(range(10)) - {sample for step in steps for batch in step for sample in batch}
    assert len(left_out) > 2


def test_epochs_and_seeds_differ_and_repeat() -> None:
    lengths = np.arange(100) % 7
    assert epoch_of(lengths, 2, 2, 1) == epoch_of(lengths, 2, 2, 1)
    assert epoch_of(lengths, 2, 2, 1) != epoch_of(lengths, 2, 2, 2)
    assert epoch_of(lengths, 2, 2, seed=1) != epoch_of(lengths, 2, 2, seed=2)


def test_many_samples_take_little_time_and_memory() -> None:
    sampler = Sampler(np.random.default_rng(0).uniform(1, 100, 1_000_000), max_tokens=200, process_set=Ranks(512))
    batches = list(pickle.loads(pickle.dumps(sampler)))
    assert len(batches) == len(sampler)
    assert sampler.mean_batch_size == pytest.approx(1_000_000 / 512 / len(batches), rel=1e-3)


def test_a_data_loader_takes_it() -> None:
    dataset = TensorDataset(torch.arange(8))
    sampler = Sampler(torch.arange(8.0), 2, shuffle=False, process_set=Ranks(2, 1))
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    assert len(loader) == 2
    assert [batch.tolist() for (batch,) in loader] == [[5, 7], [0, 2]]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("lengths", [], r"lengths must be numbers of the shape \(samples,\)"),
        ("lengths", [[1, 2], [3, 4]], "lengths must be"),
        ("lengths", [1.0, float("nan")], "lengths must be"),
        ("lengths", [1, -1], "lengths must be"),
        ("lengths", ["long", "short"], "lengths must be"),
        ("batch_size", 0, "batch_size must be an int, 1 or more"),
        ("seed", -1, "seed must be an int, 0 or more"),
        ("shuffle", "yes", "shuffle must be True or False"),
        ("drop_last", None, "drop_last must be True or False"),
        ("process_set", 0, "process_set must be a process set"),
        ("batch_size", None, "batch_size must be an int, 1 or more"),
        ("max_tokens", 8, "give batch_size or max_tokens, not both"),
        ("longest_first", 2, "longest_first must be True or False"),
    ],
)
def test_wrong_arguments_are_refused(argument: str, value: object, message: str) -> None:
    arguments = {"lengths": [1, 2, 3, 4], "batch_size": 1, "process_set": Ranks(2, 0)}
    with pytest.raises(ValueError, match=message):
        hvd.BalancedBatchSampler(**(arguments | {argument: value}))


def test_a_sample_that_is_longer_than_max_tokens_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"max_tokens must be a number, and no less than the longest sample \(9\), not 8"
    ):
        hvd.BalancedBatchSampler([1, 9, 3], max_tokens=8, process_set=Ranks(2, 0))


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="with drop_last=True no step is left"):
        hvd.BalancedBatchSampler([1, 2, 3], 4, drop_last=True, process_set=Ranks(2, 0))
