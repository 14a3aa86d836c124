"""The program around a loop of Keras on PyTorch."""

import keras
import torch

import horovod_partial.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=hvd.Majority())
loss_of = keras.losses.MeanSquaredError()
batch, targets = torch.ones(2, 4), torch.zeros(2, 1)
