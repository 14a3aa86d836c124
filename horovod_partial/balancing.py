"""Makes batches that take all ranks the same time: in each step all ranks get samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from horovod.common.process_sets import ProcessSet, global_process_set
from numpy.typing import NDArray

from horovod_partial.checks import is_int, require
from horovod_partial.exchange.arguments import check_sampler


class BalancedBatchSampler:
    """Makes batches for each rank. In the same step, the samples of all ranks have similar lengths.

    Use it for samples that take different times, such as sentences or videos. Samples are sorted by length; samples of
    equal length come in a random order. A step takes `batch_size` neighbours of this order for each rank. So all ranks
    take about the same time for a step, and batches need little padding. The steps come in a random order. Every rank
    computes the same plan of steps, without any message.

    This is a batch sampler: pass it to PyTorch's `DataLoader(dataset, batch_sampler=...)`, or make a dataset of
    TensorFlow from it with `tf.data.Dataset.from_generator`. Each loop gives the batches of this rank in one epoch.

    Args:
        lengths: what each sample costs, about, for example its number of words, frames or seconds: a list, an array or
            a tensor of numbers, of the shape (samples,).
        batch_size: samples in a batch, 1 or more.
        shuffle: whether the order differs between epochs. Otherwise steps go from short samples to long ones.
        seed: decides the order; the same on all ranks.
        drop_last: whether to leave out samples that do not fill a step; with `shuffle` each epoch leaves out others.
            Otherwise some samples come twice to fill the last step, same as with `DistributedSampler`.
        process_set: the ranks that take a step together.

    Raises:
        ValueError: an argument is wrong, or with `drop_last` no step is left.
    """

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_sampler(batch_size, shuffle, drop_last, process_set)
        require(is_int(seed) and seed >= 0, "seed", "an int, 0 or more", seed)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._lengths = _as_lengths(lengths)
        self._shuffle, self._seed = shuffle, seed
        self._process_set = process_set
        self._epoch = 0
        if len(self) == 0:
            raise ValueError(
                f"a step has {self._samples_of_step} samples, and there are only {len(self._lengths)}: with drop_last=True "
                "nothing is left of them"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; call it on all ranks. Without this call each loop has the same order."""
        require(is_int(epoch) and epoch >= 0, "epoch", "an int, 0 or more", epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch. It is the same on every rank."""
        whole, rest = divmod(len(self._lengths), self._samples_of_step)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[list[int]]:
        draw = np.random.default_rng((self._seed, self._epoch))
        order: NDArray[np.int64] = np.arange(len(self._lengths))
        if self._shuffle:
            order = draw.permutation(order)
        order = np.resize(order, len(self) * self._samples_of_step)
        steps: NDArray[np.int64] = order[np.argsort(self._lengths[order], kind="stable")].reshape(len(self), -1)
        if self._shuffle:
            steps = draw.permutation(steps)
        rank, size = self._process_set.rank(), self._process_set.size()
        for number, step in enumerate(steps):  # in each step, another rank gets the longest sample
            yield step[(rank + number) % size :: size].tolist()

    @property
    def _samples_of_step(self) -> int:
        return self.batch_size * self._process_set.size()


def _as_lengths(lengths: Any) -> NDArray[np.float64]:
    allowed = "numbers of the shape (samples,), each finite and 0 or more"
    try:
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths  # NumPy cannot read tensors on a GPU
        found = np.asarray(lengths, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    fits = found.ndim == 1 and len(found) > 0 and bool(np.isfinite(found).all()) and bool((found >= 0).all())
    require(fits, "lengths", allowed, lengths)
    return found
