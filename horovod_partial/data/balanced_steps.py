"""Cuts the samples of an epoch into steps in which all ranks get samples of similar length. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.float64]
Samples = NDArray[np.int64]
Step = list[Samples]  # for each rank, the samples of its batch

# Samples of similar length change places between steps. A step may get longer by this, on average.
MIXING_COST = 0.02


class Cutting(NamedTuple):
    """How samples are cut into steps: the user's arguments of `hvd.BalancedBatchSampler`."""

    batch_size: int | None
    max_tokens: float | None
    shuffle: bool
    drop_last: bool
    longest_first: bool

    def steps(self, lengths: Lengths, samples: Samples, ranks: int, draw: np.random.Generator) -> list[Step]:
        """Cut `samples` into the steps of `ranks` ranks. `lengths` has the lengths of all samples of the dataset."""
        order = draw.permutation(samples) if self.shuffle else samples
        unit = ranks * (self.batch_size or 1) if self.drop_last else ranks
        order = np.resize(order, (len(order) // unit if self.drop_last else math.ceil(len(order) / unit)) * unit)
        if len(order) == 0:
            return []
        order = order[np.argsort(lengths[order], kind="stable")]
        sizes = self._sizes(lengths[order], ranks, draw)
        if self.shuffle:
            window, limit = _windows(lengths[order[np.cumsum(sizes) - 1]], sizes, draw)
            limits = np.repeat(limit, sizes)
            order = _mixed(order, np.repeat(window, sizes), draw)
            sizes = sizes if self.max_tokens is None else self._sizes(limits, ranks, draw)
        steps = np.split(order, np.cumsum(sizes)[:-1])
        costs = np.array([len(step) * lengths[step].max() for step in steps])
        sequence = [steps[number] for number in self._sequence(costs, draw)]
        by_length = [step[np.argsort(lengths[step], kind="stable")] for step in sequence]
        # In each step another rank gets the longest sample.
        return [[step[(rank + k) % ranks :: ranks] for rank in range(ranks)] for k, step in enumerate(by_length)]

    def steps_of_shards(self, shards: Sequence[Lengths], draw: np.random.Generator) -> list[Step]:
        """Cut the samples of each rank into steps. `shards` has the lengths of each rank's own samples."""
        assert self.batch_size is not None
        counts = [len(lengths) for lengths in shards]
        number = math.ceil((sum(counts) / len(counts) if self.shuffle else max(counts)) / self.batch_size)
        number = min(counts) // self.batch_size if self.drop_last else number
        orders = []
        for lengths in shards:
            order = draw.permutation(len(lengths)) if self.shuffle else np.arange(len(lengths))
            order = np.resize(order, number * self.batch_size)
            orders.append(order[np.argsort(lengths[order], kind="stable")])
        if number == 0:
            return []
        if self.shuffle:
            sizes = np.full(number, self.batch_size)
            window, _ = _windows(_longest(shards, orders, self.batch_size), sizes, draw)
            orders = [_mixed(order, np.repeat(window, sizes), draw) for order in orders]
        costs = _longest(shards, orders, self.batch_size)
        batches = [order.reshape(number, self.batch_size) for order in orders]
        return [[of_rank[step] for of_rank in batches] for step in self._sequence(costs, draw)]

    def _sizes(self, lengths: Lengths, ranks: int, draw: np.random.Generator) -> NDArray[np.int64]:
        """Return how many samples each step has. `lengths` rise. A step is a part of them, the first one the shortest."""
        sizes: list[int] = []
        if self.batch_size is not None:
            whole, rest = divmod(len(lengths), self.batch_size * ranks)
            sizes = [self.batch_size * ranks] * whole
            if rest:  # any part of the samples may be the smaller step, because each of its samples weighs more
                sizes.insert(int(draw.integers(whole + 1)) if self.shuffle else 0, rest)
        else:
            assert self.max_tokens is not None
            end = len(lengths)
            while end > 0:
                longest = max(lengths[end - 1], self.max_tokens / len(lengths))  # samples may have the length 0
                sizes.insert(0, min(end, ranks * int(self.max_tokens // longest)))
                end -= sizes[0]
        return np.array(sizes)

    def _sequence(self, costs: Lengths, draw: np.random.Generator) -> list[int]:
        """Return the numbers of the steps in the order in which they are taken."""
        if not self.shuffle:
            return list(range(len(costs)))[:: -1 if self.longest_first else 1]
        sequence: list[int] = draw.permutation(len(costs)).tolist()
        if self.longest_first:
            place = sequence.index(int(costs.argmax()))
            sequence[0], sequence[place] = sequence[place], sequence[0]
        return sequence


def cost_of_shards(shards: Sequence[Lengths], batch_size: int) -> float:
    """Return how much longer steps take than if all ranks shared all samples. 0.1 means 10 % longer."""
    everything = np.sort(np.concatenate(shards))[::-1]
    shared = everything[:: batch_size * len(shards)]
    places = np.linspace(0, 1, len(shared) * batch_size)
    orders = [np.argsort(lengths)[(places * (len(lengths) - 1)).round().astype(int)] for lengths in shards]
    return float(_longest(shards, orders, batch_size).sum() / max(shared.sum(), 1e-9)) - 1


def _longest(shards: Sequence[Lengths], orders: Sequence[Samples], batch_size: int) -> Lengths:
    """Return the length of the longest sample in each step, over all ranks."""
    longest = [lengths[order].reshape(-1, batch_size).max(1) for lengths, order in zip(shards, orders, strict=True)]
    found: Lengths = np.max(longest, axis=0)
    return found


def _mixed(order: Samples, window: NDArray[np.float64], draw: np.random.Generator) -> Samples:
    """Shuffle the samples of each window."""
    return order[np.lexsort((draw.random(len(order)), window))]


def _windows(
    longest: Lengths, sizes: NDArray[np.int64], draw: np.random.Generator
) -> tuple[NDArray[np.float64], Lengths]:
    """Return the window of each step, and the length of the longest sample in this window.

    Steps whose samples have similar lengths share a window, and exchange samples. `longest` is the length of the longest
    sample in each step; it rises. The windows are the largest ones for which the steps take `MIXING_COST` longer at most.
    Their edges differ between epochs.
    """
    place = np.cumsum(np.sqrt(np.diff(longest, prepend=longest[0])))
    place /= max(place[-1], 1e-9)
    shift = draw.random()
    for parts in np.unique(np.geomspace(1, 8 * len(longest), 60).round()):
        window = np.floor(place * parts + shift)
        limit = longest[np.searchsorted(window, window, "right") - 1]
        if (sizes * limit).sum() <= (1 + MIXING_COST) * (sizes * longest).sum():
            return window, limit
    return np.arange(len(longest), dtype=np.float64), longest
