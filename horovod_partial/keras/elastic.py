"""Elastic jobs: `horovod.keras.elastic`, for Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from horovod_partial.checks import require_count
from horovod_partial.keras.backend import backend

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

KerasState = TensorFlowKerasState = backend.KerasState
run = backend.run


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state every so many batches, and after each epoch. Put it last.

    Args:
        state: a `KerasState`.
        batches_per_commit: counted from where training begins, so that all ranks commit together.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        require_count("batches_per_commit", batches_per_commit, 1)
        self._batches_per_commit = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % self._batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keeps the number of the batches of this epoch that are done in `state.batch`.

    Keras 3 counts the steps of an epoch itself, so unlike Horovod's this does not shorten the epoch after a restart.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Keeps the number of the epochs that are done in `state.epoch`, those before a restart included.

    Start with `fit(epochs=total - state.epoch)`, as with Horovod: epochs are counted from 0 after a restart.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._before + epoch + 1
