"""Two optimizers in a loop of your own: each has its own rounds, and gradients travel in `apply`."""

from __future__ import annotations

import sys

import keras
import numpy as np
from data import batches, gradients_of

import horovod_partial.keras as hvd


def train(sync: str = "majority", steps: int = 20) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input([8]), keras.layers.Dense(32, "relu"), keras.layers.Dense(64)])
    critic = keras.Sequential([keras.Input([64]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    makes, judges = (hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), sync=sync) for _ in range(2))
    bce = keras.losses.BinaryCrossentropy(from_logits=True)
    noise = np.random.default_rng(hvd.rank())
    for images, _ in batches(steps):
        seeds = noise.normal(size=(len(images), 8)).astype("float32")
        yes, no = np.ones([len(images), 1]), np.zeros([len(images), 1])

        made = keras.ops.stop_gradient(generator(seeds))
        judging = gradients_of(lambda: bce(yes, critic(images)) + bce(no, critic(made)), critic.trainable_variables)  # noqa: B023
        judges.apply(judging, critic.trainable_variables)

        making = gradients_of(lambda: bce(yes, critic(generator(seeds))), generator.trainable_variables)  # noqa: B023
        makes.apply(making, generator.trainable_variables)
    makes.flush()
    judges.flush()
    hvd.assert_replicas_equal(critic, judges)
    return generator, makes


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
