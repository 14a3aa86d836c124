"""A program for Horovod and legacy Keras (`TF_USE_LEGACY_KERAS=1`). Keras 3 without `keras.ops` stands in for that."""

import tensorflow as tf
from common import note

del tf.keras.ops
import horovod.tensorflow
import horovod.tensorflow.keras as hvd

hvd.init()
optimizer = horovod.tensorflow.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
made = optimizer, hvd.DistributedOptimizer, hvd.callbacks.MetricAverageCallback, hvd.init
note("made", " ".join(each.__module__ for each in made))
