"""What happened to the rounds, in TensorBoard, while a training runs."""

from __future__ import annotations

from typing import Protocol

from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.checks import require
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.round_stats import Progress
from horovod_partial.torch.operations import check_initialized, runtime


class ScalarWriter(Protocol):
    """What `torch.utils.tensorboard.SummaryWriter` has, among others."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Note a number."""


class PartialStatsWriter:
    """Writes what happened to the rounds since it wrote last: for TensorBoard, as `hvd.PartialStatsCallback` for Keras.

    Tags: `horovod_partial/late`, the share of this rank's arrivals that came too late, 0 to 1; `horovod_partial/fresh`,
    contributors to a round that were on time, mean; `horovod_partial/staleness`, rounds since a rank's contribution before,
    mean; `horovod_partial/waited_seconds`, by this rank, for results. Nothing under `hvd.Full()`, which has no rounds:
    `HOROVOD_PARTIAL_RECORD` has it all.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or what else has its `add_scalar`; of this rank alone.
        process_set: whose buckets; this rank is in it.

    Raises:
        ValueError: an argument is wrong, or Horovod has not been initialised.
    """

    def __init__(self, writer: ScalarWriter, process_set: ProcessSet = global_process_set) -> None:
        require(callable(getattr(writer, "add_scalar", None)), "writer", "a SummaryWriter", writer)
        check_kinds({"process_set": process_set})
        check_initialized()
        self._writer = writer
        number = process_set.process_set_id
        self._progress = Progress(lambda: runtime.statistics(number), process_set.rank())

    def write(self, step: int) -> None:
        """Write what is new, as of this step of the training."""
        for name, value in self._progress.since().items():
            self._writer.add_scalar(f"horovod_partial/{name}", value, step)
