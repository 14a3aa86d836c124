"""Muon for the matrices of hidden layers, AdamW for the rest, with a schedule and clipping: Keras's own optimizer is both."""

from __future__ import annotations

import sys

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    rate = keras.optimizers.schedules.CosineDecay(0.02, steps)
    muon = keras.optimizers.Muon(rate, exclude_layers=[rf"\b{model.layers[-1].name}/"], global_clipnorm=1.0)
    optimizer = hvd.DistributedOptimizer(muon, sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(*share(steps), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
