"""As `elastic.py`, by `model.fit`: `elastic_keras.py POLICY FINAL_SIZE`. The rank that kills itself does so between batches."""

import sys
from collections.abc import Iterator

import keras
import numpy as np
from common import count_step, die_if_told, note

import horovod_partial.keras as hvd

policy, final_size = sys.argv[1], int(sys.argv[2])
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(300, activation="tanh"), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001), sync=policy)
model.compile(optimizer, "mse", jit_compile=False)
state = hvd.elastic.KerasState(model, steps=0, steps_at_final_size=0, epoch=0)


class Counts(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps, ends the training, and commits."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        die_if_told(state.steps)
        count_step(state, hvd.size() == final_size)
        if state.steps % 5 == 0:
            optimizer.flush()


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield np.random.default_rng().normal(size=(8, 4)).astype("float32"), np.zeros((8, 1), "float32")


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    callbacks = [
        Counts(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
    ]
    while state.steps_at_final_size < 20:
        model.fit(batches(), steps_per_epoch=10, epochs=1, callbacks=callbacks, verbose=0)


train(state)
optimizer.flush()
weights = hvd.allgather(np.concatenate([weight.reshape(1, -1) for weight in model.get_weights()], 1), name="weights")
distance = np.abs(weights.numpy() - weights.numpy()[0]).max()
note("ended", f"{hvd.size()} {distance < 1e-5} {state.steps > 20 and state.epoch >= 2}")
