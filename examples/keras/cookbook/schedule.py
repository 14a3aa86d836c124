"""A schedule of Keras's: it ends with the training, however many rounds that has."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - 5, warmup_target=0.01, warmup_steps=5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(rate), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(*share(steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
