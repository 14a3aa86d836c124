"""A sampler and a loader whose micro-batches have fixed samples. Under `hvd.WorkSharing` any rank may compute one."""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from horovod_partial.checks import is_int, require
from horovod_partial.data.sharding import Place, Plan, Shards
from horovod_partial.exchange.arguments import check_sampler
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.micro_batches import counting_passes
from horovod_partial.torch.operations import runtime


class DynamicShardingSampler(Sampler[list[int]]):
    """The samples of this rank's own micro-batches: a `batch_sampler` for a `DataLoader`, for `hvd.WorkSharing()` above all.

    An update has `backward_passes_per_step` micro-batches for each rank, and each has `batch_size` samples. The seed,
    the epoch, the update and the number of the micro-batch decide which samples these are; the rank that makes it does
    not matter. So an update has exactly the samples of synchronous training: micro-batch i of rank r has the samples
    that `DistributedSampler` with the same seed, and a `DataLoader` with the same batch size, give to rank r as batch i
    of the update. Wrap the `DataLoader` into a `DynamicShardingLoader`: it also loads the samples of micro-batches
    that this rank takes over from other ranks.

    The last update of an epoch is as large as the others. It is filled with the first samples of the epoch, same as in
    `DistributedSampler`. With `drop_last` it is left out if it is not full.

    The sampler may be saved within an epoch, together with the model: between two steps, or in a round hook. Do not
    flush before, because a flush closes the open update. A loaded sampler goes on with the first update that has not
    been applied. If the number of ranks changes (in an elastic job), updates are larger or smaller from there on. Each
    sample still comes once, but updates consist of other samples than with the old number of ranks.
    `hvd.elastic.TorchState(..., sampler=sampler)` commits and restores the sampler.

    Args:
        dataset: a map-style dataset, or its number of samples.
        batch_size: samples in a micro-batch, 1 or more.
        backward_passes_per_step: micro-batches in an update for each rank, the same number as in the optimizer.
        shuffle: whether the samples come in another order in each epoch.
        seed: decides the order; the same on all ranks.
        drop_last: whether to leave out an incomplete last update.
        process_set: the same process set as in the optimizer.

    Attributes:
        epoch: the epoch that is under way, or else the next one. If a loop was left early, its epoch is still under way.
        update: how many updates of this epoch this rank has applied.

    Raises:
        ValueError: an argument is wrong, or with `drop_last` no update is left.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        backward_passes_per_step: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        fits = is_int(dataset) or isinstance(dataset, Sized)
        require(fits, "dataset", "a dataset with a length, or its number of samples", dataset)
        self.samples = len(dataset) if isinstance(dataset, Sized) else int(dataset)
        check_sampler(batch_size, process_set, shuffle=shuffle, drop_last=drop_last)
        self._shards = Shards(self.samples, batch_size, backward_passes_per_step, drop_last, self._order)
        self._shards.check(seed, runtime.size_of(process_set))
        self.batch_size = batch_size
        self.backward_passes_per_step = backward_passes_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.process_set = process_set
        self._next_epoch = 0
        self._place = Place(0)  # where in the data the next loop begins; not used while `_pass` is not None
        self._cached: Plan | None = None
        self._pass: _Pass | None = None  # the pass (an epoch, or its rest) from which a loop took its last batch
        self._handed_out: deque[tuple[int, int]] = deque()  # (update, micro-batch) numbers of the prefetched batches

    def _order(self, epoch: int) -> Any:
        if not self.shuffle:
            return torch.arange(self.samples, device="cpu").numpy()
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.samples, generator=generator, device="cpu").numpy()

    @property
    def _plan(self) -> Plan:
        return self._plan_from(self._place) if self._pass is None else self._pass.plan

    def _plan_from(self, place: Place) -> Plan:
        size, rank = runtime.size_of(self.process_set), self.process_set.rank()
        if self._cached is None or (self._cached.place, self._cached.rank, self._cached.size) != (place, rank, size):
            self._cached = Plan(self._shards, place, rank, size)
        return self._cached

    def _now(self) -> Place:
        return self._place if self._pass is None else self._pass.place

    @property
    def epoch(self) -> int:
        return self._now().epoch

    @property
    def update(self) -> int:
        return self._now().update

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; call it on all ranks. Without this call the next loop repeats the same epoch.

        If a loaded state is within this epoch, the loop goes on where the state was saved.
        """
        require(is_int(epoch) and epoch >= 0, "epoch", "an int, 0 or more", epoch)
        self._next_epoch = epoch
        is_over = self._pass is None or self._pass.is_over
        if is_over and epoch != self.epoch:
            self._place, self._pass = Place(epoch), None

    def indices(self, update: int, number: int) -> list[int]:
        """Return the indices of the samples of a micro-batch of this epoch.

        Args:
            update: number of the update within the epoch, from 0 on.
            number: number of the micro-batch within the update. The micro-batches of rank 0 have the lowest numbers, then
                come those of rank 1.

        Raises:
            IndexError: there is no such micro-batch, or its update had been made before the sampler's state was saved.
        """
        return self._plan.indices(update, number)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of this rank's own micro-batches in order. Updates that have been made are skipped."""
        plan = self._plan
        handed_out = self._handed_out = deque()
        update = self.update
        while update < plan.place.update + plan.updates:
            for number in plan.own:
                handed_out.append((update, number))
                yield plan.indices(update, number)
            update = max(update + 1, self.update)

    def __len__(self) -> int:
        """Return how many micro-batches a rank has, on average, in the loop that is under way, or else in the next one."""
        has_ended = self._pass is not None and not self._pass.is_under_way
        plan = self._plan_from(Place(self._next_epoch)) if has_ended else self._plan
        return self.backward_passes_per_step * plan.updates

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of its updates that this rank has applied, and the number of samples used."""
        return self._now()._asdict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on in the data where the state was saved. Call it on all ranks.

        Raises:
            RuntimeError: an epoch is under way, and other ranks may be making its micro-batches.
            ValueError: this is not a state of a `DynamicShardingSampler`.
        """
        fits = isinstance(state_dict, dict) and all(is_int(state_dict.get(name)) for name in Place._fields)
        require(fits, "state_dict", "one of a DynamicShardingSampler", state_dict)
        if self._pass is not None and self._pass.is_under_way and not runtime.failed:
            raise RuntimeError(
                "an epoch is under way with this sampler: load a state before the first loop, or after its end"
            )
        self._place, self._pass = Place(**{name: state_dict[name] for name in Place._fields}), None
        self._next_epoch = self._place.epoch


class _Pass:
    """An epoch, or the rest of one, that a loop over a `DynamicShardingLoader` has begun.

    A pass consists of consecutive updates. The optimizer's `rounds` are `first` before them, and `end` after them.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: Any, first: int) -> None:
        sampler: Any = loader.batch_sampler
        place = sampler._place if sampler._pass is None else Place(sampler._next_epoch)
        self.loader = loader
        self.sampler = sampler
        self.plan: Plan = sampler._plan_from(place)
        self.first = first
        self.end = first + self.plan.updates
        self._optimizer = weakref.ref(optimizer)
        self._tenure = Tenure(runtime)
        self._tenure.enter()
        self._made = 0  # how many updates of the epoch (or its rest) this rank had applied when `made` was last read
        sampler._pass = sampler._pass or self

    @property
    def made(self) -> int:
        """How many updates of the pass (an epoch, or its rest) this rank has applied."""
        optimizer = self._optimizer()
        rounds = None if optimizer is None else optimizer._exchange.work.rounds_of(self._tenure)
        if rounds is not None:
            self._made = min(max(self._made, rounds - self.first), self.plan.updates)
        return self._made

    @property
    def is_over(self) -> bool:
        return self.made == self.plan.updates

    @property
    def is_under_way(self) -> bool:
        """Whether the epoch, or its rest, is not over and can go on, because Horovod and the optimizer still live."""
        return self._tenure.is_current and self._optimizer() is not None and not self.is_over

    @property
    def place(self) -> Place:
        return self.plan.after(self.made)


class _Timeline:
    """Says to which pass (an epoch, or the rest of one) each update of an optimizer belongs.

    It is the same on all ranks without any message, because all ranks begin the same loops in the same order. `passes`
    have begun and are not over, oldest first. `newest` is the pass that the newest loop has begun.
    """

    def __init__(self) -> None:
        self.passes: deque[_Pass] = deque()
        self.newest: _Pass | None = None
        self._tenure = Tenure(runtime)

    def begin(self, loader: DataLoader[Any], optimizer: Any) -> _Pass:
        """Queue an epoch, or its rest, behind those that are not over."""
        if self._tenure.enter() or self.newest is None:
            self.passes.clear()
            first = optimizer._exchange.work.rounds
        else:
            first = self.newest.end
        self.newest = _Pass(loader, optimizer, first)
        self.passes.append(self.newest)
        return self.newest


_timelines: weakref.WeakKeyDictionary[Any, _Timeline] = weakref.WeakKeyDictionary()


class DynamicShardingLoader:
    """The batches that this rank trains with, under `hvd.WorkSharing()` or any other policy.

    Write `for batch in loader`, with one backward pass and one step for each batch. Under other policies than
    `hvd.WorkSharing()` each rank gets its own micro-batches, and the optimizer's `step` behaves as with
    `step_each_pass`. The rest of this text is about `hvd.WorkSharing()`. A micro-batch begins when the loop yields its
    batch, or in the `step` before if that step has applied no update. From then on no other rank takes the micro-batch
    over. The loader's workers load this rank's own micro-batches, and prefetch them in order. Batches prefetched for
    micro-batches that other ranks have taken over are dropped. When this rank begins a micro-batch of another rank, this
    process loads it, by the dataset and the `collate_fn` of the loader. So the dataset must work in this process too.

    A loop ends when all updates of the epoch have been applied, on every rank at the same `optimizer.rounds`. Ranks get
    different numbers of batches: stop, evaluate and save by `optimizer.rounds`, after `step()`, not by batches. (In an
    elastic job `optimizer.rounds` starts at 0 again when ranks come or go: use `sampler.epoch` and `sampler.update`.)
    All ranks must begin the same loops in the same order. If a loop is left early, even on one rank only, no sample is
    lost: the rest of its epoch comes first in the next loop. But a flush closes the open update with the micro-batches
    made so far.

    An optimizer must take all its steps in such loops. It may have several loaders, if their loops run one after the
    other.

    Args:
        loader: a `DataLoader` with `batch_sampler=DynamicShardingSampler(...)` and any number of workers.
        optimizer: the result of `hvd.DistributedOptimizer(...)`; it must have taken no step.

    Raises:
        ValueError: the loader, the sampler and the optimizer do not fit together.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> None:
        wrapped = _wrapped("DynamicShardingLoader", optimizer)
        sampler: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
        fits = isinstance(sampler, DynamicShardingSampler)
        require(fits, "loader", "a DataLoader with batch_sampler=DynamicShardingSampler(...)", loader)
        in_order = getattr(loader, "in_order", True)
        require(in_order, "loader", "one that keeps the order of its batches", "in_order=False")
        keeps = loader.persistent_workers and hasattr(loader.dataset, "set_epoch")
        require(not keeps, "loader", "without persistent_workers, whose copies of the dataset get no set_epoch", loader)
        passes, given = wrapped.backward_passes_per_step, sampler.backward_passes_per_step
        allowed = f"{passes}, as of the optimizer"
        require(given == passes, "backward_passes_per_step of the sampler", allowed, given)
        same = sampler.process_set.process_set_id == wrapped.process_set.process_set_id
        require(same, "process_set of the sampler", "that of the optimizer", sampler.process_set)
        if wrapped not in _timelines:
            work = counting_passes(wrapped)._exchange.work
            if wrapped.rounds > 0 or work.begun is not None or work.keeps_gradients:
                raise ValueError(
                    "the optimizer has taken steps without a DynamicShardingLoader, so ranks do not know which update its data "
                    "begin with: wrap a new optimizer"
                )
            _timelines[wrapped] = _Timeline()
        wrapped._exchange.work.begins_in_step = False
        self._loader = loader
        self._optimizer = wrapped
        self._timeline = _timelines[wrapped]

    def __len__(self) -> int:
        """Return how many batches a rank gets, on average, in the loop that is under way, or else in the next one."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        timeline = self._timeline
        begun = timeline.begin(self._loader, self._optimizer)
        try:
            while timeline.passes:
                current = timeline.passes[0]
                current.sampler._pass = current  # the sampler's `state_dict` saves the place in this epoch from now on
                yield from self._batches(current)
                timeline.passes.popleft()
        finally:
            if timeline.newest is begun:  # let other ranks make the begun micro-batch, unless a newer loop has begun it
                self._work.give_back()

    @property
    def _work(self) -> Any:
        return self._optimizer._exchange.work  # add_param_group may have replaced it since the last batch

    def _batches(self, current: _Pass) -> Iterator[Any]:
        plan = current.plan
        # Workers of the `DataLoader` load this rank's own batches in order, and this process loads the others.
        workers: Iterator[Any] = iter(current.loader) if current.loader.num_workers > 0 else iter(())
        handed_out = current.sampler._handed_out if current.loader.num_workers > 0 else deque()

        def batch_of(update: int, number: int) -> Any:
            while number in plan.own and handed_out and handed_out[0] <= (update, number):
                found, batch = handed_out.popleft(), next(workers)
                if found == (update, number):
                    return batch  # those before were prefetched for micro-batches that other ranks have made
            return _load(current.loader, plan.indices(update, number))

        while (number := self._work.begin_before(current.end)) is not None:
            rounds = self._work.rounds
            yield batch_of(rounds - current.first + plan.place.update, number)
            if (self._work.rounds, self._work.begun) == (rounds, number):
                raise RuntimeError(
                    "no step was taken with the last batch, for whose gradients all ranks wait. Call optimizer.step() after each "
                    "backward pass, and not after each K-th. To leave a batch out call optimizer.zero_grad() and "
                    "optimizer.step(): its gradients are zeros then"
                )


def _load(loader: DataLoader[Any], indices: Sequence[int]) -> Any:
    fetch = getattr(loader.dataset, "__getitems__", None)  # preferred if the dataset has it, like in a DataLoader
    batch = loader.collate_fn(fetch(indices) if fetch else [loader.dataset[index] for index in indices])
    pins = loader.pin_memory and torch.cuda.is_available()
    return pin_memory(batch) if pins else batch  # type: ignore[no-untyped-call]


def micro_batch_seed(optimizer: torch.optim.Optimizer, base: int = 0) -> int:
    """Return a seed for the begun micro-batch, the same whichever rank makes it: for dropout and augmentation.

    Call this before the forward pass: `torch.manual_seed(micro_batch_seed(optimizer))`. The seed depends on `base`,
    the number of updates before (`optimizer.rounds`) and the number of the micro-batch. Workers of a `DataLoader` load
    ahead and cannot call this, so random choices of a dataset should depend on the index of the sample.

    Args:
        optimizer: the result of `hvd.DistributedOptimizer(..., sync=hvd.WorkSharing())`, or one with `step_each_pass` or a
            `DynamicShardingLoader`.
        base: a signed int of 64 bits. Pass another one if training goes on in a new process, or after an elastic
            restart, because updates count from 0 again there.

    Returns:
        An int from 0 to 2**32 - 1. PyTorch, NumPy and Python accept it as a seed.

    Raises:
        RuntimeError: no micro-batch has begun, for example after the last batch of a `DynamicShardingLoader`.
        ValueError: an argument is wrong.
    """
    wrapped = _wrapped("micro_batch_seed", optimizer)
    require(is_int(base) and -(2**63) <= base < 2**63, "base", "an int of 64 bits", base)
    wrapped._exchange.work.require_loader()
    rounds, number = wrapped.begin_micro_batch()
    digest = hashlib.blake2b(struct.pack("<qqq", base, rounds, number), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _wrapped(user: str, optimizer: Any) -> Any:
    """Return the optimizer. Raises ValueError unless `hvd.DistributedOptimizer` has made it."""
    fits = getattr(optimizer, "is_horovod_partial", False)
    require(fits, f"optimizer of {user}", "the result of hvd.DistributedOptimizer(...)", optimizer)
    return optimizer
