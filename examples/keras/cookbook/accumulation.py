"""Accumulation: by Keras's own argument; the gradients of several batches travel as one contribution."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd

PASSES = 3


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    bare = keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=PASSES)
    optimizer = hvd.DistributedOptimizer(bare, sync=sync, average_aggregated_gradients=True)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(*share(PASSES * steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
