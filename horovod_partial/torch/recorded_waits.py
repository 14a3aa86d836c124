"""How long a program waits for Horovod's own operations, for recordings."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from horovod.torch import mpi_ops

from horovod_partial.runtime import Runtime

_LEAST_NS = 50_000  # an operation that is over takes less


@functools.cache
def install(runtime: Runtime) -> None:
    """From now on each wait is recorded. All of Horovod's ways to wait call one function; a second call does nothing."""
    mpi_ops.mpi_lib.horovod_torch_wait_and_clear = _recorded(mpi_ops.mpi_lib.horovod_torch_wait_and_clear, runtime)


def _recorded(wait: Callable[[int], None], runtime: Runtime) -> Callable[[int], None]:
    def wait_and_clear(handle: int) -> None:
        begin = time.monotonic_ns()
        try:
            wait(handle)
        finally:
            end = time.monotonic_ns()
            if end - begin > _LEAST_NS:
                runtime.record_wait(begin, end)

    return wait_and_clear
