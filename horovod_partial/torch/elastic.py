"""All of `horovod.torch.elastic`; `run` also takes care of partial collectives when ranks come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic.state import SamplerStateHandler, get_handler_registry

from horovod_partial.exchange import elastic
from horovod_partial.torch.dynamic_sharding import DynamicShardingSampler
from horovod_partial.torch.operations import runtime

__all__ = ["ElasticSampler", "TorchState", "run"]
__path__: list[str] = []  # a package, as Horovod's is; `modules` finds what is in it

get_handler_registry().append((DynamicShardingSampler, SamplerStateHandler))  # so a `TorchState` saves its place


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.torch.elastic.run`.

    Where ranks are added or removed, what is pending is delivered first; call the optimizer's `flush` before
    `state.commit()` to have it in the state too. (Under `hvd.WorkSharing()` commit in a round hook, without a flush.) Where a
    rank has failed, what was pending is lost, as is all that
    happened after the last commit.
    """

    return elastic.run(func, runtime)
