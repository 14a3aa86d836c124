"""A training in Keras whose steps have four micro-batches."""

import keras
import numpy as np

import horovod_partial.keras as hvd

hvd.init()
x, y = np.ones([1000, 4], "float32"), np.zeros([1000, 1], "float32")
x_test, y_test = x[:32], y[:32]
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
epochs, callbacks = 2, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def afterwards():
    optimizer.flush()  # noqa: F821 - of the block
    hvd.assert_replicas_equal(model)
