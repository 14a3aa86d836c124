"""Clipping: by Keras's own arguments, which clip the gradients of every round, also of those that this rank has missed."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    bare = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)  # or clipnorm=, or clipvalue=
    optimizer = hvd.DistributedOptimizer(bare, sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(*share(steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
