"""BatchNormalization: its moving statistics are of each rank; `ModelSyncCallback` takes their mean."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    first, last = network().layers
    model = keras.Sequential([keras.Input([64]), first, keras.layers.BatchNormalization(), last])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    # Behind the flush, before what saves or evaluates.
    callbacks = [hvd.callbacks.FlushCallback(), hvd.callbacks.ModelSyncCallback(every_n_epochs=1)]
    model.fit(*share(steps // 2), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
