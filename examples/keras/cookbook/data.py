"""What all recipes train on, and with: this rank's share of scikit-learn's digits, and a small network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod_partial.keras as hvd

BATCH = 16

Arrays = tuple[np.ndarray, np.ndarray]


def digits() -> Arrays:
    """All images and labels."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels


def share(batches: int) -> Arrays:
    """So many batches of this rank's share, in an order of its own: for `model.fit`."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in digits())
    chosen = np.random.default_rng(hvd.rank()).integers(len(images), size=batches * BATCH)
    return images[chosen], labels[chosen]


def batches(number: int) -> Iterator[Arrays]:
    """The same one by one: for loops."""
    images, labels = share(number)
    for begin in range(0, len(images), BATCH):
        yield images[begin : begin + BATCH], labels[begin : begin + BATCH]


def network() -> keras.Sequential:
    """A small one, the same on every rank."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax", dtype="float32")]
    return keras.Sequential([keras.Input([64]), *layers])


def gradients_of(loss: Callable[[], Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """The gradients of a loss on either backend; a loop of your own has the lines of one of them."""
    values = [variable.value for variable in variables]
    if keras.backend.backend() == "torch":
        import torch

        return list(torch.autograd.grad(loss(), values))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        result = loss()
    return tape.gradient(result, values)
