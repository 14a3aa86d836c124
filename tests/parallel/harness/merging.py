"""Small models whose gradients are merged, on every front end."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from harness.fronts import Front
from harness.world import World
from horovod_partial.fusion import FusionPlan, MessageCost, planner

EVERYBODY = "quorum:1.0"
ALL = ["full", "solo", "majority", EVERYBODY]
WARMUP = 2
SWITCH = WARMUP + 1  # steps until the plan is there
SHAPES = ((4, 8), (8, 8), (8, 2))  # of the kernels; each has a bias


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> MessageCost:
    """A network that is never busy: probes travel, but their times do not count."""
    cost = MessageCost(1e-4, 1e-9)
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: cost))
    monkeypatch.setattr(planner, "_PROBES", 1)
    return cost


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1000 * rank + step)
    return generator.normal(size=(6, 4)).astype("float32"), generator.normal(size=(6, 2)).astype("float32")


class Trainee:
    """A model of three layers that is trained with SGD and momentum.

    Args:
        front: where, and in TensorFlow whether as a graph.
        world: the ranks whose gradients are combined.
        sync: the policy; None trains by itself, on the batches of all ranks.
        options: of `MergedGradients`.
        middle: the dtype of the layer in the middle.
        small: a model of one layer instead, whose gradients fit no other model's plan.
    """

    plan: FusionPlan

    def __init__(
        self,
        front: Front,
        world: World,
        sync: str | None = "full",
        middle: str = "float32",
        small: bool = False,
        **options: Any,
    ) -> None:
        self.hvd = front.hvd
        self.world = world
        fusion = front.hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **options})
        self.make(front, sync, fusion, middle, small)

    def make(self, front: Front, sync: str | None, fusion: Any, middle: str, small: bool) -> None:
        raise NotImplementedError

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        raise NotImplementedError

    def weights(self) -> list[float]:
        raise NotImplementedError

    def gradients(self) -> list[tuple[str, int]]:
        """The name and the bytes of each gradient, in the order in which they come."""
        raise NotImplementedError

    def train(self, steps: int, first: int = 0) -> None:
        for number in range(first, first + steps):
            self.step(*batch(self.world.rank, number))

    def train_alone(self, steps: int) -> list[float]:
        """The weights after training on the batches of all ranks, without Horovod."""
        for number in range(steps):
            xs, ys = zip(*(batch(rank, number) for rank in self.world.ranks), strict=True)
            self.step(np.concatenate(xs), np.concatenate(ys))
        return self.weights()

    def plan_of(self, messages: list[int]) -> FusionPlan:
        names, nbytes = zip(*self.gradients(), strict=True)
        return FusionPlan("exact", names, nbytes, (0.0,) * len(names), tuple(messages), MessageCost(1.0, 1.0))


class TorchTrainee(Trainee):
    def make(self, front: Front, sync: str | None, fusion: Any, middle: str, small: bool) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        layers = [torch.nn.Linear(*shape) for shape in (SHAPES if not small else [(2, 2)])]
        if not small:
            layers[1].to(getattr(torch, middle))
        self.model = torch.nn.ModuleList(layers)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if sync is not None:
            self.optimizer = front.hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), sync=sync, fusion=fusion
            )

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        self.optimizer.zero_grad()
        values = self.torch.from_numpy(x)
        for number, layer in enumerate(self.model):
            values = layer((values.tanh() if number else values).to(layer.weight.dtype))
        self.torch.nn.functional.mse_loss(values.float(), self.torch.from_numpy(y)).backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return self.torch.cat([p.detach().reshape(-1).double() for p in self.model.parameters()]).tolist()

    def gradients(self) -> list[tuple[str, int]]:
        return [(name, 4 * p.numel()) for name, p in reversed(list(self.model.named_parameters()))]

    @property
    def plan(self) -> FusionPlan:
        return self.optimizer.fusion_plan


class TensorFlowTrainee(Trainee):
    def make(self, front: Front, sync: str | None, fusion: Any, middle: str, small: bool) -> None:
        keras, tf = importlib.import_module("keras"), importlib.import_module("tensorflow")
        keras.utils.set_random_seed(1)
        dtypes = ("float32", middle, "float32")
        layers = [keras.layers.Dense(SHAPES[i][1], "tanh" if i < 2 else None, dtype=dtypes[i]) for i in range(3)]
        inputs = keras.Input((2 if small else 4,))
        self.model = keras.Sequential([inputs, keras.layers.Dense(2)] if small else [inputs, *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(self.model.trainable_variables)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(self.model(x, training=True), tf.float32) - y) ** 2)
            if sync is not None:
                tape = front.hvd.DistributedGradientTape(tape, sync=sync, fusion=fusion)
            optimizer.apply(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables)

        self.call = front.function(step)

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        tf = importlib.import_module("tensorflow")
        self.call(tf.constant(x), tf.constant(y))

    def weights(self) -> list[float]:
        return np.concatenate([np.asarray(weight, float).reshape(-1) for weight in self.model.get_weights()]).tolist()

    def gradients(self) -> list[tuple[str, int]]:
        variables = list(enumerate(self.model.trainable_variables))[::-1]
        return [(f"{position}.{one.name}", 4 * int(np.prod(one.shape))) for position, one in variables]

    @property
    def plan(self) -> FusionPlan:
        """Of the tape that came last."""
        return list(self.hvd.fusion_plans().values())[-1]


def trainee(front: Front, world: World, *args: Any, **options: Any) -> Trainee:
    """A model on a front end."""
    return (TorchTrainee if front.framework == "torch" else TensorFlowTrainee)(front, world, *args, **options)
