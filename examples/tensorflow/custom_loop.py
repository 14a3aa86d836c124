"""A training loop of one's own in TensorFlow with a sync policy: marked are the lines that one process does not need.

horovodrun -np 4 python examples/tensorflow/custom_loop.py
"""

import keras
import numpy as np
import tensorflow as tf

import horovod_partial.tensorflow as hvd  # 1: instead of horovod.tensorflow

hvd.init()  # 2

made = np.random.default_rng(0)
inputs = made.standard_normal((2000, 64), np.float32)
labels = (inputs @ made.standard_normal((64, 10))).argmax(1)  # made data: what a random linear layer says
inputs, labels = inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]  # 3: this rank's share of the data
data = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(len(inputs)).batch(16, drop_remainder=True)

model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, sync=hvd.Majority())  # 4: nobody waits for all
optimizer.build(model.trainable_variables)
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
hvd.broadcast_variables([variable.value for variable in model.weights], root_rank=0)  # 5: the same start on every rank


@tf.function
def train_step(batch: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = entropy(targets, model(batch, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for epoch in range(10):
    for batch, targets in data:
        loss = train_step(batch, targets)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.numpy():.3f}", flush=True)

optimizer.flush()  # 6: before the model is saved or tested, every rank applies what it has missed

if hvd.rank() == 0:
    correct = np.mean(np.argmax(model(inputs), axis=1) == labels)
    print(f"{correct:.1%} of rank 0's samples are classified right; {optimizer.rounds} rounds", flush=True)
hvd.shutdown()
