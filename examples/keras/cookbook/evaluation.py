"""Evaluation on rank 0 between epochs: in a callback behind the flush. (`validation_data` is evaluated before it.)"""

from __future__ import annotations

import sys
from typing import Any

import keras
from data import BATCH, digits, network, share

import horovod_partial.keras as hvd


class Evaluation(keras.callbacks.Callback):
    """Prints the accuracy; the others train on meanwhile."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        images, labels = digits()
        predicted = keras.ops.convert_to_numpy(self.model(images, training=False)).argmax(1)
        print(f"accuracy {(predicted == labels).mean():.1%}")


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3), sync=sync)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    callbacks = [hvd.callbacks.FlushCallback()]  # on every rank: now all have the model that is evaluated
    if hvd.rank() == 0:
        callbacks.append(Evaluation())
    model.fit(*share(steps // 2), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    return model, optimizer


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
