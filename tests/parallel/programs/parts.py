"""Trains with ranks that are slow in one part of a step, for a recording: `parts.py WHAT`.

WHAT is `torch`, where phases follow each other, each of so many steps; or `keras` or `tape`, where the last rank's loader is slow.
"""

import sys
import time
from typing import Any

from common import note

# Of each phase, the rank that is slow, and where. A step of the last phase has two backward passes.
PHASES = {"loader": -1, "loaders": None, "forward": -1, "backward": -1, "evaluation": 0, "passes": -1}
STEPS = 8
SLEEP = 0.05  # seconds, in each step or pass


def train_with_torch() -> None:
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[torch.Tensor]):
        def __init__(self, count: int, seconds: float) -> None:
            self.count, self.seconds = count, seconds

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(self.seconds)
            return torch.ones(8)

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, phase: str) -> torch.Tensor:  # type: ignore[override]
            context.phase = phase
            time.sleep(SLEEP if phase == "forward" else 0)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            time.sleep(SLEEP if context.phase == "backward" else 0)
            return gradient, None

    hvd.init()
    torch.set_num_threads(1)
    for phase, rank in PHASES.items():
        is_slow = rank is None or hvd.rank() == rank % hvd.size()
        passes = 2 if phase == "passes" else 1
        first, last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
        model = torch.nn.Sequential(first, last)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=passes)
        loads = phase in ("loader", "loaders", "passes")
        loader = DataLoader(Samples(2 * passes * STEPS, SLEEP / 2 if is_slow and loads else 0), batch_size=2)
        for number, batch in enumerate(loader, 1):
            last(Sleeping.apply(first(batch), phase if is_slow else "")).sum().backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                if is_slow and phase == "evaluation":
                    with torch.no_grad():
                        for samples in DataLoader(Samples(2, SLEEP / 2)):
                            model(samples)


def batches(seconds: float) -> Any:
    import numpy as np

    for _ in range(3 * STEPS):
        time.sleep(seconds)
        yield np.ones((2, 8), "float32"), np.ones((2, 1), "float32")


def train_with_keras() -> None:
    import keras

    import horovod_partial.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    model.fit(batches(SLEEP if hvd.rank() == hvd.size() - 1 else 0), verbose=0)


def train_with_a_tape() -> None:
    import tensorflow as tf

    import horovod_partial.tensorflow as hvd

    hvd.init()
    weight = tf.Variable(tf.ones((8, 1)))
    seconds = SLEEP if hvd.rank() == hvd.size() - 1 else 0
    signature = (tf.TensorSpec((2, 8)), tf.TensorSpec((2, 1)))

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), sync="majority") as tape:
            loss = tf.reduce_mean((x @ weight - y) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))

    for x, y in tf.data.Dataset.from_generator(lambda: batches(seconds), output_signature=signature):
        step(x, y)


{"torch": train_with_torch, "keras": train_with_keras, "tape": train_with_a_tape}[sys.argv[1]]()
note("ended")
