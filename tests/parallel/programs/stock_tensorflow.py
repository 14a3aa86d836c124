"""A program for Horovod and TensorFlow, with a tape over a model of Keras."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from common import note
from horovod.tensorflow import DistributedGradientTape
from stock_data import share_of

hvd.init()
inputs, targets = share_of(hvd.rank(), hvd.size())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
optimizer = keras.optimizers.SGD(0.1)


@tf.function
def step(batch: tf.Tensor, wanted: tf.Tensor) -> None:
    with tf.GradientTape() as plain:
        loss = tf.reduce_mean((model(batch, training=True) - wanted) ** 2)
    tape = DistributedGradientTape(plain)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for number in range(len(inputs)):
    step(inputs[number], targets[number])
    if number == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
note("trained", f"{DistributedGradientTape.__module__} {hvd.init.__module__} {hvd.allreduce.__module__}")
note("weights", str([value.tolist() for value in model.get_weights()]))
