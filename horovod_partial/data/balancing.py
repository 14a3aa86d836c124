"""Makes batches that take all ranks the same time: in each step all ranks get samples of similar length."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.checks import is_flag, is_int, is_number, require, require_count
from horovod_partial.data.balanced_steps import Cutting, Lengths, Step, cost_of_shards
from horovod_partial.exchange.arguments import check_sampler
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure

UNLIKE = 0.15  # ranks are told if their own samples make steps longer by this

Place = tuple[tuple[int, int], ...]  # what is done of an epoch: numbers of ranks, and how many steps these have taken


class BalancedBatchSampler:
    """Makes batches for each rank. In the same step, the samples of all ranks have similar lengths.

    Use it for samples that take different times, such as sentences or videos. Samples are sorted by length, and a step
    takes neighbours of this order for all ranks. So all ranks take about the same time for a step, and batches need
    little padding. With `shuffle` the steps come in a random order, and samples of similar length change places, so
    that each epoch has other steps. This makes steps 2 % longer at most, on average.

    This is a batch sampler: pass it to PyTorch's `DataLoader(dataset, batch_sampler=...)`, or make a dataset of
    TensorFlow from it with `tf.data.Dataset.from_generator`. Each loop gives the batches of this rank in one epoch.
    Call `set_epoch` before each loop. Lightning and Accelerate do this.

    All ranks know the lengths of the whole dataset, and compute the same steps. They compare what they know in their
    first loop. If each rank has its own files, pass `sharded=True`: then each rank passes the lengths of its own
    samples, and gets batches of these only.

    To resume within an epoch, call `record_batch` after each step, and save `state_dict()`.
    `hvd.elastic.TorchState(..., sampler=sampler)` commits and restores the sampler, too.

    Args:
        lengths: what each sample costs, about, for example its number of words, frames or seconds: a list, an array or
            a tensor of numbers, of the shape (samples,).
        batch_size: samples in a batch, 1 or more. One batch of an epoch may be smaller, at a random place.
        max_tokens: in place of `batch_size`, the largest size of a padded batch: its number of samples, multiplied by
            the length of the longest one. In each step all ranks have the same number of samples, but steps differ. So
            divide the sum of the samples' losses by `mean_batch_size`, and not by the number of samples in the batch.
        shuffle: whether the order differs between epochs. Otherwise steps go from long samples to short ones.
        seed: decides the order; the same on all ranks.
        drop_last: whether to leave out samples that do not fill a step; with `shuffle` each epoch leaves out others.
            Otherwise some samples come twice, fewer than there are ranks, same as with `DistributedSampler`.
        longest_first: whether an epoch begins with its largest batch, so that memory runs out at once or not at all.
            Without it and without `shuffle` steps go from short samples to long ones.
        sharded: whether each rank has its own samples. Then all ranks must make the sampler together. All ranks take
            the same number of steps: ranks with fewer samples repeat some, and those with more leave some out, each
            epoch others. With `drop_last` no rank repeats a sample; without `shuffle` no rank leaves one out.
        process_set: the ranks that take a step together.

    Attributes:
        epoch: the epoch of the newest loop, or else of the next one.

    Raises:
        ValueError: an argument is wrong, ranks have passed other arguments or (unless `sharded`) other lengths, or no
            step is left.
    """

    # The subclass for each framework has these two. `_gather` returns the bytes of all ranks, by rank.
    _runtime: Runtime
    _gather: Callable[[bytes, str, ProcessSet], list[bytes]]

    def __init__(
        self,
        lengths: Any,
        batch_size: int | None = None,
        *,
        max_tokens: float | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        longest_first: bool = True,
        sharded: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_sampler(1 if batch_size is None else batch_size, shuffle, drop_last, process_set)
        require(is_int(seed) and seed >= 0, "seed", "an int, 0 or more", seed)
        for name, flag in (("longest_first", longest_first), ("sharded", sharded)):
            require(is_flag(flag), name, "True or False", flag)
        self._lengths = _as_lengths(lengths)
        if max_tokens is None:
            require_count("batch_size", batch_size, 1)
        else:
            require(batch_size is None and not sharded, "max_tokens", "without batch_size and sharded", max_tokens)
            longest = self._lengths.max()
            allowed = f"a number, and no less than the longest sample ({longest:g})"
            require(
                is_number(max_tokens) and max_tokens >= longest and max_tokens > 0, "max_tokens", allowed, max_tokens
            )
        self.batch_size = batch_size
        self.epoch = 0
        self._seed = seed
        self._sharded = sharded
        self._process_set = process_set
        self._cutting = Cutting(batch_size, max_tokens, bool(shuffle), bool(drop_last), bool(longest_first))
        self._shards: list[Lengths] = []
        self._compared = Tenure(self._runtime)
        self._start: Place = ()  # where the next loop begins
        self._begun: Place = ()  # where the newest loop began
        self._recorded = 0  # how many steps of the newest loop have been recorded
        self._is_set = True  # whether `set_epoch` or `load_state_dict` was called since the newest loop began
        self._is_told = not shuffle
        self._planned: tuple[Any, list[Step]] = None, []
        if sharded:
            self._meet()
        if len(self) == 0:
            raise ValueError("with drop_last=True no step is left: there are fewer samples than a step has")

    @property
    def sampler(self) -> BalancedBatchSampler:
        """This object. Lightning and Accelerate call `set_epoch` of this attribute of a batch sampler."""
        return self

    @property
    def mean_batch_size(self) -> float:
        """How many samples a batch of this epoch has on average."""
        steps = self._steps(())
        return sum(len(step[0]) for step in steps) / len(steps)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; call it on all ranks. Without this call each loop has the same order.

        If a loaded state is within this epoch, the loop goes on where the state was saved.
        """
        require(is_int(epoch) and epoch >= 0, "epoch", "an int, 0 or more", epoch)
        self._is_set = True
        if epoch != self.epoch:
            self.epoch, self._start, self._begun, self._recorded = epoch, (), (), 0

    def record_batch(self, batch: int) -> None:
        """Note that this rank has taken the step with a batch of the newest loop. The next state has it.

        Args:
            batch: the number of the batch in the loop, from 0 on, same as in Horovod's `ElasticSampler`.
        """
        require(is_int(batch) and batch >= 0, "batch", "an int, 0 or more", batch)
        self._recorded = batch + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which steps of it `record_batch` has recorded."""
        return {"epoch": self.epoch, "done": [list(part) for part in self._after(self._begun, self._recorded)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the data where the state was saved. Call it on all ranks, before the loop.

        The number of ranks may be another one now, unless the sampler is `sharded`. Then the samples that are left of
        the epoch are cut into other steps. Each sample still comes once.

        Raises:
            ValueError: this is not a state of a `BalancedBatchSampler`, or of another number of ranks with `sharded`.
        """
        try:
            epoch = state_dict["epoch"]
            place = tuple((int(ranks), int(steps)) for ranks, steps in state_dict["done"])
        except (KeyError, TypeError, ValueError):
            epoch, place = None, ()
        fits = is_int(epoch) and epoch >= 0 and all(ranks >= 1 and steps >= 0 for ranks, steps in place)
        require(fits, "state_dict", "one of a BalancedBatchSampler", state_dict)
        same = all(ranks == self._process_set.size() for ranks, _ in place)
        require(
            same or not self._sharded, "state_dict", "of as many ranks as now, because ranks have own samples", place
        )
        self.epoch, self._start, self._begun, self._recorded, self._is_set = epoch, place, place, 0, True

    def __len__(self) -> int:
        """Return the number of batches of this rank in the next loop. It is the same on every rank."""
        return len(self._steps(self._start)) - self._taken(self._start)

    def __iter__(self) -> Iterator[list[int]]:
        self._meet()
        self._warn_if_repeated()
        self._begun, self._recorded, self._is_set = self._start, 0, False
        rank = self._process_set.rank()
        steps = self._steps(self._start)[self._taken(self._start) :]
        for step in steps:
            yield step[rank].tolist()
        self._start = ()

    def _meet(self) -> None:
        """Compare with other ranks what all must have alike, once after each `init`, and learn the lengths of shards."""
        if self._compared.is_current:
            return
        rank, ranks = self._process_set.rank(), self._process_set.size()
        arguments, lengths = (self._seed, self._sharded, *self._cutting), self._lengths.tobytes()
        own = [_digest(repr(arguments).encode()), b"" if self._sharded else _digest(lengths)]
        data = b"".join([*own, lengths if self._sharded else b""])
        found = self._gather(data, "BalancedBatchSampler", self._process_set) if ranks > 1 else [data]
        first, second = itertools.accumulate(map(len, own))
        for begin, end, what in ((0, first, _OTHER_ARGUMENTS), (first, second, _OTHER_LENGTHS)):
            others = [other for other in range(ranks) if found[other][begin:end] != found[0][begin:end]]
            if others:
                raise ValueError(f"rank {rank}: {what.format(ranks=', '.join(map(str, others)))}")
        if self._sharded:
            self._shards = [np.frombuffer(part[second:], dtype=np.float64) for part in found]
            cost = cost_of_shards(self._shards, self.batch_size) if self.batch_size is not None else 0.0
            if cost > UNLIKE and rank == 0:
                warnings.warn(
                    f"the samples of the ranks have unlike lengths, so steps take {cost:.0%} longer than if all ranks shared all "
                    "samples. Give each rank a random part of the samples",
                    stacklevel=3,
                )
        self._compared.enter()

    def _warn_if_repeated(self) -> None:
        if not self._is_set and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"a loop begins epoch {self.epoch} again, with the batches of the loop before: call "
                "BalancedBatchSampler.set_epoch(epoch) before each loop, on all ranks",
                stacklevel=3,
            )

    def _after(self, place: Place, steps: int) -> Place:
        ranks = self._process_set.size()
        if not steps:
            return place
        taken = self._taken(place)
        return (*(place[:-1] if taken else place), (ranks, taken + steps))

    def _taken(self, place: Place) -> int:
        """Return how many steps have been taken of the plan that the present number of ranks has from `place` on."""
        return place[-1][1] if place and place[-1][0] == self._process_set.size() else 0

    def _steps(self, place: Place) -> list[Step]:
        """Return the steps of the present number of ranks, from the last place on where their number has changed."""
        ranks = self._process_set.size()
        key = self.epoch, place[:-1] if self._taken(place) else place, ranks
        if self._planned[0] != key:
            left = np.arange(len(self._lengths))
            for part, (ranks_before, taken) in enumerate(key[1]):
                steps = self._cutting.steps(self._lengths, left, ranks_before, self._draw(part))
                left = np.setdiff1d(left, np.concatenate(list(itertools.chain(*steps[:taken]))))
            draw = self._draw(len(key[1]))
            sharded = self._sharded
            steps = (
                self._cutting.steps_of_shards(self._shards, draw)
                if sharded
                else self._cutting.steps(self._lengths, left, ranks, draw)
            )
            self._planned = key, steps
        return self._planned[1]

    def _draw(self, part: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, self.epoch, part))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _as_lengths(lengths: Any) -> Lengths:
    allowed = "numbers of the shape (samples,), each finite and 0 or more"
    try:
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths  # NumPy cannot read tensors on a GPU
        found = np.asarray(lengths, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    fits = found.ndim == 1 and len(found) > 0 and bool(np.isfinite(found).all()) and bool((found >= 0).all())
    require(fits, "lengths", allowed, lengths)
    return found


_OTHER_ARGUMENTS = "ranks {ranks} made their BalancedBatchSampler with other arguments than rank 0: all but lengths must be the same on all ranks"
_OTHER_LENGTHS = (
    "ranks {ranks} have other lengths than rank 0. Each rank must pass the lengths of all samples of the whole dataset to "
    "BalancedBatchSampler, in the same order. If each rank has its own samples, pass the lengths of these, and sharded=True"
)
