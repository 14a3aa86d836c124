"""Decides which samples each micro-batch has under `hvd.WorkSharing`, whichever rank makes the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from horovod_partial.checks import is_int, require, require_count


class Place(NamedTuple):
    """A place in the data: an epoch, how many of its updates have been made, and how many samples these have used."""

    epoch: int
    update: int = 0
    samples: int = 0


class Shards(NamedTuple):
    """How the samples of a dataset are divided into micro-batches.

    A micro-batch has `batch_size` samples. An update has `passes` micro-batches for each rank, on average. With
    `drop_last` an incomplete last update is left out. Otherwise it is filled with the epoch's first samples. `order`
    returns the samples of an epoch, in their order.
    """

    samples: int
    batch_size: int
    passes: int
    drop_last: bool
    order: Callable[[int], npt.NDArray[Any]]

    def check(self, seed: int, size: int) -> None:
        """Raise a ValueError if an argument of the user is wrong, or if `drop_last` leaves no update."""
        require(self.samples >= 1, "dataset", "of 1 sample or more", self.samples)
        require_count("backward_passes_per_step", self.passes, 1)
        require(is_int(seed), "seed", "an int", seed)
        of_update = self.batch_size * self.passes * size
        if self.drop_last and self.samples < of_update:
            raise ValueError(
                f"an update has {of_update} samples, and the dataset only {self.samples}: with drop_last=True nothing is "
                "left of it"
            )


class Plan:
    """Says which samples each micro-batch has, from `place` in the data to the end of the epoch, for `size` ranks.

    The plan has `updates` updates. `own` has the numbers of this rank's micro-batches in each update.
    """

    def __init__(self, shards: Shards, place: Place, rank: int, size: int) -> None:
        self.place = place
        self.rank = rank
        self.size = size
        self._shards = shards
        self._samples = shards.batch_size * shards.passes * size  # the number of samples in an update of work sharing
        left = max(0, shards.samples - place.samples)
        self.updates = left // self._samples if shards.drop_last else math.ceil(left / self._samples)
        self.own = range(shards.passes * rank, shards.passes * (rank + 1))
        self._order = shards.order(place.epoch)

    def after(self, updates: int) -> Place:
        """Return the place after this many updates of the plan."""
        epoch, update, samples = self.place
        return Place(epoch, update + updates, samples + updates * self._samples)

    def indices(self, update: int, number: int) -> list[int]:
        """Return the indices of a micro-batch's samples in the dataset. Raises IndexError if the plan lacks it."""
        passes, batch_size = self._shards.passes, self._shards.batch_size
        number_of_update = update - self.place.update
        if not (0 <= number_of_update < self.updates and 0 <= number < passes * self.size):
            raise IndexError(f"this epoch has no micro-batch {number} of update {update} now")
        rank, index = divmod(number, passes)
        first = self.after(number_of_update).samples
        positions = (np.arange(batch_size) + index * batch_size) * self.size + rank + first
        indices: list[int] = self._order[positions % len(self._order)].tolist()
        return indices
