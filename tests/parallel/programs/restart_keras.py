"""A function that was traced in one generation runs in the next one, where the last rank begins as a new process would."""

import time

import tensorflow as tf
from common import RANK, note

import horovod_partial.keras as hvd


def trained():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), sync="majority")
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(value):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.fill((1, 3), value)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return model, optimizer, step


hvd.init()
model, optimizer, step = trained()
for generation in range(2):
    if generation == 1:
        hvd.init()
        if hvd.rank() == hvd.size() - 1:
            model, optimizer, step = trained()
        hvd.broadcast_variables([*model.trainable_variables, *optimizer.all_variables], root_rank=0)
    for number in range(6):
        if RANK == 0:
            time.sleep(0.02)
        step(tf.constant(float(RANK + number)))
    optimizer.flush()
    note(f"weights{generation}", repr(model.get_weights()[0].tolist()))
    note(f"rounds{generation}", str(optimizer.rounds > 0))
    step(tf.constant(1.0))  # may tell that ranks began with different models
    hvd.shutdown()
