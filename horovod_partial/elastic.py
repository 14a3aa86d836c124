"""Elastic jobs: what partial collectives need when ranks come and go, in every framework."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from horovod_partial.runtime import Runtime


def run(func: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Horovod's `elastic.run` of a function, which restarts a framework's Horovod by our own `init` and `shutdown`."""

    @functools.wraps(func)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except HorovodInternalError:
            runtime.failed = True
            raise
        except HostsUpdatedInterrupt:
            # Replicas may differ by what a rank has missed, so the state is broadcast also where ranks only go.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    return run_fn(watched, runtime.restart)
