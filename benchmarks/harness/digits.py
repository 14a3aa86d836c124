"""A network that learns scikit-learn's digits in rounds whose times are known: training is computed, and nobody sleeps.

With plain SGD, and no result lost, all ranks have one model after a round, so the model is a function of which gradients were in
which round, and of which round's model each was computed.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

HIDDEN = 64
BATCH = 16
TEST_EVERY = 5  # rounds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@functools.cache
def data() -> tuple[Floats, Integers, Floats, Integers]:
    """Images and labels to train with, then those that are held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(images / 16, labels, random_state=0, stratify=labels)
    return train, train_labels, test, test_labels


class Network:
    """One hidden layer, with the first values that PyTorch would draw; immutable."""

    def __init__(self, arrays: tuple[Floats, ...]) -> None:
        self.arrays = arrays

    @classmethod
    def draw(cls, seed: int) -> Network:
        generator = np.random.default_rng(seed)
        sizes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
        bounds = [64, 64, HIDDEN, HIDDEN]
        return cls(tuple(generator.uniform(-(n**-0.5), n**-0.5, size) for size, n in zip(sizes, bounds, strict=True)))

    def gradient(self, rows: Integers) -> tuple[Floats, ...]:
        """Of the mean cross entropy of some images."""
        images, labels, _, _ = data()
        first, first_bias, second, second_bias = self.arrays
        image = images[rows]
        hidden = np.maximum(image @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(rows)), labels[rows]] -= 1
        error /= len(rows)
        back = (error @ second.T) * (hidden > 0)
        return image.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)

    def step(self, gradients: list[tuple[float, tuple[Floats, ...]]]) -> Network:
        """SGD with a weighted sum."""
        arrays = tuple(
            value - sum(weight * gradient[index] for weight, gradient in gradients)
            for index, value in enumerate(self.arrays)
        )
        return Network(arrays)

    def accuracy(self) -> float:
        """Of the images that are held out."""
        _, _, images, labels = data()
        first, first_bias, second, second_bias = self.arrays
        scores = np.maximum(images @ first + first_bias, 0) @ second + second_bias
        return float((scores.argmax(axis=1) == labels).mean())


def rounds_until(accuracy: float, joined: Integers, model_of: Integers, learning_rate: float, seed: int) -> int | None:
    """After how many rounds that accuracy is there; None where it never is.

    Args:
        accuracy: of images that are held out, looked at every `TEST_EVERY` rounds.
        joined: the round, from 0, that each gradient is in, of the shape (steps, ranks).
        model_of: after how many rounds the model was, with which it was computed; of the same shape.
        learning_rate: for the average over all ranks; a rank whose gradient is missing counts as zero.
        seed: of the first model and of the batches, which are the same whatever the rounds.
    """
    steps, ranks = joined.shape
    rows = np.random.default_rng(seed).integers(len(data()[0]), size=(steps, ranks, BATCH))
    models = [Network.draw(seed)]
    order = np.argsort(joined, axis=None, kind="stable")
    begins = np.searchsorted(joined.ravel()[order], np.arange(joined.max() + 2))
    for number in range(int(joined.max()) + 1):
        members = order[begins[number] : begins[number + 1]]
        of = model_of.ravel()[members]
        gradients = []
        for model in np.unique(of):
            mine = members[of == model]
            batch = rows.reshape(-1, BATCH)[mine].ravel()
            gradients.append((learning_rate * len(mine) / ranks, models[model].gradient(batch)))
        models.append(models[-1].step(gradients))
        if (number + 1) % TEST_EVERY == 0 and models[-1].accuracy() >= accuracy:
            return number + 1
    return None
