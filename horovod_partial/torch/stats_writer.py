"""Writes statistics of rounds and of slow ranks to TensorBoard during training."""

from __future__ import annotations

from typing import Protocol

from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.checks import require
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.runtime.round_stats import Progress, slowness_now
from horovod_partial.torch.operations import runtime


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that `PartialStatsWriter` uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Write a number under a tag, for a step."""


class PartialStatsWriter:
    """Writes to TensorBoard what has happened to the rounds, and how many ranks are slow.

    With Keras, use `hvd.callbacks.PartialStatsCallback` and `hvd.callbacks.SlowRanksCallback` instead.

    The tags are `horovod_partial/late`: the share of this rank's arrivals that came too late, 0 to 1;
    `horovod_partial/fresh`: the mean number of ranks that were on time for a round; `horovod_partial/staleness`: the mean
    staleness of contributions, in rounds; `horovod_partial/waited_seconds`: how long this rank waited for results.
    An optimizer under `hvd.Full()` has no rounds, so it adds nothing to these tags. If ranks are watched (`hvd.watch`),
    rank 0 also writes `horovod_partial/slow_ranks`: the number of slow ranks; and `horovod_partial/slowness`: that of
    the slowest of these ranks (`docs/slow-ranks.md`), or 1 if no rank is slow.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter` of this rank, or any object with the same `add_scalar`.
        process_set: the process set of the buckets; this rank must be in it.

    Raises:
        ValueError: an argument is wrong, or Horovod has not been initialised.
    """

    def __init__(self, writer: ScalarWriter, process_set: ProcessSet = global_process_set) -> None:
        require(callable(getattr(writer, "add_scalar", None)), "writer", "a SummaryWriter", writer)
        check_kinds({"process_set": process_set})
        runtime.check_initialized()
        self._writer = writer
        number = process_set.process_set_id
        self._progress = Progress(lambda: runtime.statistics(number), process_set.rank())

    def write(self, step: int) -> None:
        """Write what has happened since the last call, under the step's number `step`."""
        for name, value in (self._progress.since() | slowness_now(runtime.watched_ranks())).items():
            self._writer.add_scalar(f"horovod_partial/{name}", value, step)
