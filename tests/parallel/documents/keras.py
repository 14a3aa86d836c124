"""The program around a block in Keras: a model that is compiled, and data."""

import keras
import tensorflow as tf

import horovod_partial.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=hvd.Majority()), "mse", jit_compile=False)
data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 4]), tf.zeros([8, 1]))).batch(2)
epochs = 2
