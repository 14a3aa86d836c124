"""`hvd.BalancedBatchSampler`: which samples each rank has in a step."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch.utils.data import DataLoader, TensorDataset

import horovod_partial.torch as hvd


def epoch_of(lengths: object, batch_size: int, size: int, epoch: int = 0, **options: object) -> list[list[list[int]]]:
    """The batches of all ranks: steps, of ranks, of samples."""
    sets = [Ranks(size, rank) for rank in range(size)]
    samplers = [hvd.BalancedBatchSampler(lengths, batch_size, process_set=one, **options) for one in sets]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    batch_size=st.integers(1, 4),
    size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_each_sample_comes_once_and_steps_are_neighbours(
    lengths: list[int], batch_size: int, size: int, epoch: int, shuffle: bool
) -> None:
    steps = epoch_of(lengths, batch_size, size, epoch, shuffle=shuffle)
    assert all(len(batch) == batch_size for step in steps for batch in step)
    counts = Counter(sample for step in steps for batch in step for sample in batch)
    assert set(counts) == set(range(len(lengths)))
    samples = batch_size * size
    whole_rounds = len(steps) * samples // len(lengths)
    assert set(counts.values()) <= {whole_rounds, whole_rounds + 1}
    spans = sorted((min(of), max(of)) for of in ([lengths[i] for batch in step for i in batch] for step in steps))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    if not shuffle:
        assert spans == [(min(of), max(of)) for of in ([lengths[i] for batch in step for i in batch] for step in steps)]


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


def test_a_data_loader_takes_it() -> None:
    dataset = TensorDataset(torch.arange(8))
    sampler = hvd.BalancedBatchSampler(torch.arange(8.0), 2, shuffle=False, process_set=Ranks(2, 1))
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    assert len(loader) == 2
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [4, 6]]


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
    ],
)
def test_wrong_arguments_are_refused(argument: str, value: object, message: str) -> None:
    arguments = {"lengths": [1, 2, 3, 4], "batch_size": 1, "process_set": Ranks(2, 0)}
    with pytest.raises(ValueError, match=message):
        hvd.BalancedBatchSampler(**(arguments | {argument: value}))


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a step has 8 samples, and there are only 3: with drop_last=True nothing"):
        hvd.BalancedBatchSampler([1, 2, 3], 4, drop_last=True, process_set=Ranks(2, 0))
