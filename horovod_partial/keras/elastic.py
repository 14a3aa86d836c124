"""Elastic jobs with Keras 3: the state, the callbacks and `run` of `horovod.keras.elastic`."""

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
    """Commit `state` (a `KerasState`) after every `batches_per_commit` batches (1 or more), and after each epoch.

    Batches are counted from the start of `fit`, so all ranks commit together. Put this callback last.
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
    """Keep the number of the last finished batch of the epoch in `state.batch`. `state` is a `KerasState`.

    Unlike Horovod's callback, this one does not shorten the epoch after a restart, because Keras 3 counts the steps of
    an epoch itself.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Keep the number of finished epochs in `state.epoch`, including those before a restart. `state` is a `KerasState`.

    Call `fit(epochs=total - state.epoch)`, same as with Horovod, because Keras counts epochs from 0 after a restart.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._before + epoch + 1
