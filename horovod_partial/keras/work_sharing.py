"""Work sharing in Keras: each step of the optimizer is a micro-batch (docs/protocol.md, rule 17)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from horovod_partial import _attach
from horovod_partial.exchange.gradients import Apply
from horovod_partial.exchange.work_sharing import SharedWork
from horovod_partial.keras.backend import backend
from horovod_partial.policies import WorkSharing
from horovod_partial.runtime import healing
from horovod_partial.runtime.appliers import this_thread


def shares_work(optimizer: Any) -> bool:
    """Return whether `hvd.DistributedOptimizer` has wrapped an optimizer under the policy `hvd.WorkSharing`."""
    return getattr(getattr(optimizer, "_horovod", None), "shares_work", False)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, but does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        if found is None:
            raise RuntimeError("the optimizer of this step is gone")
        return found(*arguments)

    return call


class WorkSharingExchange:
    """The exchange of an optimizer under `hvd.WorkSharing`, from one `hvd.init()` to the next.

    `apply_combined` runs in the program's thread, in eager code or while a graph is traced. `_complete`, `_take` and
    `_must_apply` run in each step: in eager code in the program's thread, in a graph in a thread of the framework while
    the program's thread waits. So no two threads use this object at the same time. This class implements
    `exchange.work_sharing.Sharer`.

    `gradients`, a `SharedGradients`, sums the gradients of this rank's micro-batches, and sends the sum. `variables`
    are those of the first step. An update has `passes` micro-batches for each rank, on average. No micro-batch begins
    after `end` updates. `replica_of` returns the values of the trained variables for the comparison in flushes.

    `work` knows which micro-batch this rank has begun. `is_new` is True until a step has run. The first step begins
    the first micro-batch of this rank's share. `loaded` says for which micro-batch the newest batch was loaded: the
    number of the update, and the number of the micro-batch in this update. It is None if unknown.
    """

    shares_work = True
    is_applying = False  # no user code, which could flush, runs while an update is applied
    is_settled = True  # between two steps this rank has no late gradients, and has applied all updates it has taken

    def __init__(
        self,
        gradients: Any,
        variables: Sequence[Any],
        passes: int,
        end: float,
        replica_of: Callable[[list[Any]], healing.Replica | None],
    ) -> None:
        self.is_under_way = False  # whether the gradients of a micro-batch are being added at this moment
        self.is_new = True
        self.loaded: tuple[int, int | None] | None = None
        self._absent: list[bool] | None = None  # for each variable, whether it lacks a gradient; None before any step
        self._gradients = gradients
        self._variables = list(variables)
        self._replica_of = replica_of
        self._apply: Apply | None = None  # applies the gradients of an update; None before the first step
        self._only_applies = False  # True while updates are applied outside a step, when no micro-batch may begin
        self._train, self._flush = backend.updater(
            weakly(self._take), weakly(self._must_apply), weakly(self._apply_results), self._variables
        )
        self.process_set = gradients.family.process_set
        self.thread = this_thread()
        self.work = SharedWork(backend.runtime, self.process_set, passes, self)
        self.work.end = end
        self.work.enter()
        if not self.work.is_alone:
            backend.runtime.take_part_in_flushes(self)

    def apply_combined(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Add the gradients of a micro-batch, apply complete updates, and begin the next micro-batch.

        `apply` applies the gradients of an update. Raises ValueError if the variables are not those of the first step,
        or if other variables than in the first step have no gradient.
        """
        absent = [gradient is None for gradient in gradients]
        self._absent = absent if self._absent is None else self._absent
        same = [id(variable) for variable in variables] == [id(variable) for variable in self._variables]
        if not same or absent != self._absent:
            raise ValueError(
                f"an optimizer under {WorkSharing()!r} trains other variables than in its first step, such as layers that were "
                "frozen or unfrozen: call optimizer.flush(), then wrap a new optimizer for what is trained from now on"
            )
        self._apply = apply
        self.thread = this_thread()
        sparse_as_dense = self._gradients.options.sparse_as_dense
        pairs = zip(gradients, variables, strict=True)
        dense = [backend.dense(*pair, sparse_as_dense=sparse_as_dense) for pair in pairs]
        complete = weakly(self._complete)  # refers weakly: a graph keeps this function, but must not keep the exchange
        self._train(backend.when_it_runs(complete, *dense, dtype="bool"))

    def _complete(self, *gradients: Any) -> bool:
        """Add the gradients of the begun micro-batch. Returns whether an update must be applied."""
        work = self.work
        if not (work.is_alone or work.is_current):
            raise RuntimeError(
                "this step was traced before Horovod was initialised again: trace it anew, with "
                "model.make_train_function(force=True), or a new tf.function"
            )
        work.enter()
        if work.begun is None and not work.begin(waits=False):
            raise RuntimeError(
                "no micro-batch has begun here, and an update may have been made since the forward pass: train on batches of an "
                "DynamicShardingDataset, with one step for each, and flush between two steps"
            )
        if self.loaded not in (None, (work.rounds, work.begun)):
            raise RuntimeError(
                "this batch was loaded for another micro-batch: call flush() between a step and the loading of the next batch, and "
                "leave steps_per_execution 1"
            )
        self.loaded = None
        self.is_under_way, self.is_new = True, False
        try:
            self._gradients.add(gradients, arrives=not work.is_alone)
        finally:
            self.is_under_way = False
        work.complete()
        return work.must_apply()

    def _must_apply(self) -> bool:
        """Return whether an update must be applied now. If not, begin the next micro-batch, if one may begin."""
        if self._only_applies:
            return self.family is not None and self.family.has_round
        return self.work.must_apply()

    def _take(self) -> list[Any] | None:
        """Return the gradients of the oldest complete update; None if there is none, or if it has no gradient."""
        if not self.work.is_alone and not self._gradients.take():
            return None
        self.work.applied()
        return self._gradients.results(alone=self.work.is_alone)

    def _apply_results(self, results: list[Any]) -> None:
        """Apply the gradients of an update. Variables without a gradient do not change, not even by weight decay."""
        assert self._apply is not None
        assert self._absent is not None
        pairs = zip(self._absent, results, strict=True)
        self._apply([None if gone else result for gone, result in pairs], self._variables, 1.0)

    @property
    def rounds(self) -> int:
        """How many updates this rank has taken since the last `hvd.init()`."""
        return self.work.rounds

    def flush(self) -> None:
        """Apply the open update with the micro-batches computed so far. Every rank must call this."""
        self.thread = this_thread()
        backend.runtime.flush(self.process_set.process_set_id)

    # --- Methods of a `horovod_partial.exchange.work_sharing.Sharer`

    @property
    def family(self) -> _attach.Family | None:
        return None if self.work.is_alone or not self.work.is_current else self._gradients.family

    @property
    def replica(self) -> healing.Replica | None:
        return self._replica_of(self._variables)

    def declare_buckets(self) -> None:
        self._gradients.declare()

    def apply_updates(self) -> None:
        self._only_applies = True
        try:
            self._flush()
        finally:
            self._only_applies = False

    apply_rounds = apply_updates
