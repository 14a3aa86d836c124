"""A moving average of the weights: by Keras's own argument, which takes part of every round; `fit` ends with the average."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    # A constraint is kept in every round, too.
    model.layers[0].kernel.constraint = keras.constraints.MaxNorm(2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3, use_ema=True, ema_momentum=0.9), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    # The callback flushes at the end of the last epoch, before Keras takes the average for the weights.
    model.fit(*share(steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
