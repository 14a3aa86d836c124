"""Attaches this package to a framework's Horovod, and ends jobs in good order.

There is one `Runtime` for each framework in the process. It attaches the core to Horovod's library, and owns the life
cycle: the handshake after `init`, the flush before `shutdown`, and the exit handler.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
from numpy.typing import NDArray

from horovod_partial import _attach, log
from horovod_partial.checks import is_number, require
from horovod_partial.runtime import bucket_config, failure, healing, heartbeat, step_parts
from horovod_partial.runtime.appliers import AheadApplier, Applier, Averager, Meanwhile, this_thread
from horovod_partial.runtime.build import check_features
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.settings import adopt, settings, shared

if TYPE_CHECKING:
    from horovod_partial.metrics.endpoint import Endpoint

_POLL_SECONDS = 1e-3  # the pause between two polls in a wait for a collective of Horovod's, same as in Horovod
_IDLE_SECONDS = 1.0  # a flush or join takes another thread for idle if its optimizer does nothing for this time
_BUSY_SECONDS = 10.0  # a flush or join waits no longer than this for another thread to become idle


class Runtime:
    """A framework's Horovod with this package's hooks installed.

    `mpi_ops` is Horovod's module of that framework. `tensor_of` makes a tensor of the framework from an array.
    `waits_are_told` says whether the front end reports waits for Horovod, by `in_horovods_wait` and `asks_horovod`.
    `library` is the path of the shared object with Horovod's core, as Horovod's module has loaded it.
    Raises ImportError, and changes nothing, if this package was built for a Horovod with other features, or the hooks
    do not fit.
    """

    def __init__(self, mpi_ops: ModuleType, tensor_of: Callable[[NDArray[Any]], Any], *, waits_are_told: bool) -> None:
        check_features(mpi_ops)
        self._mpi_ops = mpi_ops
        self.library: str = mpi_ops._basics.MPI_LIB_CTYPES._name
        self._tensor_of = tensor_of
        # Horovod's own functions. `rank` and `size` are of all ranks, and raise ValueError before `init`.
        self.rank, self.size, self.is_initialized = mpi_ops.rank, mpi_ops.size, mpi_ops.is_initialized
        self._process_sets = {0}  # numbers of the process sets that may have had rounds: shutdown and exit flush them
        self._begun = Tenure(self)
        self._observed = Tenure(self)
        self._agreed = Tenure(self)  # tells whether `init` was called already; _init_lock guards it
        self._init_lock = threading.Lock()
        # Each applier combines the gradients of one optimizer. Flushes apply the missed rounds of these appliers.
        self._appliers: weakref.WeakSet[Any] = weakref.WeakSet()
        # These appliers may also apply rounds to a copy of the model, while their thread waits.
        self._ahead_appliers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._averagers: weakref.WeakSet[Any] = weakref.WeakSet()  # each averages the model of one optimizer
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()  # appliers that `_warn_of_others` has warned of
        self._appliers_lock = threading.Lock()  # guards `_appliers`, `_ahead_appliers` and `_averagers`
        self._flushing: dict[int, threading.RLock] = {}  # by process set, the lock that a thread has while it flushes
        self._monitor: _attach.Monitor | None = None  # sends and receives heartbeats; None if there are none
        self._endpoint: Endpoint | None = None  # serves metrics; on rank 0 only
        # The objects that compare replicas after a flush, by process set. Guarded by _meetings_lock.
        self._meetings: dict[int, healing.Meeting] = {}
        self._has_met = Tenure(self)  # tells whether `_meetings` were made since the last `init`
        self._meetings_lock = threading.Lock()
        # `takes_no_rounds` is True on a thread while it is in a join, or in an exit handler.
        self._thread = threading.local()
        self.failed = False  # true from a failure of a collective until the elastic job has restarted Horovod
        log.start()
        self.core = _attach.attach(self.library, waits_are_told=waits_are_told)
        failure.watch()
        os.register_at_fork(after_in_child=self._end_in_child)

    @property
    def generation(self) -> int:
        """A number that is different after each initialisation of Horovod, and 0 while Horovod is down."""
        return self.core.generation

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Call Horovod's `init`, then prove by a handshake that partial collectives work on every rank.

        A second call before `shutdown` does nothing, as with Horovod, so one rank alone may make it.

        Raises:
            ImportError: partial collectives do not work on some rank, because a hook does not run.
            ValueError: settings contradict each other, or heartbeats were asked for and are not possible. Every rank
                raises the same error.
        """
        with self._init_lock:
            self._mpi_ops.init(*args, **kwargs)
            if self._agreed.is_current:
                self._register_exit()  # anew, because Horovod's `init` has registered its exit handler anew
                return
            self._begin()
            self.core.require_process_set(0)  # in a handshake all ranks prove that hooks run
            taken = adopt([json.loads(text) for text in self.core.gather(json.dumps(shared()))], self.rank())
            if taken:
                log.logger.warning("%s is set on rank 0 and not here; this rank takes it", ", ".join(taken))
            self._observe_as_set()
            self._monitor = None  # this ends the heartbeats of an earlier `init`
            self._monitor = heartbeat.begin(self.rank(), self.size(), self.core.gather)
            if settings().watches_steps:
                self._warn_of_no_watch()
            self._agreed.enter()

    def gather_bytes(self, data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
        """Return the bytes of every rank of a process set, ordered by rank. Lengths may differ. `name` is Horovod's."""

        def allgather(array: NDArray[Any], name: str) -> NDArray[Any]:
            return self._mpi_ops.allgather(self._tensor_of(array), name=name, process_set=process_set).numpy()

        sizes = allgather(np.array([len(data)]), f"{name}.sizes")
        everything = allgather(np.frombuffer(bytearray(data), np.uint8), name)
        return [part.tobytes() for part in np.split(everything, np.cumsum(sizes)[:-1])]

    def _serve_metrics(self) -> None:
        """On rank 0, serve metrics if the settings ask for it."""
        config = settings()
        self._end_metrics()
        if not config.metrics_port or self.rank() != 0:
            return
        from horovod_partial.metrics.endpoint import Endpoint  # only rank 0 of few jobs needs an HTTP server
        from horovod_partial.metrics.job import JobMetrics

        job = JobMetrics(
            self.size(),
            self.watched_ranks,
            lambda: {process_set: self.statistics(process_set) for process_set in sorted(self._process_sets)},
        )
        try:
            self._endpoint = Endpoint(config.metrics_host, config.metrics_port, job)
        except (OSError, RuntimeError, ValueError) as error:  # the address is taken or wrong; too many threads
            log.logger.error(
                "rank 0 serves no metrics, because it cannot listen at %s, port %d: %s. Set HOROVOD_PARTIAL_METRICS_PORT to "
                "a free port, and HOROVOD_PARTIAL_METRICS_HOST to an address of rank 0's host",
                *(config.metrics_host, config.metrics_port, error),
            )

    def _end_metrics(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def watched_ranks(self) -> list[dict[str, Any]]:
        """On rank 0, return what is known of each rank whose steps are watched. Empty on other ranks.

        The keys are `steps`; `compute_seconds` of these steps; `bytes` handed over for reduction; `slowness`: the
        rank's compute time divided by that of the median rank, or 1 if the rank is not slow; `kind`: in what way it is
        slow; `part`: the part of its steps that explains it, or none; `loader`, `forward`, `backward`, `optimizer` and
        `other`: the seconds of these parts, where they are known; and on Linux `processors`, `throttled`, `stolen` and
        `pressure` (`docs/slow-ranks.md`, Metrics).
        """
        monitor = self._monitor
        return [] if monitor is None else monitor.ranks()

    def _rest(self) -> None:
        """Tell the monitor of heartbeats that this rank may end from now on, without a failure."""
        if self._monitor is not None:
            self._monitor.rest()

    def _observe_as_set(self) -> None:
        """Start a watch, metrics and a recording if the settings ask for them.

        A failure is only logged, because training can go on.
        """
        config = settings()
        if not self._observed.enter():
            return
        self._serve_metrics()
        if config.watches_steps:
            self._time_steps()
        if not config.record:
            return
        try:
            self.record(config.record, config.record_mb)
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            log.logger.error("this rank is not recorded: %s", error)

    def record(self, directory: str | os.PathLike[str], megabytes: float = 64.0) -> None:
        """Record this rank's steps, waits and rounds from now on. `horovod-partial report` tells which rank is slow.

        `HOROVOD_PARTIAL_RECORD` does the same from `init` on. Call this on every rank, at the same place in the
        program. The recording ends when Horovod shuts down. Nothing is sent; a thread writes the files once a second.

        Args:
            directory: is created if it does not exist. Each run gets its own folder in it.
            megabytes: bound on the size of this rank's files, 1 or more. Beyond it the oldest records are dropped.

        Raises:
            RuntimeError: the files cannot be made, or this rank is being recorded already.
            ValueError: an argument is out of range, or Horovod has not been initialised.
        """
        self.check_initialized()
        require(
            isinstance(directory, str | os.PathLike) and os.fspath(directory) != "", "directory", "a path", directory
        )
        require(is_number(megabytes) and 1 <= megabytes < 1e6, "megabytes", "1 or more, and below 1e6", megabytes)
        self.core.record(os.path.abspath(directory), int(megabytes * 1e6))
        step_parts.begin(self.core)

    def watch(self) -> None:
        """Let rank 0 log when a rank becomes slow, how slow, since which step and in what way, and when this ends.

        `HOROVOD_PARTIAL_WATCH=1` does the same from `init` on. Call this on every rank, at the same place in the
        program. Steps are timed under every policy, `Full()` included. Each rank tells rank 0 its times once a second.
        A rank that has not called this is not compared. The watch ends when Horovod shuts down. `docs/slow-ranks.md` has
        an example.

        Raises:
            ValueError: Horovod has not been initialised.
        """
        self.check_initialized()
        self._time_steps()
        self._warn_of_no_watch()

    def _time_steps(self) -> None:
        self.core.watch(True)
        step_parts.begin(self.core)

    def _warn_of_no_watch(self) -> None:
        if self._monitor is None and self.rank() == 0 and self.size() > 1:
            log.logger.warning(
                "no slow rank will be named, because the ranks give each other no signs of life: HOROVOD_PARTIAL_WATCH, "
                "HOROVOD_PARTIAL_METRICS_PORT and HOROVOD_PARTIAL_STALL_SECONDS are 0, or the program has called Horovod's own "
                "init, or a line above says why"
            )

    def shutdown(self) -> None:
        """Wait until every rank calls this and late contributions are delivered; then call Horovod's `shutdown`.

        This does not wait while an exception is being handled, unless the exception is an exit with status 0. A program
        that never calls this waits and delivers at exit.
        """
        self._rest()
        try:
            self._warn_of_unsettled(self._end_unless_failing())
        finally:
            self.core.end_recording()
        self._end_metrics()
        self._mpi_ops.shutdown()
        self._monitor = None

    def restart(self) -> None:
        """Shut down, even if other ranks have failed, then call `init`. Elastic jobs do this after a failure."""
        self._monitor = None  # this ends the heartbeats: ranks restart at different times, and some never restart
        try:
            self._end_unless_failing()
        except HorovodInternalError as error:
            log.logger.info("late contributions of this rank are lost: %s", error)
        self.core.end_recording()
        self._end_metrics()
        self._mpi_ops.shutdown()
        self.failed = False
        while True:
            try:
                return self.init()
            except HorovodInternalError as error:  # another rank has ended: call `init` again, to go on without it
                log.logger.info("Horovod is initialised once more: %s", error)
                self._mpi_ops.shutdown()

    def join(self, *args: Any, **kwargs: Any) -> int:
        """Deliver this rank's late contributions, apply its missed rounds, call Horovod's `join`, then flush.

        All ranks return from Horovod's `join` together. A rank has no part in the rounds during its join, so after the
        flush it gets the replica of another rank.
        """
        self._settle()
        self._take_over()
        for sharer in self._sharers():
            sharer.work.leave()
        for process_set in list(self._process_sets):  # a copy, because other threads may add process sets
            appliers = self._appliers_of(process_set)
            self.core.deliver(process_set, [applier.family.names for applier in appliers])
            for applier in appliers:
                applier.apply_rounds()
        for applier in self._of_this_thread(self._ahead_appliers):
            applier.declare()
        trained = [(family, family.lost) for each in self.exchanges() if (family := each.family) is not None]
        self._thread.takes_no_rounds = True
        try:
            last = self._mpi_ops.join(*args, **kwargs)
        finally:
            self._thread.takes_no_rounds = False
        self._flush_all(joined={family.names[0] for family, before in trained if family.lost > before})
        return last

    def _end_unless_failing(self) -> set[str]:
        exception = sys.exc_info()[1]
        if exception is not None and failure.is_failure(exception):
            if not isinstance(exception, HostsUpdatedInterrupt):  # after a change of hosts an elastic job goes on
                # The other ranks are about to fail too, and name the reason in their errors.
                self.core.say_farewell(failure.describe(exception))
            return set()
        return set() if self.failed else self._end(applies=True)

    def _end(self, *, applies: bool) -> set[str]:
        """Flush all process sets together with all ranks.

        Returns the buckets in which this rank still has late contributions or missed results. With `applies` False
        missed results are not applied, and buckets that had any before the flush are returned too.
        """
        errors, unsettled = [], set()
        for process_set in sorted(self._process_sets, reverse=True) if self.is_initialized() else ():
            try:
                unsettled |= set() if applies else self.unsettled(process_set)
                self._flush(process_set, self._appliers_of(process_set) if applies else [], ends=True)
                unsettled |= self.unsettled(process_set)
            except HorovodInternalError as error:  # a process set may have been removed: go on with other process sets
                errors.append(error)
        if errors:
            raise errors[0]
        with self._appliers_lock:
            ahead = [each.family.names for each in self._ahead_appliers if each.is_ahead and each.family]
        return unsettled.union(*ahead)

    def _warn_of_unsettled(self, unsettled: set[str]) -> None:
        if unsettled:
            log.logger.warning(
                "this rank ends with late contributions that were pending, or with results that it has missed and not "
                "applied, in %d bucket(s), %s among them. So its model may differ from those of other ranks; nothing has compared "
                "them. Call optimizer.flush() on every rank at the end of training, before a model is saved",
                len(unsettled),
                min(unsettled),
            )

    def _at_exit(self) -> None:
        self._rest()
        try:
            if (why := failure.of_process()) is not None:
                # A failed rank does not flush: Horovod's own exit handler ends all ranks at once.
                self.core.say_farewell(why)
            else:
                self._thread.takes_no_rounds = True
                self._warn_of_unsettled(self._end(applies=False))
        except HorovodInternalError as error:
            log.logger.warning("the job ended before everything pending was delivered: %s", error)
        finally:
            self.core.end_recording()
            self._end_metrics()  # a thread that is in C++ while Python ends would abort the process

    def _end_in_child(self) -> None:
        """In a forked child, free the port, and remove the exit handler, which would wait for Horovod's thread."""
        atexit.unregister(self._at_exit)
        if self._endpoint is not None:
            self._endpoint.close_in_child()
            self._endpoint = None

    def use(self, process_set: int) -> None:
        """Remember a process set, so that shutdown or the exit of the process delivers its late contributions."""
        if self._begin():  # True only if the program has called Horovod's own `init` instead of this class's
            self._observe_as_set()
            if settings().watches_steps:
                self._warn_of_no_watch()
        self._process_sets.add(process_set)

    def _begin(self) -> bool:
        """In the first call after Horovod's `init`, set the log's rank, register the exit handler, and return True."""
        is_new = self._begun.enter()
        if is_new:
            log.set_rank(self.rank())
            self._register_exit()
        return is_new

    def _register_exit(self) -> None:
        # Exit handlers run in reverse order. Ours must run before the one that Horovod's `init` has registered.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def submit(
        self,
        process_set: int,
        name: str,
        config: _attach.BucketConfig,
        source: int,
        target: int,
        work: int,
        stream: int,
    ) -> _attach.Handle:
        """Arrive at a bucket's open round with a contribution. Returns a handle to wait for the result with.

        `source` and `target` are the addresses of the contribution and of the result, each of the bucket's size. `work`
        is the number of steps, or the iteration, that decides a model's weight. `stream` is the CUDA stream that
        computes the contribution, 0 on the host.
        """
        self.use(process_set)
        return self.core.submit(process_set, name, config, source, target, work, stream)

    def declare(self, process_set: int, name: str, config: _attach.BucketConfig) -> None:
        """Declare a bucket before its first arrival."""
        self.use(process_set)
        self.core.declare(process_set, name, config)

    def family(self, process_set: ProcessSet, names: Iterable[str]) -> _attach.Family:
        """Return a handle of the buckets with these names."""
        return _attach.Family(self.core, process_set, list(names))

    def steps_of(self, family: _attach.Family, gradients: Any) -> Any:
        """Convert a number of gradients, counted over all buckets, to a number of steps per rank, on average."""
        return gradients / (len(family.names) * self.size_of(family.process_set))

    def next_micro_batch(self, family: _attach.Family | None, *, begins: bool, waits: bool) -> tuple[int, int] | None:
        """Block until this rank may begin a micro-batch of the open update, or must first apply the last update.

        With `begins` this rank begins the micro-batch at once. Returns the numbers of micro-batch and update, or None
        if this rank must first apply the last update, or if `waits` is False and the call would have to block.
        """
        if family is None:
            raise ValueError("this optimizer shares no work: its process set was removed, or no parameter is trained")
        with self._taking_rounds() as meanwhile:
            while True:
                found = family.next_micro_batch(begins, waits, meanwhile.drainings)
                if found is not None or not waits or family.has_round:
                    return found
                meanwhile.apply()

    def wait(self, handle: _attach.Handle) -> None:
        """Block until the result of an arrival is there. Meanwhile this thread's optimizers may apply missed rounds."""
        if handle.poll():
            handle.wait(())
            return
        with self._taking_rounds() as meanwhile:
            while not handle.wait(meanwhile.drainings):
                meanwhile.apply()

    @contextmanager
    def in_horovods_wait(self, is_over: Callable[[], bool]) -> Iterator[None]:
        """Context whose body waits for a collective of Horovod's. Meanwhile other ranks do not wait for this thread.

        First this thread's optimizers may apply missed rounds, until `is_over` returns True. Then the body runs.
        """
        with self._taking_rounds() as meanwhile:
            told = _attach.ForeignWait()
            try:
                while meanwhile.drainings and not is_over():
                    meanwhile.apply()
                    time.sleep(_POLL_SECONDS)
                yield
            finally:
                del told

    def asks_horovod(self, *, over: bool) -> None:
        """Note that the calling thread has asked whether a collective of Horovod's is over.

        If the collective is not over, this thread's optimizers may apply rounds that they have missed.
        """
        waited = _attach.polled(over)
        if over:
            return
        with self._taking_rounds(waited=waited) as meanwhile:
            meanwhile.apply()

    def _taking_rounds(self, but: Sequence[Applier] = (), waited: float = 0.0) -> closing[Meanwhile]:
        """Context of a wait that began `waited` seconds ago. The thread's optimizers not in `but` may apply rounds."""
        thread = this_thread()
        with self._appliers_lock:
            appliers = [each for each in self._ahead_appliers if each.thread == thread and each not in but]
        if getattr(self._thread, "takes_no_rounds", False):
            appliers.clear()
        return closing(Meanwhile(appliers, waited))

    def device_of_buckets(self) -> int:
        """Return Horovod's number of the device that this rank's buckets lie on; -1 is the host."""
        return max(self.core.device_of_buckets(process_set) for process_set in list(self._process_sets))

    def take_part_in_flushes(self, applier: Applier) -> None:
        """Let flushes by the thread of the applier's last step, or by any thread after its end, apply missed rounds."""
        with self._appliers_lock:
            self._appliers.add(applier)

    def take_rounds_in_waits(self, applier: AheadApplier) -> None:
        """From now on, apply missed rounds to a copy of the model while the thread of the applier's last step waits."""
        with self._appliers_lock:
            self._ahead_appliers.add(applier)

    def settle_in_flushes(self, averager: Averager) -> None:
        """From now on, flushes and joins by the thread of the averager's last step begin with `settle`."""
        with self._appliers_lock:
            self._averagers.add(averager)

    def flush(self, process_set: int, *, compares: bool = True, joined: Container[str] = frozenset()) -> None:
        """Block until every rank flushes, and everything late is delivered and applied.

        With `compares` True ranks compare their replicas afterwards, and heal those that differ. `joined` is the
        argument of `healing.compare`.
        """
        self._flush(process_set, self._appliers_of(process_set), ends=False, compares=compares, joined=joined)
        self._warn_of_others(process_set)

    def meet(self, process_set: ProcessSet) -> healing.Meeting | None:
        """Return the meeting in which ranks compare replicas after a flush; None if they do not compare.

        All ranks must call this before the first step of an optimizer.
        """
        if settings().heal == "0" or self.is_alone(process_set):
            return None
        number = process_set.process_set_id
        with self._meetings_lock:
            if self._has_met.enter():
                self._meetings.clear()
            meeting = self._meetings.get(number)
            if meeting is None:
                meeting = self._meetings[number] = healing.Meeting(self, process_set)
        return meeting

    def add_process_set(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        """Flush every process set in use, then call Horovod's `add_process_set`. All ranks must call this.

        Args:
            process_set: a `hvd.ProcessSet`, or the ranks of a new one.

        Raises:
            ValueError: a process set of these ranks exists already.
        """
        # In Horovod's `add_process_set` a rank waits for all others, and takes part in no round meanwhile. Without a
        # flush, slow ranks might wait in a round for fast ranks, which wait in `add_process_set` for the slow ranks.
        self._flush_all()
        return process_sets.add_process_set(process_set)

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Flush every process set in use, then call Horovod's `remove_process_set`. All ranks must call this.

        Returns:
            Whether the process set existed and was removed. The process set of all ranks is never removed.
        """
        self._flush_all()
        number = process_set.process_set_id
        removed = process_sets.remove_process_set(process_set)
        if removed:
            self._process_sets.discard(number)
            with self._meetings_lock:
                self._meetings.pop(number, None)
        return removed

    def _flush_all(self, joined: Container[str] = frozenset()) -> None:
        for process_set in sorted(self._process_sets, reverse=True) if self.is_initialized() else ():
            self.flush(process_set, joined=joined)

    def _flush(
        self,
        process_set: int,
        appliers: Sequence[Any],
        *,
        ends: bool,
        compares: bool = False,
        joined: Container[str] = frozenset(),
    ) -> None:
        self._settle()
        with self._turn_to_flush(process_set):
            if self._take_over() and not getattr(self._thread, "takes_no_rounds", False):
                appliers = self._appliers_of(process_set)
            sharers = self._sharers()
            for sharer in sharers:
                sharer.work.leave()
            families = [family.names for applier in appliers if (family := applier.family) is not None]
            with self._meetings_lock:
                meeting = self._meetings.get(process_set) if compares and self._has_met.is_current else None
            if meeting is not None:
                meeting.come()
            with self._taking_rounds(appliers) as meanwhile:
                flush = _attach.Flush(self.core, process_set, families, ends)
                try:
                    more = True
                    while more:  # apply rounds: ranks that still train may wait until this rank has done so
                        more = flush.wait(meanwhile.drainings)
                        meanwhile.apply()
                        for applier in appliers:
                            applier.apply_rounds()
                    was_needed = flush.was_needed
                finally:
                    flush.end()
            meets = meeting is not None and was_needed and meeting.has_begun
            returning = [] if ends else sharers
            here = [sharer for sharer in returning if sharer.process_set.process_set_id == process_set]
            # Under WorkSharing a rank begins a micro-batch again after a flush, just before ranks compare their replicas.
            # No rank trains on before all ranks have come to compare. So no update of work sharing leaves a rank out.
            for sharer in here:
                sharer.work.come_back()
            if meeting is not None and meets:
                replicas = [(applier.family, applier.replica) for applier in appliers]
                healing.compare(
                    meeting, [(f, replica) for f, replica in replicas if f is not None and replica is not None], joined
                )
            # Optimizers of other process sets, whose ranks differ, begin micro-batches only now.
            for sharer in set(returning).difference(here):
                sharer.work.come_back()

    @contextmanager
    def _turn_to_flush(self, process_set: int) -> Iterator[None]:
        """Context in which no other thread flushes the process set. Waits until no other thread does."""
        lock = self._flushing.setdefault(process_set, threading.RLock())
        if not lock.acquire(blocking=False):
            with self.in_horovods_wait(lambda: _is_free(lock)):
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def exchanges(self) -> list[Any]:
        """Return the exchanges of this thread that take part in flushes."""
        return self._of_this_thread(self._appliers)

    def _settle(self) -> None:
        if any(applier.is_applying for applier in self.exchanges()):
            raise AssertionError(
                f"rank {self.rank()}: a flush, a join or the end came within a round hook or grad_transform, where an "
                "optimizer applies a round: call it between two steps"
            )
        for averager in self._of_this_thread(self._averagers):
            averager.settle()

    def _sharers(self) -> list[Any]:
        return [applier for applier in self.exchanges() if applier.shares_work]

    def _take_over(self) -> bool:
        """Wait until other threads that train under WorkSharing are idle. Take over their unfinished micro-batches.

        This thread then counts as the thread that took the last step of such an optimizer. So a flush or join by this
        thread lets other ranks compute the micro-batch. Returns whether there was an unfinished micro-batch.
        """
        sharers = [applier for applier in self._of_other_threads() if applier.shares_work and applier.family]
        idle: list[Any] = []
        end = time.monotonic() + _BUSY_SECONDS
        while len(idle) < len(sharers) and time.monotonic() < end:
            idle = _unmoved(sharers, lambda sharer: (sharer.work.rounds, sharer.work.begun))
        left = [sharer for sharer in idle if sharer.work.begun is not None]
        for sharer in left:
            sharer.thread = this_thread()
        return bool(left)

    def _warn_of_others(self, process_set: int) -> None:
        """Warn once of each optimizer of another, idle thread, if a flush has left its missed rounds unapplied."""

        def taken(applier: Applier) -> int | None:
            family = applier.family
            return family.taken if family is not None and family.has_round else None

        others = [each for each in self._of_other_threads() if each.family and each not in self._told]
        unsettled = self.unsettled(process_set) if others else set()  # names differ between process sets
        idle = _unmoved([each for each in others if not unsettled.isdisjoint(each.family.names)], taken)
        self._told.update(idle)
        if idle:
            log.logger.warning(
                "hvd.flush() has not applied the rounds that %d optimizer(s) have missed, with the bucket %s: another thread, "
                "which is idle now, has taken their steps. Their models differ from those of other ranks. Call "
                "optimizer.flush() of each, on every rank",
                *(len(idle), idle[0].family.names[0]),
            )

    def _of_other_threads(self) -> list[Any]:
        with self._appliers_lock:
            return [each for each in self._appliers if each.thread() not in (None, this_thread()())]

    def _of_this_thread(self, exchanges: weakref.WeakSet[Any]) -> list[Any]:
        """Return the exchanges whose last step was taken by this thread, or by a thread that has ended."""
        thread = this_thread()
        with self._appliers_lock:
            return [each for each in exchanges if each.thread == thread or each.thread() is None]

    def _appliers_of(self, process_set: int) -> list[Any]:
        """Return the appliers of a process set whose rounds this thread may apply now."""
        return [
            applier
            for applier in self.exchanges()
            if applier.process_set.process_set_id == process_set and applier.family and not applier.is_under_way
        ]

    def size_of(self, process_set: ProcessSet) -> int:
        """Return the number of ranks in a process set.

        Raises HorovodInternalError if Horovod has shut down, for example because another rank has failed. Raises
        ValueError if there is no such process set, or Horovod has not been initialised.
        """
        try:
            return process_set.size()
        except ValueError:
            if self.is_initialized():
                self.core.require_process_set(process_set.process_set_id)
            raise

    def is_alone(self, process_set: ProcessSet) -> bool:
        """Return whether this rank is alone in a process set. False in an elastic job, because ranks may be added."""
        return self.size_of(process_set) == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"

    def check_initialized(self) -> None:
        """Raise ValueError if Horovod is not initialised."""
        if not self.is_initialized():
            raise ValueError("Horovod has not been initialized; use hvd.init().")

    def statistics(self, process_set: int) -> dict[str, dict[str, Any]]:
        """Return the raw statistics of every bucket of a process set, by name, without internal buckets."""
        everything = self.core.statistics(process_set)
        return {name: of for name, of in everything.items() if not name.startswith(bucket_config.INTERNAL)}

    def unsettled(self, process_set: int) -> set[str]:
        """Return the names of the optimizers' buckets in which this rank has late contributions or missed results.

        Buckets whose optimizer was deleted are included if they had late contributions or missed results then.
        """
        here = {name for name, of in self.core.statistics(process_set).items() if of["unsettled"]}
        found = here | self.core.unsettled_without_owner(process_set)
        return {name for name in found if not name.startswith(bucket_config.INTERNAL)}


def _unmoved(exchanges: Iterable[Any], place: Callable[[Any], Any]) -> list[Any]:
    """Return the exchanges whose progress, the result of `place`, is not None and stays equal for `_IDLE_SECONDS`."""
    stuck = {exchange: place(exchange) for exchange in exchanges}
    end = time.monotonic() + _IDLE_SECONDS
    while True:
        stuck = {each: before for each, before in stuck.items() if before is not None and place(each) == before}
        if not stuck or time.monotonic() > end:
            return list(stuck)
        time.sleep(_POLL_SECONDS)


def _is_free(lock: threading.RLock) -> bool:
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return free
