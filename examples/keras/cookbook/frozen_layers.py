"""Layers that are frozen at first: compile anew for each phase, with an optimizer that is wrapped for what is trained in it."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    for phase in ("the head", "everything"):
        model.layers[0].trainable = phase == "everything"
        optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
        # It ends with a flush: nothing of a phase reaches the next.
        model.fit(*share(steps // 2), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
