"""All of `horovod.torch.elastic`, with a `run` that supports partial collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic.state import SamplerStateHandler, get_handler_registry

from horovod_partial.exchange import elastic
from horovod_partial.torch.balancing import BalancedBatchSampler
from horovod_partial.torch.dynamic_sharding import DynamicShardingSampler
from horovod_partial.torch.operations import runtime

__all__ = ["ElasticSampler", "TorchState", "run"]
__path__: list[str] = []  # makes this module a package, as `horovod.torch.elastic` is one

# With this handler, a `TorchState` saves the place of these samplers in the data.
get_handler_registry().append(((BalancedBatchSampler, DynamicShardingSampler), SamplerStateHandler))


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of an elastic training, same as `horovod.torch.elastic.run`.

    If ranks are added or removed, late gradients are delivered before Horovod restarts. To have them in the state too,
    call the optimizer's `flush` before `state.commit()`. Under `hvd.WorkSharing()` do not flush: commit in a hook given
    to `optimizer.register_round_hook`. If a rank fails, late gradients and all work since the last commit are lost.
    """

    return elastic.run(func, runtime)
