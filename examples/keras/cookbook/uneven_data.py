"""Unequal numbers of batches: who has no more waits in the flush of `FlushCallback`, and applies what the others still do."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    # Full needs as many steps on every rank.
    mine = steps // 2 if sync == "full" else max(1, steps // 2 - 2 * hvd.rank())
    # Steps may differ, epochs may not: all ranks wait for each other at the end of each.
    model.fit(*share(mine), batch_size=BATCH, epochs=2, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
