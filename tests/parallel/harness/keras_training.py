"""Models, steps and optimizers for tests of Keras, on each of its backends."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import horovod_partial.keras as hvd
from harness.trainers import EVERYBODY, joined
from harness.world import World, delay
from horovod_partial.keras.backend import backend
from horovod_partial.keras.optimizer import DistributedOptimizer
from horovod_partial.policies import GroupAverage, PartialReduce, WeightedAverage

if keras.backend.backend() == "tensorflow":
    import tensorflow

MODELS = {"group": GroupAverage(2), "ready": PartialReduce(2), "weighted": WeightedAverage(2, 0.9)}

on_time = pytest.mark.parametrize("policy", ["full", EVERYBODY])

SAMPLES = 6  # of a batch


class Slow(keras.callbacks.Callback):
    """Rank 1 is slower than the others."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01 if hvd.rank() == 1 else 0.002)


def sync_of(policy: str) -> Any:
    return MODELS.get(policy, policy)


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh", **options), keras.layers.Dense(2)])


def concatenated(batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    xs, ys = zip(*batches, strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in model.get_weights()]


def flat(model: keras.Model) -> list[float]:
    return np.concatenate([weight.reshape(-1) for weight in weights(model)]).tolist()


def state(optimizer: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in optimizer.variables]


def close(some: Sequence[np.ndarray], others: Sequence[np.ndarray], tolerance: float = 1e-5) -> bool:
    return all(np.allclose(one, other, atol=tolerance) for one, other in zip(some, others, strict=True))


def called(function: Callable[..., Any], graph: bool) -> Callable[..., Any]:
    """As it is, or as a graph of TensorFlow."""
    return tensorflow.function(function, autograph=False) if graph else function


def stepper(model: keras.Model, optimizer: Any, graph: bool = False, scale: float = 1.0) -> Callable[..., None]:
    """One step of a loop of one's own, with a batch. Graphs are TensorFlow's."""

    def loss_of(x: Any, y: Any) -> Any:
        return optimizer.scale_loss(scale * keras.ops.mean((model(x, training=True) - y) ** 2))

    def step_tensorflow(x: Any, y: Any) -> None:
        with tensorflow.GradientTape() as tape:
            loss = loss_of(x, y)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    def step_torch(x: np.ndarray, y: np.ndarray) -> None:
        model.zero_grad()
        loss_of(x, keras.ops.convert_to_tensor(y)).backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    if keras.backend.backend() == "torch":
        return step_torch
    if graph and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return called(step_tensorflow, graph)


def reference(
    world: World, make: Callable[[], Any], steps: int, scale: float = 1.0, passes: int = 1, **options: Any
) -> tuple[keras.Model, Any]:
    """A model and its optimizer after training it on all ranks' batches, without Horovod."""
    model, optimizer = make_model(**options), make()
    step = stepper(model, optimizer, scale=scale)
    for number in range(steps):
        step(*joined(world, *range(passes * number, passes * (number + 1))))
    return model, optimizer


def as_one(world: World, model: keras.Model, make: Callable[[], Any], steps: int, **options: Any) -> bool:
    """Whether a model has become what one process makes of all ranks' batches."""
    return close(weights(model), weights(reference(world, make, steps, **options)[0]))


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


MAKERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.003),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), {".*bias": keras.optimizers.SGD(0.1)})
    ),
}
MAKERS_OF_MAKERS = ("LossScaleOptimizer", "MultiOptimizer")  # which hold other optimizers


def linear(sync: Any, graph: bool, **options: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    """A weight whose gradient is what the step is given, so that after a flush it has gone the sum of all gradients."""
    weight = keras.Variable(np.zeros(3, np.float32))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), sync=sync, **options)
    optimizer.build([weight])
    step = lambda gradient: optimizer.apply([gradient], [weight])
    return weight, optimizer, called(step, graph)


def run_linear(world: World, optimizer: Any, step: Callable[[Any], None], steps: int) -> np.ndarray:
    """Take steps with delays, then flush; returns the sum of the averages of all gradients."""
    rng = random.Random(world.random().random() + world.rank)
    own = np.random.default_rng(rng.randrange(2**32)).normal(size=(steps, 3)).astype(np.float32)
    for gradient in own:
        delay(rng)
        step(keras.ops.convert_to_tensor(gradient))
    optimizer.flush()
    return np.mean(world.gather(own.sum(0)), 0)


def ended(optimizer: Any) -> int:
    """How many rounds have ended on this rank, whether it has taken them or not."""
    raw = backend.runtime.statistics(0)
    return min(raw[name]["completed"] for name in optimizer._horovod._made.bucket_names)


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")
