"""Models, steps and optimizers for tests of `DistributedOptimizer` on PyTorch."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import horovod_partial.torch as hvd
from harness.models import ring
from harness.trainers import EVERYBODY
from harness.world import World

GRADIENTS = ["full", "solo", "majority", EVERYBODY]
MODELS: dict[str, Callable[..., Any]] = {
    "group": lambda **options: hvd.GroupAverage(2, period=4, **options),
    "ring": lambda **options: hvd.GroupAverage(schedule=ring(hvd.size()), period=None, **options),
    "ready": lambda **options: hvd.PartialReduce(2, **options),
    "staleness": lambda **options: hvd.PartialReduce(3, weights="staleness", **options),
    "weighted": lambda **options: hvd.WeightedAverage(3, 0.95, **options),
}
# One policy of models of each kind, for what does not depend on who averages with whom.
KINDS = ["group", "ready", "weighted"]

MAKERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "adamw-groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[3].parameters(), "weight_decay": 0.1}], lr=0.01
    ),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


class Classifier:
    """A small network that learns from data of this rank's own, in the loop that people write."""

    def __init__(
        self,
        world: World,
        make: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer],
        sync: Any,
        prefix: str = "",
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        """Wrap an optimizer under `sync`; `prefix` begins the names of parameters, and options are of layers or of ours."""
        self.world = world
        self.scaler = scaler
        of_layers = {name: options.pop(name) for name in ("bias", "dtype") if name in options}
        torch.manual_seed(1)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise((6, 8, 8, 8, 8, 4)):
            layers += [torch.nn.Linear(inputs, outputs, **of_layers), torch.nn.Tanh()]
        self.model = torch.nn.Sequential(*layers[:-1])
        named = [(prefix + name, parameter) for name, parameter in self.model.named_parameters()]
        made = make(self.model.parameters())
        self.optimizer: Any = hvd.DistributedOptimizer(made, named, sync=sync, grad_scaler=scaler, **options)
        self.data = torch.Generator().manual_seed(world.rank)

    def loss(self) -> torch.Tensor:
        x = torch.randn(8, 6, generator=self.data)
        target = torch.randint(0, 4, (8,), generator=self.data)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaler is not None):
            output = self.model(x.to(next(self.model.parameters()).dtype))
            return torch.nn.functional.cross_entropy(output.float(), target)

    def backward(self) -> torch.Tensor:
        loss = self.loss()
        self.optimizer.zero_grad()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def check(self) -> None:
        """After a flush there is one model."""
        self.optimizer.flush()
        hvd.assert_replicas_equal(self.model, self.optimizer)
        self.world.same(self.optimizer.rounds)
        if self.scaler is not None:
            self.world.same(self.scaler.get_scale())


def sync_of(policy: str, **options: Any) -> Any:
    """A policy by its name; options are for policies of models."""
    return MODELS[policy](**options) if policy in MODELS else policy


def make_model(seed: int = 0) -> torch.nn.Sequential:
    # No bias before a normalization: its gradient is rounding noise, which Adam would blow up.
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8, affine=False), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def batch(rank: int, step: int, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of one rank's step; of the models here, or of these shapes."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    parts = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes or ((6, 4), (6, 2))]
    return tuple(part.to(torch.get_default_device()) for part in parts)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)) - y.to(dtype)).square().mean()  # `mse_loss` of PyTorch 2.4 takes no bfloat16 here


def wrap(model: torch.nn.Module, sync: Any, make: str = "momentum", **options: Any) -> Any:
    return hvd.DistributedOptimizer(MAKERS[make](model), model.named_parameters(), sync=sync, **options)


def wrapped(sync: Any, make: str = "momentum", **options: Any) -> tuple[torch.nn.Sequential, Any]:
    """A model and its distributed optimizer."""
    model = make_model()
    return model, wrap(model, sync, make, **options)


def take_step(optimizer: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """One step of the plainest loop."""
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value.detach()


def train(world: World, optimizer: Any, model: torch.nn.Module, steps: int, first: int = 0, seconds: float = 0) -> None:
    """Take steps, each after so many seconds."""
    for step in range(first, first + steps):
        time.sleep(seconds)
        take_step(optimizer, lambda number=step: loss_of(model, world.rank, number))


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).tolist()


def check_replicas(world: World, model: torch.nn.Module, optimizer: Any) -> None:
    """After a flush there is one model."""
    optimizer.flush()
    world.same(weights(model))


def reference(world: World, make: str, steps: int, passes: int = 1) -> list[float]:
    """The weights after training one model on all ranks' batches, without Horovod."""
    model = make_model()
    optimizer = MAKERS[make](model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in world.ranks:
            for part in range(passes):
                (loss_of(model, rank, passes * step + part) / world.size).backward()
        optimizer.step()
    return weights(model)


def state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Tensors of the optimizer's state, without its counter of steps."""
    return [
        {key: x.tolist() for key, x in sorted(optimizer.state[p].items()) if torch.is_tensor(x) and key != "step"}
        for p in model.parameters()
    ]
