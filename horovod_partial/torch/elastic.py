"""All of `horovod.torch.elastic`; `run` also takes care of partial collectives when ranks come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, TorchState

from horovod_partial.torch.operations import runtime

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.torch.elastic.run`.

    Where ranks are added or removed, what is pending is delivered first; call the optimizer's `flush` before
    `state.commit()` to have it in the state too. Where a rank has failed, what was pending is lost, as is all that
    happened after the last commit.
    """

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
