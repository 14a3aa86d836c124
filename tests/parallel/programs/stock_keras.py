"""A program for Horovod and Keras: `stock_keras.py MODULE [no-callbacks]`. MODULE is one of Horovod's two for Keras."""

import importlib
import sys

import keras
from common import note
from stock_data import BATCH, share_of

hvd = importlib.import_module(sys.argv[1])
hvd.init()
inputs, targets = share_of(hvd.rank(), hvd.size())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if "no-callbacks" in sys.argv:
    callbacks.clear()
model.fit(
    inputs.reshape(-1, 4), targets.reshape(-1, 1), batch_size=BATCH, shuffle=False, callbacks=callbacks, verbose=0
)
note(
    "trained",
    f"{hvd.DistributedOptimizer.__module__} {hvd.init.__module__} {hvd.callbacks.MetricAverageCallback.__module__}",
)
note("weights", str([value.tolist() for value in model.get_weights()]))
