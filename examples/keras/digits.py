"""The main job in Keras: handwritten digits, learnt by ranks that take turns at being slow.

    [KERAS_BACKEND=torch] .venv/bin/python examples/keras/digits.py [--seeds 5] [--transport gloo]

The same as `examples/torch/digits.py`, with `model.fit`: a callback sleeps before each batch, for as long as that step
is to take, and notes the times. Before the clock starts, all ranks take a step together, in which the graph is traced.

A graph does not tell when it has its gradients. So a step counts as computed when it has slept, and the millisecond or
two that this small network really takes count as waiting in the plot of arrivals.

Prints a table and writes `digits.json`, `accuracy.png` and `arrivals.png` into `build/demo_keras`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod_partial.keras as hvd

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "shared")]

import digits_job
import harness

WARM_UP = 1  # steps


class DelayedSteps(keras.callbacks.Callback):
    """Lets each step take as long as it is to take, and notes when it was computed and applied.

    Put it behind `FlushCallback`: the clock stops after that.

    Args:
        stage: for the bar that shows the progress.
        steps: how many are timed.
        delays: of the steps.
        notes: where times go.
    """

    def __init__(self, stage: str, steps: int, delays: harness.Delays, notes: digits_job.Notes) -> None:
        super().__init__()
        self._stage = stage
        self._steps = steps
        self._delays = delays
        self._notes = notes

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = batch - WARM_UP
        if step < 0:
            return
        if step == 0:
            hvd.allgather_object(None)  # a barrier
            self._notes.start()
        harness.progress(self._stage, step, self._steps)
        self._notes.begin(step)
        self._delays.serve(hvd.rank(), step)
        self._notes.arrive()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= WARM_UP:
            self._notes.end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._notes.finish()


def train_all(**arguments: Any) -> list[dict[str, digits_job.Run]]:
    """What every rank runs."""
    return digits_job.train_all(train, **arguments)


def train(
    stage: str, options: dict[str, Any], seed: int, steps: int, delays: harness.Delays, adam: float | None
) -> digits_job.Run:
    """Train under one policy. Returns its figures, and when what happened, in seconds from the start."""
    rank, size = hvd.rank(), hvd.size()
    images, labels, test_images, test_labels = digits_job.load(seed)
    images, labels = images[rank::size], labels[rank::size]
    all_steps = WARM_UP + steps
    drawn = np.random.default_rng(seed * size + rank).integers(len(images), size=all_steps * digits_job.BATCH)
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    rate = keras.optimizers.schedules.CosineDecay(adam or digits_job.LEARNING_RATE, all_steps, alpha=0.05)
    optimizer = keras.optimizers.Adam(rate) if adam else keras.optimizers.SGD(rate, momentum=digits_job.MOMENTUM)
    model.compile(
        hvd.DistributedOptimizer(optimizer, **options),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    notes = digits_job.Notes(hvd, lambda: np.concatenate([weight.ravel() for weight in model.get_weights()]))
    model.fit(
        images[drawn],
        labels[drawn],
        batch_size=digits_job.BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.FlushCallback(),
            DelayedSteps(stage, steps, delays, notes),
        ],
    )

    def accuracy(weights: np.ndarray) -> float:
        shapes = [weight.shape for weight in model.get_weights()]
        pieces = np.split(weights, np.cumsum([np.prod(shape) for shape in shapes])[:-1])
        model.set_weights([piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        return float(np.mean(np.argmax(keras.ops.convert_to_numpy(model(test_images)), axis=1) == test_labels))

    return notes.run(all_steps, accuracy)


if __name__ == "__main__":
    backend = keras.backend.backend()  # whose name is also that of the framework whose Horovod the ranks use
    digits_job.main(
        train_all, output=Path("build/demo_keras"), framework=backend, label=f"Digits in Keras on {backend}"
    )
