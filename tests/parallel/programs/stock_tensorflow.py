"""A program for Horovod and TensorFlow, with a tape."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf
from common import note
from horovod.tensorflow import DistributedGradientTape

hvd.init()
weights = tf.Variable([[1.0], [2.0]])
hvd.broadcast_variables([weights], root_rank=0)


@tf.function
def step() -> None:
    with tf.GradientTape() as plain:
        loss = tf.reduce_mean(tf.matmul(tf.ones([1, 2]), weights) ** 2)
    tape = DistributedGradientTape(plain)
    weights.assign_sub(0.01 * tape.gradient(loss, [weights])[0])


for _ in range(10):
    step()
note("trained", f"{DistributedGradientTape.__module__} {hvd.init.__module__} {hvd.allreduce.__module__}")
