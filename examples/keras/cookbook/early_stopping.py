"""Early stopping by the word of rank 0: all ranks take its metrics after the same flush, so they stop at the same epoch."""

from __future__ import annotations

import sys
from typing import Any

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's, with the metrics of rank 0. (For the mean put `hvd.callbacks.MetricAverageCallback` before Keras's own.)"""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, hvd.broadcast_object(logs, root_rank=0))


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    # The best weights are those behind a flush, which are the same on every rank.
    callbacks = [hvd.callbacks.FlushCallback(), EarlyStopping("loss", min_delta=0.1, restore_best_weights=True)]
    model.fit(*share(steps // 4), batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks)
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
