"""Save and resume: rank 0 saves behind the flush, and `hvd.load_model` wraps the optimizer again, whose state is kept."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import keras
from data import BATCH, network, share

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    path = hvd.broadcast_object(str(Path(tempfile.mkdtemp()) / "model.keras"), root_rank=0)
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    callbacks = [hvd.callbacks.FlushCallback()]  # on every rank, and first
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(path))
    model.fit(*share(steps // 2), batch_size=BATCH, verbose=0, callbacks=callbacks)
    hvd.broadcast_object("saved", root_rank=0)

    model = hvd.load_model(path, sync=sync)  # which is not in the file
    model.fit(*share(steps // 2), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.FlushCallback()])
    return model, model.optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
