"""Replaces two functions of Horovod: one waits for its own operations, the other asks whether an operation is over."""

from __future__ import annotations

import time

from horovod.torch import mpi_ops

from horovod_partial.runtime.runtime import Runtime

_LEAST_NS = 50_000  # shorter waits for Horovod's operations are not recorded: the operation was nearly over


def install(runtime: Runtime) -> None:
    """Replace Horovod's functions for waiting and polling.

    The new functions tell the core which threads wait for Horovod, and let the waiting thread's optimizers apply missed
    rounds. If this rank is recorded or watched, they also note how long each wait took.
    """
    library = mpi_ops.mpi_lib
    wait, poll = library.horovod_torch_wait_and_clear, library.horovod_torch_poll

    def wait_and_clear(handle: int) -> None:
        if poll(handle):
            wait(handle)
            return
        begin = time.monotonic_ns()
        try:
            with runtime.in_horovods_wait(lambda: bool(poll(handle))):
                wait(handle)
        finally:
            end = time.monotonic_ns()
            if runtime.notes_waits and end - begin > _LEAST_NS:
                runtime.core.record_wait(begin, end)  # times of time.monotonic_ns

    def is_over(handle: int) -> int:
        over: int = poll(handle)
        runtime.asks_horovod(over=bool(over))
        return over

    library.horovod_torch_wait_and_clear, library.horovod_torch_poll = wait_and_clear, is_over
