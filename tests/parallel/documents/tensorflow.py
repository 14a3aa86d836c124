"""The program around a block in TensorFlow: a model, data, and a tape that has recorded something."""

import keras
import tensorflow as tf

import horovod_partial.tensorflow as hvd

hvd.init()
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
loss_of = keras.losses.MeanSquaredError()
data = [(tf.ones([2, 4]), tf.zeros([2, 1]))] * 3
tensor = a = b = tf.ones([3])
with tf.GradientTape() as tape:
    loss = loss_of(tf.zeros([2, 1]), model(tf.ones([2, 4])))
