"""Mixed precision: wrap the loss scaling. A round that overflows is skipped by every rank, and the scale follows rounds."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.config.set_dtype_policy("mixed_float16")  # before the model is made and the optimizer is wrapped
    model = network()
    # Without arguments of your own wrap AdamW itself: under this policy the wrapper makes the LossScaleOptimizer.
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), dynamic_growth_steps=5)
    optimizer = hvd.DistributedOptimizer(scaled, sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(*share(steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
