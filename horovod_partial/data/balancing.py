"""Makes batches that take all ranks the same time: in each step all ranks get samples of similar length."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.checks import is_int, is_number, require
from horovod_partial.data.balanced_steps import Cutting, Lengths, Samples, Steps, cost_of_shards
from horovod_partial.exchange.arguments import check_sampler
from horovod_partial.runtime.runtime import Runtime

UNLIKE = 0.15  # if the ranks' own samples make steps longer by this share, a warning says so

_numbers = itertools.count()

Place = tuple[tuple[int, int], ...]  # what is done of an epoch: numbers of ranks, and how many steps these have taken


class BalancedBatchSampler:
    """Makes batches for each rank. In the same step, the samples of all ranks have similar lengths.

    Use it for samples that take different times, such as sentences or videos. Samples are sorted by length, and a step
    takes neighbours of this order for all ranks. So all ranks take about the same time for a step, and batches need
    little padding. With `shuffle` the steps come in a random order, and samples of similar length change places between
    them in each epoch. This makes steps about 2 % longer, on average.

    This is a batch sampler: pass it to PyTorch's `DataLoader(dataset, batch_sampler=...)`, or make a dataset of
    TensorFlow from it with `tf.data.Dataset.from_generator`. Each loop gives the batches of this rank in one epoch.
    Call `set_epoch` before each loop. Lightning and Accelerate do this.

    All ranks know the lengths of the whole dataset, and compute the same steps. In their first loops they compare what
    they know, in a thread, so that a rank may begin a loop alone. If each rank has its own files, pass `sharded=True`:
    then each rank passes the lengths of its own samples, and gets batches of these only.

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
        sharded: whether each rank has its own samples. Then all ranks must make the sampler together; in an elastic
            job, in the function that `hvd.elastic.run` decorates. All ranks take the same number of whole batches: ranks
            with fewer samples repeat some, and those with more leave some out, each epoch others. With `drop_last` no
            rank repeats a sample; without `shuffle` no rank leaves one out.
        process_set: the ranks that take a step together.

    Attributes:
        epoch: the epoch of the next loop, or of the one that is under way.

    Raises:
        ValueError: an argument is wrong, ranks have passed other arguments or (unless `sharded`) other lengths, or no
            step is left. A loop raises this error on every rank, within its first batches.
    """

    _runtime: Runtime  # that of the framework, whose subclass of this class has it

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
        flags = {"shuffle": shuffle, "drop_last": drop_last, "longest_first": longest_first, "sharded": sharded}
        check_sampler(batch_size if max_tokens is None else 1, process_set, **flags)
        require(is_int(seed) and seed >= 0, "seed", "an int, 0 or more", seed)
        self._lengths = _as_lengths(lengths)
        if max_tokens is not None:
            if batch_size is not None or sharded:
                raise ValueError("give batch_size or max_tokens, not both; sharded=True needs batch_size")
            longest = self._lengths.max()
            allowed = f"a number, and no less than the longest sample ({longest:g})"
            require(
                is_number(max_tokens) and max_tokens >= longest and max_tokens > 0, "max_tokens", allowed, max_tokens
            )
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self._name = f"BalancedBatchSampler.{next(_numbers)}"  # all ranks make their samplers in the same order
        self._seed = seed
        self._sharded = sharded
        self._process_set = process_set
        self._cutting = Cutting(batch_size, max_tokens, bool(shuffle), bool(drop_last), bool(longest_first))
        self._shards: list[Lengths] = []
        # The generation of Horovod in which this rank has begun to compare with others. A `Tenure` cannot be pickled.
        self._compared = 0
        self._found: list[list[bytes]] = []  # what all ranks have, until a loop has looked at it
        self._start: Place = ()  # where the newest loop began, or else the next one begins
        self._done: Place = ()  # what `record_batch` has recorded
        self._is_set = True  # whether `set_epoch` or `load_state_dict` was called since the newest loop began
        self._planned: tuple[Any, Steps] | None = None
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
        steps = self._steps()
        return len(steps.samples) / (max(len(steps), 1) * (1 if self._sharded else self._process_set.size()))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; call it on all ranks. Without this call each loop has the same order.

        If a loaded state is within this epoch, the loop goes on where the state was saved.
        """
        require(is_int(epoch) and epoch >= 0, "epoch", "an int, 0 or more", epoch)
        self._is_set = True
        if epoch != self.epoch:
            self.epoch, self._start, self._done = epoch, (), ()

    def record_batch(self, batch: int) -> None:
        """Record that this rank has taken the step with a batch of the newest loop. States contain what is recorded.

        Args:
            batch: the number of the batch in the loop, from 0 on.
        """
        require(is_int(batch) and batch >= 0, "batch", "an int, 0 or more", batch)
        before, taken = self._split()
        self._done = (*before, (self._process_set.size(), taken + batch + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which of its steps `record_batch` has recorded."""
        return {"epoch": self.epoch, "done": [list(part) for part in self._done]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the data where the state was saved. Call it on all ranks, before the loop.

        The number of ranks may be another one now, unless the sampler is `sharded`. Then the samples that are left of
        the epoch are cut into other steps. Each sample still comes once.

        Raises:
            ValueError: this is not a state of a `BalancedBatchSampler`.
        """
        try:
            epoch = state_dict["epoch"]
            place = tuple((int(ranks), int(steps)) for ranks, steps in state_dict["done"])
        except (KeyError, TypeError, ValueError):
            epoch, place = None, ()
        fits = is_int(epoch) and epoch >= 0 and all(ranks >= 1 and steps >= 1 for ranks, steps in place)
        require(fits, "state_dict", "one of a BalancedBatchSampler", state_dict)
        self.epoch, self._start, self._done, self._is_set = epoch, place, place, True

    def __len__(self) -> int:
        """Return the number of batches of this rank in the next loop. It is the same on every rank.

        It differs between epochs with `max_tokens`, and after `load_state_dict`.
        """
        return len(self._steps()) - self._split()[1]

    def __iter__(self) -> Iterator[list[int]]:
        if self._compared != self._runtime.generation:
            self._compared = self._runtime.generation
            if self._sharded:
                self._meet()
            else:
                threading.Thread(target=self._compare, daemon=True).start()
        if not self._is_set:
            self._start = ()
            if self._cutting.shuffle:
                warnings.warn(
                    f"a loop begins epoch {self.epoch} again, with the batches of the loop before: call "
                    "BalancedBatchSampler.set_epoch(epoch) before each loop, on all ranks",
                    stacklevel=2,
                )
        self._done = self._start
        rank, ranks = self._process_set.rank(), self._process_set.size()
        steps = self._steps()
        for number in range(self._split()[1], len(steps)):
            while self._found:  # the thread that compares adds to this list
                self._check(self._found.pop())
            step = steps.of(number)  # in each step, another rank gets the longest sample
            yield (step if self._sharded else step[(rank + number) % ranks :: ranks]).tolist()
            self._is_set = False

    def _gathered(self) -> list[bytes]:
        """Return what each rank has: a hash of what all must have alike and, with `sharded`, its lengths."""
        lengths = self._lengths.tobytes()
        alike = repr((self._seed, self._sharded, self._cutting)).encode() + (b"" if self._sharded else lengths)
        own = hashlib.blake2b(alike, digest_size=_DIGEST).digest() + (lengths if self._sharded else b"")
        alone = self._process_set.size() == 1
        return [own] if alone else self._runtime.gather_bytes(own, self._name, self._process_set)

    def _compare(self) -> None:
        """Learn what the other ranks have, in a thread. The loop that is under way looks at the result."""
        with contextlib.suppress(HorovodInternalError):  # Horovod ends, or begins anew
            self._found.append(self._gathered())

    def _check(self, found: list[bytes]) -> None:
        """Raise ValueError if ranks differ in what must be alike."""
        others = [rank for rank, part in enumerate(found) if part[:_DIGEST] != found[0][:_DIGEST]]
        if others:
            self._compared = 0  # the next loop compares again
            raise ValueError(
                f"rank {self._process_set.rank()}: ranks {', '.join(map(str, others))} made their BalancedBatchSampler with other "
                "lengths or arguments than rank 0. Pass the lengths of all samples of the whole dataset, in the same order on every "
                "rank. If each rank has its own samples, pass the lengths of these, and sharded=True, on every rank"
            )

    def _meet(self) -> None:
        """With `sharded`, learn the lengths of all ranks' samples. All ranks call this once after each `init`."""
        found = self._gathered()
        self._check(found)
        self._compared, self._planned = self._runtime.generation, None
        self._shards = [np.frombuffer(part[_DIGEST:], dtype=np.float64) for part in found]
        assert self.batch_size is not None
        cost = cost_of_shards(self._shards, self.batch_size)
        if cost > UNLIKE and self._process_set.rank() == 0:
            warnings.warn(
                f"the samples of the ranks have unlike lengths, so steps take {cost:.0%} longer than if all ranks shared all "
                "samples. Give each rank a random part of the samples",
                stacklevel=3,
            )

    def _split(self) -> tuple[Place, int]:
        """Return what other numbers of ranks have done before the loop, and how many steps this number has taken."""
        start = self._start
        is_present = bool(start) and start[-1][0] == self._process_set.size()
        return (start[:-1], start[-1][1]) if is_present else (start, 0)

    def _steps(self) -> Steps:
        """Return the steps of the present number of ranks, from the last place on where their number has changed."""
        before, ranks = self._split()[0], self._process_set.size()
        key = self.epoch, before, ranks
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(before, ranks)
        return self._planned[1]

    def _plan(self, before: Place, ranks: int) -> Steps:
        def draw(part: int) -> np.random.Generator:
            return np.random.default_rng((self._seed, self.epoch, part))

        if self._sharded:
            if before:
                raise ValueError("a state of another number of ranks cannot be loaded with sharded=True")
            return self._cutting.steps_of_shards(self._shards, draw(0))[self._process_set.rank()]
        left: Samples = np.arange(len(self._lengths))
        for part, (ranks_before, taken) in enumerate(before):
            steps = self._cutting.steps(self._lengths, left, ranks_before, draw(part))
            left = np.setdiff1d(left, steps.samples[: steps.edges[min(taken, len(steps))]])
        return self._cutting.steps(self._lengths, left, ranks, draw(len(before)))


_DIGEST = 16  # bytes


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
