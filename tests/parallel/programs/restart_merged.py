"""`shutdown`, then `init`: merged gradients are measured anew, in eager code and in a graph that is traced again."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from common import RANK, note

import horovod_partial.tensorflow as hvd

hvd.init()
variables = [keras.Variable(np.zeros(3), dtype="float64") for _ in range(4)]
optimizers = [
    hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        sync="majority",
        op=hvd.Sum,
        merging=hvd.MergedGradients(rule="wait_free", warmup_steps=2, replan_every=None),
    )
    for _ in range(2)
]


def step(optimizer: object) -> None:
    optimizer.apply([tf.fill([3], tf.constant(10.0**RANK, tf.float64))] * 4, variables)


plans = []
for generation in range(2):
    if generation == 1:
        hvd.init()
    steps = [lambda: step(optimizers[0]), tf.function(lambda: step(optimizers[1]), autograph=False)]
    for run, optimizer in zip(steps, optimizers, strict=True):
        optimizer.build(variables)
        for _ in range(5):
            run()
            plans.append(optimizer.merging_plan is not None)
        optimizer.flush()
    hvd.shutdown()
note("results", repr((plans, variables[0].numpy().tolist())))
