"""As `train.py`, by `model.fit`: `train_keras.py POLICY WHAT`."""

import itertools
import sys
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from common import RANK, end, is_over, note

import horovod_partial.keras as hvd
from horovod_partial.tensorflow import partial_allreduce

policy, what = sys.argv[1:]
hvd.init()


def fail(x: np.ndarray) -> np.ndarray:
    if what == "backward" and RANK == 1 and int(model.optimizer.iterations) == 20:
        raise RuntimeError("planned failure in backward")
    return x


class Failing(keras.layers.Layer):  # type: ignore[misc]
    """Fails within the graph."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), x.shape)


class UntilItIsOver(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if is_over(what, batch, hvd.shutdown):
            self.model.stop_training = True


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for _ in itertools.takewhile(lambda _: not model.stop_training, itertools.count()):
        yield np.random.default_rng().normal(size=(4, 8)).astype("float32"), np.zeros((4, 1), "float32")


model = keras.Sequential(
    [keras.Input((8,)), Failing(), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), sync=policy), "mse", jit_compile=False)
try:
    model.fit(batches(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), UntilItIsOver()], verbose=0)
except (hvd.HorovodInternalError, tf.errors.UnknownError) as error:
    note("internal-error", str(error))
    raise
if what == "flushed":
    model.optimizer.flush()
end(what, hvd.shutdown, lambda: partial_allreduce(tf.ones(1), name="after", sync="solo"))
