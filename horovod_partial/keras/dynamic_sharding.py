"""Data for `hvd.WorkSharing` in Keras: each micro-batch has planned samples, and the rank that makes it loads them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.trainers.data_adapters.data_adapter import DataAdapter  # what `fit` takes; it has no public name

from horovod_partial.checks import is_int, require
from horovod_partial.data.sharding import Place, Plan, Shards
from horovod_partial.exchange.arguments import check_sampler
from horovod_partial.keras.backend import backend
from horovod_partial.keras.steps import inner
from horovod_partial.runtime.tenure import Tenure

# Keras warns if it did not know an epoch's number of batches. With work sharing it never does: ignore the warning.
warnings.filterwarnings("ignore", "Your input ran out of data", module=r"keras\.|contextlib")


class DynamicShardingDataset(DataAdapter):  # type: ignore[misc]
    """The batches that this rank computes, above all under `hvd.WorkSharing()`.

    Call `model.fit(DynamicShardingDataset(x, y, optimizer=...))`. A batch is a micro-batch. An update has
    `backward_passes_per_step` micro-batches for each rank, on average. The seed, the epoch, the update and the
    micro-batch's number decide which samples it has; the rank that computes it does not matter. So an update has exactly
    the samples of synchronous training with this accumulation. Under `hvd.WorkSharing()` a free rank computes
    micro-batches of a slow one. Under other policies each rank computes its own.

    An epoch ends on every rank after the same update. Under `hvd.WorkSharing()` ranks compute different numbers of batches
    in it, so do not pass `steps_per_epoch`, and stop, evaluate and save at the end of an epoch, or by `optimizer.rounds`.
    If an epoch is left early, the next loop takes the rest, or all of it after Horovod restarts. All ranks must begin the
    same epochs.

    Your own loop takes an epoch as `for batch in dataset:`, with one step of the optimizer for each batch. Batches are
    NumPy arrays there. A dataset of `tf.data` is `dataset.get_tf_dataset()`.

    Args:
        x: an array with one row a sample, or a structure of such arrays (a dict or a tuple); or a
            `keras.utils.PyDataset`: each of its items is a micro-batch then, and `batch_size` does not count. Its
            `on_epoch_begin` and `on_epoch_end` are called once in each epoch, on every rank.
        y: targets in the same form, or None.
        sample_weight: one number for each sample, or None.
        optimizer: the result of `hvd.DistributedOptimizer(...)`.
        batch_size: samples in a micro-batch, 1 or more.
        shuffle: whether the samples come in another order in each epoch.
        seed: decides the order; the same on all ranks.
        drop_last: whether to leave out an incomplete last update. Otherwise it is filled with the epoch's first samples.

    Attributes:
        epoch: the epoch that is under way, or comes next. If all ranks have loaded the optimizer, the first epoch is the
            one behind those that its `iterations` have made, as after `BackupAndRestore`. Otherwise set it before `fit`
            to resume, on all ranks.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        optimizer: Any,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        require(hasattr(optimizer, "_horovod"), "optimizer", "the result of hvd.DistributedOptimizer(...)", optimizer)
        self._optimizer = optimizer
        self._horovod = optimizer._horovod
        self._process_set = self._horovod.process_set
        self._items = x if isinstance(x, keras.utils.PyDataset) else None
        require(sample_weight is None or y is not None, "y", "given where sample_weight is", y)
        given = [part for part in (x, y, sample_weight) if part is not None]
        if self._items is None:
            # Lists become tuples, because `tf.data` would make a tensor of a list.
            self._arrays = keras.tree.map_structure(np.asarray, keras.tree.lists_to_tuples(tuple(given)))
            lengths = {len(array) for array in keras.tree.flatten(self._arrays)}
            require(len(lengths) == 1, "x, y, sample_weight", "arrays of equally many samples", sorted(lengths))
            (samples,) = lengths
        else:
            require(y is None and sample_weight is None, "y and sample_weight", "None with a PyDataset", "given")
            samples, batch_size = self._items.num_batches or 0, 1
        check_sampler(batch_size, self._process_set, shuffle=shuffle, drop_last=drop_last)
        self._shards = Shards(samples, batch_size, self._horovod.passes, drop_last, self._order)
        self._shards.check(seed, backend.runtime.size_of(self._process_set))
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._guesses = True  # whether the user has not set `epoch`
        self._plan: Plan | None = None  # which samples each micro-batch of the present epoch has; None between epochs
        self._own = 0  # without work sharing: how many of its own micro-batches of the epoch this rank has computed
        self._open: int | None = None  # `_passes` when a loop yielded a batch, until this batch is counted; or None
        self._first = 0  # the value of `optimizer.rounds` before the first update of the present epoch
        self._tenure = Tenure(backend.runtime)  # the generation of Horovod in which the present epoch was planned
        self._loop = object()  # new for each loop over the data: a loop that finds another object is not the newest

    def _order(self, epoch: int) -> npt.NDArray[Any]:
        samples = self._shards.samples
        return np.random.default_rng([self._seed, epoch]).permutation(samples) if self._shuffle else np.arange(samples)

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._guesses = epoch, False

    def _planned(self) -> Plan:
        return self._new_plan() if self._plan is None else self._plan

    def _new_plan(self) -> Plan:
        process_set = self._process_set
        rank = process_set.rank() if process_set.included() else 0
        return Plan(self._shards, Place(self.epoch), rank, backend.runtime.size_of(process_set) or 1)

    def on_epoch_begin(self) -> None:
        """Begin an epoch, or go on with one that was left early. Keras calls this; so does a loop over this object."""
        require(is_int(self.epoch) and self.epoch >= 0, "epoch", "an int, 0 or more", self.epoch)
        state = self._horovod
        self._loop = object()
        self._settle()
        if self._tenure.enter() or self._plan is None:
            self._plan, self._own = self._new_plan(), 0
            if self._items is not None:
                self._items.on_epoch_begin()
            if state.shares_work:
                self._first = state.begin_epoch(self._optimizer, self._plan.updates)
        # Keras may take a first batch, to build the optimizer, before it loads a state. So look again in the next loop.
        made = self._rounds - self._first if state.shares_work else self._own
        if self._guesses and made == 0 and not state.has_data:
            found = int(self._optimizer.iterations) // self._plan.updates
            if found != self._epoch:
                self._epoch = found
                self._plan = self._new_plan()
        if state.sharing is not None:
            state.sharing.work.begin_before(state.end)

    def on_epoch_end(self) -> None:
        """End the epoch if all its updates have been applied. Keras calls this; so does a loop over this object."""
        self._settle()
        state, plan = self._horovod, self._plan
        if plan is None or (self._rounds < state.end if state.shares_work else self._own < plan.updates * state.passes):
            return
        self._plan = None
        self._epoch += 1
        if self._items is not None:
            self._items.on_epoch_end()
        if state.shares_work:
            state.progress.flushed()  # all updates have been applied: another optimizer may train the model

    @property
    def _rounds(self) -> int:
        return self._horovod.rounds(self._optimizer)

    def _batches(self) -> Iterator[Any]:
        return self._shared_batches() if self._horovod.shares_work else self._own_batches()

    def _own_batches(self) -> Iterator[Any]:
        plan = self._planned()
        while self._own < plan.updates * self._horovod.passes:
            update, index = divmod(self._own, self._horovod.passes)
            self._open = self._passes
            yield self._load(plan.indices(update, plan.own[index]))
            self._horovod.has_data = True
            self._own += self._open is not None
            self._open = None

    def _settle(self) -> None:
        """Count the last batch of a loop that was left early, if a step was taken with it."""
        self._own += self._open is not None and self._passes != self._open
        self._open = None

    @property
    def _passes(self) -> int:
        """A number that each step of the optimizer changes."""
        return int(inner(self._optimizer)._iterations)

    def _shared_batches(self) -> Iterator[Any]:
        state, plan, loop = self._horovod, self._planned(), self._loop
        before = None
        try:
            while True:
                sharing = state.sharing
                rounds = self._rounds
                if rounds >= state.end:
                    return
                number = None if sharing is None else sharing.work.begun
                if number is None and (sharing is None or sharing.is_new):
                    # A new optimizer's first step begins the first micro-batch of this rank's share. Load its samples.
                    number = plan.own[0]
                if number is None or (rounds, number) == before:
                    raise RuntimeError(
                        "no step of the optimizer was taken with the last batch. Under hvd.WorkSharing() each batch needs one "
                        "step, and steps_per_execution must be 1"
                    )
                before = rounds, number
                if sharing is not None:
                    sharing.loaded = before
                yield self._load(plan.indices(rounds - self._first, number))
                state.has_data = True
        finally:
            # Only the newest loop over the data lets other ranks compute the micro-batch that this rank has begun.
            if state.sharing is not None and self._loop is loop:
                state.sharing.work.give_back()

    def _load(self, indices: list[int]) -> Any:
        if self._items is not None:
            return self._items[indices[0]]
        return keras.tree.map_structure(lambda array: array[indices], self._arrays)

    def __iter__(self) -> Iterator[Any]:
        self.on_epoch_begin()
        try:
            yield from self._batches()
        finally:
            self.on_epoch_end()

    # --- Methods and attributes of a `DataAdapter`, which Keras uses

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self._batches()

    def get_torch_dataloader(self) -> Any:
        from keras.src.trainers.data_adapters.data_adapter_utils import get_torch_dataloader

        return get_torch_dataloader(self._batches())  # Keras asks for a loader in each loop, and loops over it once

    def get_tf_dataset(self) -> Any:
        """Return the batches of an epoch as a `tf.data.Dataset`. It loads none ahead: other ranks may take them."""
        import tensorflow as tf

        def spec(array: Any) -> tf.TensorSpec:
            array = np.asarray(array)
            return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

        signature = keras.tree.map_structure(spec, self._load([0]))
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        return tf.data.Dataset.from_generator(self._batches, output_signature=signature).with_options(options)

    num_batches = 0  # the number of batches differs between epochs, and Keras must not learn it from the first one
    has_partial_batch = False
    partial_batch_size = None

    @property
    def batch_size(self) -> int | None:
        return None if self._items is not None else self._shards.batch_size
