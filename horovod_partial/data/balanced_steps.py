"""Cuts the samples of an epoch into steps in which all ranks get samples of similar length. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Lengths = NDArray[np.float64]
Samples = NDArray[np.int64]

# Samples of similar length change places between steps. Steps may get longer by about this share, on average.
MIXING_COST = 0.02


class Steps(NamedTuple):
    """The steps of an epoch. Step k has the samples from `edges[k]` to `edges[k + 1]`, in the order of their lengths."""

    samples: Samples
    edges: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.edges) - 1

    def of(self, step: int) -> Samples:
        return self.samples[self.edges[step] : self.edges[step + 1]]


class Cutting(NamedTuple):
    """How samples are cut into steps: the user's arguments of `hvd.BalancedBatchSampler`."""

    batch_size: int | None
    max_tokens: float | None
    shuffle: bool
    drop_last: bool
    longest_first: bool

    def steps(self, lengths: Lengths, samples: Samples, ranks: int, draw: Generator) -> Steps:
        """Cut `samples` into the steps of `ranks` ranks. `lengths` has the lengths of all samples of the dataset."""
        unit = ranks * (self.batch_size or 1) if self.drop_last else ranks
        count = (len(samples) // unit if self.drop_last else math.ceil(len(samples) / unit)) * unit
        return self._cut([lengths], [samples], count, ranks, draw)[0]

    def steps_of_shards(self, shards: Sequence[Lengths], draw: Generator) -> list[Steps]:
        """Cut the samples of each rank into steps. `shards` has the lengths of each rank's own samples.

        The result has the steps of each rank, equally many.
        """
        assert self.batch_size is not None
        counts = [len(lengths) for lengths in shards]
        number = math.ceil((sum(counts) / len(counts) if self.shuffle else max(counts)) / self.batch_size)
        number = min(counts) // self.batch_size if self.drop_last else number
        return self._cut(shards, [np.arange(count) for count in counts], number * self.batch_size, 1, draw)

    def _cut(
        self, shards: Sequence[Lengths], samples: Sequence[Samples], count: int, ranks: int, draw: Generator
    ) -> list[Steps]:
        """Cut the samples of each shard into the same number of steps. In a step, those of all shards are alike.

        `shards` has the lengths of the samples of each shard, and `samples` those that are to be cut. The steps of a
        shard have `count` samples: some come twice, or are left out. `ranks` ranks share each step.
        """
        if count == 0:
            return [Steps(np.zeros(0, np.int64), np.zeros(1, np.int64)) for _ in shards]
        orders = []
        for lengths, of_shard in zip(shards, samples, strict=True):
            order = np.resize(draw.permutation(of_shard) if self.shuffle else of_shard, count)
            orders.append(order[np.argsort(lengths[order], kind="stable")])
        sizes = self._sizes(shards[0][orders[0]], ranks, draw)
        if self.shuffle:
            window, limit = _windows(_longest(shards, orders, sizes), sizes, draw)
            # Shuffle the samples of each window.
            orders = [order[np.lexsort((draw.random(count), np.repeat(window, sizes)))] for order in orders]
            sizes = sizes if self.max_tokens is None else self._sizes(np.repeat(limit, sizes), ranks, draw)
        sequence = self._sequence(sizes * _longest(shards, orders, sizes), draw)
        place = np.repeat(np.argsort(sequence), sizes)  # when the step of each sample is taken
        edges = np.concatenate([[0], np.cumsum(sizes[sequence])])
        return [
            Steps(order[np.lexsort((lengths[order], place))], edges)
            for lengths, order in zip(shards, orders, strict=True)
        ]

    def _sizes(self, lengths: Lengths, ranks: int, draw: Generator) -> NDArray[np.int64]:
        """Return how many samples each step has. `lengths` rise. A step is a part of them, the first one the shortest."""
        sizes: list[int] = []
        if self.batch_size is not None:
            whole, rest = divmod(len(lengths), self.batch_size * ranks)
            sizes = [self.batch_size * ranks] * whole
            if rest:  # any part of the samples may be the smaller step, because each of its samples weighs more
                sizes.insert(int(draw.integers(whole + 1)) if self.shuffle else 0, rest)
            return np.array(sizes)
        assert self.max_tokens is not None
        end = len(lengths)
        while end > 0:
            longest = max(lengths[end - 1], self.max_tokens / len(lengths))  # samples may have the length 0
            sizes.append(min(end, ranks * int(self.max_tokens // longest)))
            end -= sizes[-1]
        return np.array(sizes[::-1])

    def _sequence(self, costs: Lengths, draw: Generator) -> NDArray[np.int64]:
        """Return the numbers of the steps in the order in which they are taken."""
        if not self.shuffle:
            return np.arange(len(costs))[:: -1 if self.longest_first else 1]
        sequence = draw.permutation(len(costs))
        if self.longest_first:
            place = sequence.tolist().index(int(costs.argmax()))
            sequence[[0, place]] = sequence[[place, 0]]
        return sequence


def cost_of_shards(shards: Sequence[Lengths], batch_size: int) -> float:
    """Return how much longer steps take than if all ranks shared all samples. 0.1 means 10 % longer."""
    shared = np.sort(np.concatenate(shards))[::-1][:: batch_size * len(shards)]
    places = np.linspace(0, 1, len(shared) * batch_size)
    orders = [np.argsort(lengths)[(places * (len(lengths) - 1)).round().astype(int)] for lengths in shards]
    sizes = np.full(len(shared), batch_size)
    return float(_longest(shards, orders, sizes).sum() / max(shared.sum(), 1e-9)) - 1


def _longest(shards: Sequence[Lengths], orders: Sequence[Samples], sizes: NDArray[np.int64]) -> Lengths:
    """Return the length of the longest sample in each step, over all shards."""
    first = np.cumsum(sizes) - sizes
    of_shards = [np.maximum.reduceat(lengths[order], first) for lengths, order in zip(shards, orders, strict=True)]
    longest: Lengths = np.max(of_shards, axis=0)
    return longest


def _windows(longest: Lengths, sizes: NDArray[np.int64], draw: Generator) -> tuple[NDArray[np.float64], Lengths]:
    """Return the window of each step, and the length of the longest sample in this window.

    Steps whose samples have similar lengths share a window, and exchange samples. `longest` is the length of the longest
    sample in each step; it rises. The windows are the largest ones for which steps take `MIXING_COST` longer at most, if
    each is as long as the longest sample of its window. The edges of the windows differ between epochs.
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
