"""Work sharing in Keras: each step of the optimizer is a micro-batch (docs/protocol.md, rule 17)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from horovod_partial import _attach
from horovod_partial.exchange.gradients import Apply
from horovod_partial.exchange.work_sharing import MicroBatchSharer
from horovod_partial.keras.backend import backend
from horovod_partial.policies import WorkSharing
from horovod_partial.runtime import healing
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.runtime.tenure import Tenure


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, and does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        if found is None:
            raise RuntimeError("the optimizer of this step is gone")
        return found(*arguments)

    return call


class WorkSharingExchange(MicroBatchSharer):
    """The exchange of an optimizer under `hvd.WorkSharing` in one generation of Horovod.

    `share` runs where the program trains, perhaps while a graph is traced. `_complete`, `_take` and `_must_apply` run
    each time that a step runs, in a thread of the framework, while the program's thread waits for the step. So no two
    threads use this object at the same time.

    `gradients` is the sum of the gradients of this rank's micro-batches. This sum travels. `variables` are those of the
    first step. An update has `passes` micro-batches for each rank, on average. `apply` applies the gradients of an
    update. `replica_of` returns the values of the trained variables for the comparison in flushes.

    After `end` updates no micro-batch begins before the next epoch. `is_new` is True until a step has run: the first
    step may begin this rank's first own micro-batch itself. `loaded` is the update and the number of the micro-batch
    with the newest loaded batch; None if unknown.
    """

    _runtime = backend.runtime

    def __init__(
        self,
        gradients: Any,
        variables: Sequence[Any],
        passes: int,
        apply: Apply,
        replica_of: Callable[[list[Any]], healing.Replica | None],
    ) -> None:
        super().__init__()
        self.process_set = gradients.process_set
        self.thread = this_thread()
        self.end = math.inf
        self.is_new = True
        self.loaded: tuple[int, int] | None = None
        self._absent: list[bool] | None = None  # for each variable, whether it lacks a gradient; None before any step
        self._is_adding = False
        self._gradients = gradients
        self._variables = list(variables)
        self._passes = passes
        self._apply = apply
        self._replica_of = replica_of
        self._is_alone = not self.process_set.included() or self._runtime.is_alone(self.process_set)
        self._only_applies = False  # true while updates are applied outside a step, when no micro-batch may begin
        self._tenure = Tenure(self._runtime)
        self._updater = backend.Updater(
            weakly(self._take),
            weakly(self._must_apply),
            self._variables,
            weakly(self._apply_results),
        )
        gradients.prepare(self._variables)
        if not self._is_alone:
            self._become_active()
        self._tenure.enter()
        if not self._is_alone:
            gradients.declare()
            self._runtime.take_part_in_flushes(self)

    def share(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Add the gradients of a micro-batch, apply complete updates, and begin the next micro-batch.

        Raises ValueError if other variables than in the first step are trained, or lack a gradient.
        """
        absent = [gradient is None for gradient in gradients]
        self._absent = absent if self._absent is None else self._absent
        same = [id(variable) for variable in variables] == [id(variable) for variable in self._variables]
        if not same or absent != self._absent:
            raise ValueError(
                f"an optimizer under {WorkSharing()!r} trains other variables than in its first step, such as layers that were "
                "frozen or unfrozen: call optimizer.flush(), then wrap a new optimizer for what is trained from now on"
            )
        self.thread = this_thread()
        complete = weakly(self._complete)  # refers weakly: a graph keeps this function, but must not keep the exchange
        self._updater.train(backend.when_it_runs(complete, *self._gradients.dense(gradients), dtype="bool"))

    @property
    def is_under_way(self) -> bool:
        """Whether the gradients of a micro-batch are being added at this moment."""
        return self._is_adding

    def _complete(self, *gradients: Any) -> bool:
        """Add the gradients of the begun micro-batch. Returns whether an update must be applied."""
        self._require_current()
        if not self._is_alone:
            self._become_active()
        if self._number is None and not self._begin(waits=False):
            raise RuntimeError(
                "no micro-batch has begun here, and an update may have been made since the forward pass: train on batches of an "
                "DynamicShardingDataset, with one step for each, and flush between two steps"
            )
        if self.loaded not in (None, (self.rounds, self._number)):
            raise RuntimeError(
                "this batch was loaded for another micro-batch: call flush() between a step and the loading of the next batch, and "
                "leave steps_per_execution 1"
            )
        self.loaded = None
        self._is_adding, self.is_new = True, False
        try:
            self._gradients.add(gradients, arrives=not self._is_alone)
        finally:
            self._is_adding = False
        self._gradients.tell()
        self._number = None
        self._micro_batches += 1
        is_last = self._is_alone and self._micro_batches == self._passes
        return is_last or self._must_apply()

    def _require_current(self) -> None:
        if not self._is_alone and not self._tenure.is_current:
            raise RuntimeError(
                "this step was traced before Horovod was initialised again: trace it anew, with "
                "model.make_train_function(force=True), or a new tf.function"
            )

    def _must_apply(self) -> bool:
        """Return whether an update must be applied now. If not, begin the next micro-batch, if one may begin."""
        if self._only_applies:
            family = self.family
            return family is not None and family.has_round
        return self.rounds < self.end and not self._begin(waits=True)

    def _take(self) -> list[Any] | None:
        """Return the gradients of the oldest update that this rank has not applied; None if that has no gradient."""
        if not self._is_alone and not self._gradients.take():
            return None
        self._micro_batches = 0
        self._updates += 1
        return self._gradients.results(alone=self._is_alone)

    def _apply_results(self, results: list[Any]) -> None:
        """Apply the gradients of an update. Variables without a gradient do not change, not even by weight decay."""
        absent = self._absent or [False] * len(results)
        self._apply(
            [None if gone else result for gone, result in zip(absent, results, strict=True)], self._variables, 1.0
        )

    def _next_micro_batch(self, *, waits: bool) -> tuple[int, int] | None:
        return self._runtime.next_micro_batch(self, begins=True, waits=waits)

    def _apply_updates(self) -> None:
        self._only_applies = True
        try:
            self._updater.flush()
        finally:
            self._only_applies = False

    # --- Methods that flushes call, declared in `horovod_partial.runtime.appliers.Sharer`

    @property
    def family(self) -> _attach.Family | None:
        return self._gradients.family if self._tenure.is_current and not self._is_alone else None

    @property
    def replica(self) -> healing.Replica | None:
        return self._replica_of(self._variables)

    def apply_rounds(self) -> None:
        self._apply_updates()

    def apply_ahead(self) -> None:
        raise NotImplementedError

    def come_back(self) -> None:
        """Begin a micro-batch again after a flush, if the epoch has further updates."""
        if self.family is not None and self._is_active:
            self.begin_before(self.end)

    def flush(self) -> None:
        """Close the open update with the micro-batches made so far, and apply it. Every rank must call this."""
        self.thread = this_thread()
        self._runtime.flush(self.process_set.process_set_id)
