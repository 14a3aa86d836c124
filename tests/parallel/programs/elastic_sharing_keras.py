"""Trains two epochs in an elastic job under `hvd.WorkSharing()` by `model.fit`, and commits after each.

A sample's gradient is 1 in the weight of its number, so the weights tell how often each sample is in an update. The rank on
the host 127.0.0.1, as the job calls it, kills itself in the second epoch.
"""

import os
import signal
import time
from typing import Any

import keras
import numpy as np
from common import note

import horovod_partial.keras as hvd
from horovod_partial.keras.dynamic_sharding import DynamicShardingDataset

PASSES, BATCH_SIZE, SAMPLES, EPOCHS = 2, 2, 96, 2

hvd.init()
model = keras.Sequential([keras.Input((SAMPLES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer: Any = hvd.DistributedOptimizer(
    keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=PASSES, sync="work_sharing"
)
model.compile(optimizer, lambda of, made: -made * BATCH_SIZE, jit_compile=False)
dataset = DynamicShardingDataset(
    np.eye(SAMPLES, dtype="float32"), np.zeros((SAMPLES, 1), "float32"), optimizer=optimizer, batch_size=BATCH_SIZE
)
state: Any = hvd.elastic.KerasState(model, epoch=0)


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits, and dies."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        time.sleep(0.1 + 0.05 * hvd.rank())
        if state.epoch == 1 and batch == 3:
            note("running")
            if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        state.epoch = epoch + 1
        state.commit()


@hvd.elastic.run
def train(state: Any) -> None:
    dataset.epoch = state.epoch
    model.fit(dataset, initial_epoch=state.epoch, epochs=EPOCHS, callbacks=[Epochs()], verbose=0)


train(state)
optimizer.flush()
(counts,) = model.get_weights()
note("ended", f"{hvd.size()} {np.unique(counts).tolist()}")
