"""Steps without compute in TensorFlow: ours are those of `model.fit` on Keras 3, Horovod's a tape on `tf.Variable`s.

Horovod's own Keras optimizer reduces nothing on Keras 3. All update with Keras's SGD. Gradients must depend on the
variables: Horovod's operation is none that TensorFlow has to run, and of a constant it would be computed once and for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow
import keras
import tensorflow as tf

import horovod_partial.keras as hvd
from harness.shapes import Shape

Step = Callable[[], object]
POLICIES: dict[str, Callable[[], object]] = {
    "full": hvd.Full,
    "quorum of all": lambda: hvd.Quorum(1.0),
    "majority": hvd.Majority,
    "solo": hvd.Solo,
}
LEARNING_RATE = 1e-3


def make_steps(prefix: str, shapes: list[Shape]) -> dict[str, Step]:
    """A step of each optimizer, with parameters of its own."""
    steps = {name: _make_tape_step(f"{prefix}.{name}", shapes) for name in ("horovod", "horovod_again")}
    return steps | {name: _make_fit_step(name, shapes) for name in POLICIES}


def _make_tape_step(prefix: str, shapes: list[Shape]) -> Step:
    variables = [tf.Variable(tf.zeros(shape), name=f"{prefix}.{index}") for index, shape in enumerate(shapes)]
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(variables)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = _loss(variables)
        gradients = horovod.tensorflow.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply(gradients, variables)
        return loss  # or TensorFlow would not compute it, as `model.fit` does

    return step


def _loss(variables: list[Any]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])


class Squares(keras.Model):  # type: ignore[misc]
    """The sum of its weights' squares, whatever comes in."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self._shapes = shapes

    def build(self, input_shape: object) -> None:
        self._parts = [self.add_weight(shape=shape, initializer="zeros") for shape in self._shapes]
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return _loss(self._parts) + inputs


def _make_fit_step(policy: str, shapes: list[Shape]) -> Step:
    model = Squares(shapes)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(LEARNING_RATE), sync=POLICIES[policy]())
    model.compile(optimizer=optimizer, loss=lambda _, result: result, jit_compile=False)
    model.build((1, 1))
    model.make_train_function()
    batches = itertools.repeat((tf.zeros([1, 1]), tf.zeros([1, 1])))

    def step() -> None:
        model.train_function(batches)

    return step


def barrier() -> None:
    """Wait until every rank is here."""
    horovod.tensorflow.allreduce(tf.zeros([1]), name="barrier")


def finish() -> None:
    """What has been asked for is done: the operations here end with their results."""


def bucket_stats() -> dict[str, Any]:
    """`hvd.partial_stats()`."""
    return hvd.partial_stats()


def anyone(flag: bool) -> bool:
    """Whether a rank says so; the same on all ranks."""
    return any(hvd.allgather_object(flag))


def mean_over_ranks(values: list[list[float]], name: str) -> list[list[float]]:
    """The mean of everybody's numbers."""
    return hvd.allreduce(tf.constant(values, tf.float64), name=name).numpy().tolist()
