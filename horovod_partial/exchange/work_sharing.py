"""Decides which micro-batch this rank computes under `hvd.WorkSharing` (docs/protocol.md, rule 17)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from horovod.common.process_sets import ProcessSet

from horovod_partial.runtime.appliers import Applier, this_thread
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class MicroBatches:
    """Says which calls of an optimizer's `step` end an update, and which micro-batch this rank computes next.

    This base class is for Horovod's own loop, in which each call of `step` ends an update, and micro-batches have no
    numbers. `begun` is the number, within its update, of the micro-batch that this rank has begun and not finished. It
    is None if there is none. If `begins_in_step` is False, a loader of data begins the first micro-batch of each update.
    `updated` is the number of updates that were applied between the ends of the last two calls of `step`.
    """

    begun: int | None = None
    begins_in_step = True
    updated = 1

    @property
    def rounds(self) -> int:
        """How many updates have been made since the last `hvd.init()`."""
        return 0

    @property
    def is_last(self) -> bool:
        """Whether the next call of `step` ends an update."""
        return True

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of an incomplete update are in the parameters, so that nothing may clear them."""
        return False

    def step(self, closure: Any, take: Callable[[Any], Any]) -> Any:
        """Call `take(closure)`, the optimizer's step, if the update is complete. Returns the loss of the closure."""
        return take(closure)

    def skipped(self) -> None:
        """Record that a GradScaler has skipped the step that ends an update."""

    def require_last(self) -> None:
        """Raise RuntimeError within an update, whose gradients are not complete."""
        if not self.is_last:
            raise RuntimeError(
                "synchronize() came within an update: its gradients are complete after its last backward pass"
            )

    def begin_before(self, rounds: float) -> int | None:
        """Begin a micro-batch, unless one has begun. Returns its number in its update; None after `rounds` updates.

        Raises ValueError in Horovod's own loop.
        """
        raise ValueError(
            "begin_micro_batch() needs sync=hvd.WorkSharing(), or step_each_pass=True, or a DynamicShardingLoader"
        )

    def require_loader(self) -> None:
        """Raise RuntimeError if a loader of data should have begun a micro-batch, and has not."""
        if not self.begins_in_step and self.begun is None:
            raise RuntimeError(
                "no micro-batch has begun here. Under DynamicShardingLoader one begins when its loop gives a batch: let each batch "
                "have one backward pass and one step(), in the loop, and flush after step()"
            )

    def forget(self) -> None:
        """Begin the open update anew, because a state is loaded."""

    def set_passes(self, passes: int) -> None:
        """Let an update have `passes` micro-batches for each rank. Raises ValueError if it must not change now."""

    def after(self, before: MicroBatches) -> MicroBatches:
        """Return what follows `before` where an optimizer gets new buckets: this object, or `before` itself."""
        return before


class Sharer(Applier, Protocol):
    """What `SharedWork` needs of the exchange of an optimizer, and the runtime of an `Applier` under `hvd.WorkSharing`.

    Messages of the first bucket of `family` assign micro-batches to ranks. `is_under_way` is True while gradients of a
    micro-batch exist and wait for a step. Flushes and joins interrupt `work`.
    """

    work: SharedWork

    def declare_buckets(self) -> None:
        """Declare the optimizer's buckets, before its first micro-batch since the last `hvd.init()`."""

    def apply_updates(self) -> None:
        """Apply all updates that are complete, oldest first, between two steps."""


class SharedWork(MicroBatches):
    """The micro-batches of one optimizer under `hvd.WorkSharing`.

    Only the thread that trains uses this object, which refers weakly to `sharer`. An update has `passes` micro-batches
    for each rank, on average. No micro-batch begins after `end` updates. If `is_alone`, there are no other ranks, and
    this rank computes all micro-batches.
    """

    _active: ClassVar[weakref.ref[SharedWork] | None] = None  # the work of the optimizer that gets micro-batches now

    def __init__(self, runtime: Runtime, process_set: ProcessSet, passes: int, sharer: Sharer) -> None:
        self.end = math.inf
        self.updated = 0
        self.is_alone = not process_set.included() or runtime.is_alone(process_set)
        self._runtime = runtime
        self._passes = passes
        self._sharer = weakref.ref(sharer)
        self._tenure = Tenure(runtime)  # remembers after which `hvd.init()` the optimizer's buckets were declared
        self._rounds = 0  # the number of updates since this `hvd.init()`
        self._first = 0  # the number of these before the optimizer's present buckets were declared
        self._made = 0  # how many micro-batches of the open update this rank has computed
        self._begins = True  # whether `must_apply` begins the next micro-batch; otherwise a loader of data begins it

    def enter(self) -> None:
        """Let this optimizer receive micro-batches, and declare its buckets if this was not done since `hvd.init()`.

        Raises ValueError if this optimizer received micro-batches before, and another optimizer received some since.
        """
        if self.is_alone:
            return
        active = None if SharedWork._active is None else SharedWork._active()
        if active is not self and active is not None:
            if self.is_current:
                raise ValueError(
                    "two optimizers cannot share work in turns: an update of one might be made while this rank uses the other, under "
                    "weights that are gone. Pass the parameters of both to one optimizer, or use another policy"
                )
            active.leave()
        sharer = self._sharer()
        if not self.is_current and sharer is not None:
            self._rounds = self._first = self._made = 0
            self.begun = None  # a micro-batch that began before the last `hvd.init()` is lost
            sharer.declare_buckets()
            self._tenure.enter()  # only now, because a declaration that fails must be made again
        SharedWork._active = weakref.ref(self)

    def after(self, before: MicroBatches) -> MicroBatches:
        assert isinstance(before, SharedWork)
        rounds, self.begins_in_step = before.rounds, before.begins_in_step
        if before.is_current:
            self.enter()
        self._rounds = self._first = rounds
        return self

    @property
    def is_current(self) -> bool:
        """Whether the optimizer has received micro-batches since the last `hvd.init()`."""
        return self._tenure.is_current

    def begin(self, *, waits: bool, begins: bool = True) -> bool:
        """Begin a micro-batch. Returns False if an update must come first, or if a wait is needed but not allowed.

        Without `begins` return only whether this rank may begin one.
        """
        if self.is_alone:
            self.begun = self._made if begins else self.begun
            return True
        sharer = self._sharer()
        family = None if sharer is None else sharer.family
        found = self._runtime.next_micro_batch(family, begins=begins, waits=waits)
        if begins and found is not None:
            self.begun, self._rounds = found[0], self._first + found[1]
        return found is not None

    def begin_before(self, rounds: float) -> int | None:
        """Same as `MicroBatches.begin_before`, but apply complete updates first: this changes the weights.

        This rank first gets the numbers of its own share, and then some of the shares of other ranks.
        """
        self.enter()
        sharer = self._sharer()
        assert sharer is not None
        sharer.thread = this_thread()
        while self.begun is None and self.rounds < rounds:
            if not self.begin(waits=True):
                sharer.apply_updates()
        return self.begun if self.rounds < rounds else None

    def complete(self) -> None:
        """Record that this rank has computed the micro-batch that it had begun."""
        self.begun = None
        self._made += 1
        self._begins = True

    def must_apply(self) -> bool:
        """Wait until an update must be applied (returns True) or this rank may begin a micro-batch (returns False).

        If False, the micro-batch has begun, unless a loader of data begins it later. After `end` updates this call
        returns False at once, and begins no micro-batch.
        """
        return self.is_complete or (self.rounds < self.end and not self.begin(waits=True, begins=self._begins))

    @property
    def is_complete(self) -> bool:
        """Whether this rank is alone, and has computed all micro-batches of the open update."""
        return self.is_alone and self._made == self._passes

    def applied(self) -> None:
        """Record that this rank has taken an update. The caller applies the update before or after this call."""
        self._made = 0
        self._rounds += 1
        self._begins = self.begins_in_step

    def forget(self) -> None:
        if self.is_alone:  # otherwise no micro-batch has been made: the exchange has raised an error if some had been
            self._made, self.begun = 0, None if self.begun is None else 0

    def set_passes(self, passes: int) -> None:
        if passes != self._passes:
            raise ValueError("backward_passes_per_step cannot change under hvd.WorkSharing(): wrap a new optimizer")

    @property
    def rounds(self) -> int:
        """How many updates have been made. Rounds in which a flush found no gradient on any rank do not count.

        Updates that other ranks made while this rank was in `hvd.join` are counted when its next micro-batch begins.
        """
        return self._rounds if self.is_alone or self.is_current else 0

    def rounds_of(self, generation: Tenure) -> int | None:
        """Return how many updates were made; None if this object is not from the same `hvd.init()` as `generation`."""
        return self._rounds if self.is_alone or self._tenure.is_that_of(generation) else None

    def leave(self) -> None:
        """Let other ranks compute the micro-batch that this rank has begun, before this rank flushes, joins or ends.

        Raises AssertionError if some gradients of the micro-batch exist already, or an update is being applied.
        """
        sharer = self._sharer()
        if sharer is not None and (sharer.is_under_way or sharer.is_applying):
            raise AssertionError(
                "a flush, a join or the end came after loss.backward() but before optimizer.step() of this or another thread, or "
                "within a round hook: call it between two steps."
            )
        self.give_back()

    def give_back(self) -> None:
        """Let another rank compute the micro-batch that this rank has begun, unless some of its gradients exist."""
        sharer = self._sharer()
        if sharer is None or sharer.is_under_way:
            return
        if self.begun is not None and sharer.family is not None:
            sharer.family.return_micro_batch()
        self.begun = None

    def come_back(self) -> None:
        """Begin a micro-batch again, after a flush or a join that began with `leave`."""
        sharer = self._sharer()
        if sharer is None or sharer.family is None or SharedWork._active is None or SharedWork._active() is not self:
            return
        self._begins = self.begins_in_step
        while self.must_apply():
            sharer.apply_updates()
