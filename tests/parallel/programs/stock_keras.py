"""A program for Horovod and Keras: `stock_keras.py MODULE`, where that is one of Horovod's two for Keras."""

from __future__ import annotations

import importlib
import sys

import keras
import numpy
from common import note

hvd = importlib.import_module(sys.argv[1])
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
inputs = numpy.ones((32, 4), "float32")
model.fit(inputs, inputs[:, :1], batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
note(
    "trained",
    f"{hvd.DistributedOptimizer.__module__} {hvd.init.__module__} {hvd.callbacks.MetricAverageCallback.__module__}",
)
