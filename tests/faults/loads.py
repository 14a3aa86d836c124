"""What the ranks of a job do together while things go wrong, each step and each result told in the history."""

import contextlib
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness.buckets import collect
from history import COPIES, WITHOUT_QUORUM, Writer, contribution, micro_batch

import horovod_partial.torch as hvd

# Arrivals that close a round, by policy and number of ranks; the replay limit and the bound of staleness are the defaults.
QUORUM: dict[str, Callable[[int], int]] = {
    "solo": lambda size: 1,
    "majority": lambda size: -(-size // 2),
    "majority:random": lambda size: 1,
    "quorum:0.75": lambda size: -(-3 * size // 4),
    "full": lambda size: size,
}
MODELS: dict[str, Callable[[], Any]] = {
    "group_average": lambda: hvd.GroupAverage(2, period=5),
    "partial_reduce": lambda: hvd.PartialReduce(2),
    "weighted_average": lambda: hvd.WeightedAverage(3, 0.95),
}
STALENESS = REPLAY_LIMIT = 8


class BadBatchError(Exception):
    """What goes wrong within a step, and is caught: the program goes on."""


def nothing(_: str) -> None:
    """The default of `Scene.within`."""


@dataclass(frozen=True)
class Scene:
    """Where a load takes place.

    Attributes:
        history: of this rank.
        rank, size: within the process set.
        policy: a name of `QUORUM`, or of `MODELS`, or `"work_sharing"`.
        buckets: how many, in an optimizer the number of parameters.
        seed: of what this rank draws.
        passes: micro-batches of an update for each rank, under work sharing.
        process_set: the ranks that take part.
        within: called with the name of a place in a step of the optimizer, where the plan may have a fault.
    """

    history: Writer
    rank: int
    size: int
    policy: str
    buckets: int
    seed: str
    passes: int = 1
    process_set: Any = hvd.global_process_set
    within: Callable[[str], None] = nothing

    def describe(self, bucket: str, *, optimizer: bool) -> None:
        """Say what is promised of a bucket."""
        bounds = {"numbers": self.passes * self.size}
        if self.policy != "work_sharing":
            bounds = {"quorum": QUORUM[self.policy](self.size), "staleness": STALENESS, "limit": REPLAY_LIMIT}
        self.history.write("bucket", b=bucket, policy=self.policy, optimizer=optimizer, **bounds)

    def tell_result(self, bucket: str, result: torch.Tensor, round: int | None, **more: Any) -> None:
        copies = result.reshape(COPIES, -1)
        low, high = ([int(x) for x in bound.tolist()] for bound in (copies.amin(0), copies.amax(0)))
        self.history.write("result", b=bucket, round=round, low=low, high=high, **more)

    def tell_model(self, parameters: list[torch.nn.Parameter]) -> None:
        digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)).hexdigest()
        self.history.write("replica", digest=digest[:16])

    def closings(self) -> dict[str, dict[str, int]]:
        """How many rounds of each bucket have closed so far, by reason."""
        stats = hvd.partial_stats(process_set=self.process_set)
        return {
            name: {reason: of["closed_by"].get(reason, 0) for reason in WITHOUT_QUORUM} for name, of in stats.items()
        }


class Operations:
    """Arrivals at single buckets, whose results are collected after a flush."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._rng = random.Random(scene.seed)
        self._names = [f"{scene.policy}.{index}" for index in range(scene.buckets)]
        self._before = scene.closings()
        for name in self._names:
            scene.describe(name, optimizer=False)

    def step(self, number: int) -> None:
        scene = self._scene
        values = contribution(scene.rank, number, scene.size) * COPIES
        handles = []
        for name in self._names:
            tensor = torch.tensor(values, dtype=torch.int64)
            scene.history.write("submit", b=name, s=number)
            start = self._rng.choice((hvd.partial_allreduce_async_, hvd.partial_allreduce_async))
            options = {"op": hvd.Sum, "sync": scene.policy, "process_set": scene.process_set}
            handles.append(start(tensor, name=name, **options))
        for name, handle in zip(self._names, handles, strict=True):
            with scene.history.waiting("round"):
                result = hvd.synchronize(handle)
            info = hvd.round_info(handle)
            round = number if scene.policy == "full" else info.round
            scene.tell_result(name, result, round, s=number, late=info.late, missed=info.staleness)

    def flush(self) -> None:
        scene = self._scene
        with scene.history.waiting("flush"):
            hvd.flush(scene.process_set)
        if scene.policy != "full":
            like = torch.zeros(2 * scene.size * COPIES, dtype=torch.int64)
            for name in self._names:
                scene.tell_result(name, collect(name, like, scene.process_set.process_set_id), None)
        scene.history.write("flushed")

    def tell_closings(self) -> None:
        closings = self._scene.closings()
        for name in self._names:
            before = self._before.get(name, {})
            by = {reason: count - before.get(reason, 0) for reason, count in closings.get(name, {}).items()}
            self._scene.history.write("closed", b=name, by=by)


class Optimizer:
    """Steps of an optimizer whose parameters fall by the results of their rounds: SGD with a rate of 1."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        size = self._width * COPIES
        self._parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for _ in range(scene.buckets)]
        self._names = [f"parameter.{index}" for index in range(scene.buckets)]
        self._before = [parameter.detach().clone() for parameter in self._parameters]
        self._rounds = 0
        self._others = set(scene.closings())
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=1.0),
            zip(self._names, self._parameters, strict=True),
            backward_passes_per_step=scene.passes,
            op=hvd.Sum,
            sync=scene.policy,
            process_set=scene.process_set,
        )
        self._optimizer.register_round_hook(self._tell_round)
        for name in self._names:
            scene.describe(name, optimizer=True)

    @property
    def _width(self) -> int:
        """Of a copy."""
        return 2 * self._scene.size

    def step(self, number: int) -> None:
        scene = self._scene
        values = torch.tensor(contribution(scene.rank, number, scene.size) * COPIES, dtype=torch.float64)
        for name in self._names:
            scene.history.write("submit", b=name, s=number)
        self._optimizer.zero_grad()
        self._make([values] * scene.buckets)
        with scene.history.waiting("round"):
            self._optimizer.step()

    def _make(self, gradients: list[torch.Tensor]) -> None:
        """A forward and a backward pass, which makes these gradients."""
        scene = self._scene
        scene.within("forward")
        # Backward comes to the first parameter last: the others have their gradients then.
        hook = self._parameters[0].register_hook(lambda _: scene.within("hook"))
        loss: Any = sum((p * gradient).sum() for p, gradient in zip(self._parameters, gradients, strict=True))
        try:
            _WithBackward.apply(loss, lambda: scene.within("backward")).backward()
        finally:
            hook.remove()

    def _tell_round(self, _: Any) -> None:
        self._tell_results()
        self._scene.within("callback")

    def _tell_results(self) -> None:
        for name, parameter, before in zip(self._names, self._parameters, self._before, strict=True):
            self._scene.tell_result(name, before - parameter.detach(), self._rounds)
            before.copy_(parameter.detach())
        self._rounds += 1

    def flush(self) -> None:
        with self._scene.history.waiting("flush"):
            self._optimizer.flush()
        self._scene.history.write("flushed")
        self._scene.tell_model(self._parameters)

    def tell_closings(self) -> None:
        """Nobody tells which parameter is in which bucket: for each, the most that any bucket of the optimizer has."""
        own = [of for name, of in self._scene.closings().items() if name not in self._others]
        most = {reason: max((of[reason] for of in own), default=0) for reason in WITHOUT_QUORUM}
        for name in self._names:
            self._scene.history.write("closed", b=name, by=most)


class Sharing(Optimizer):
    """Micro-batches of updates that belong to all ranks. Each step makes one, and the model is told after each update."""

    @property
    def _width(self) -> int:
        return 3 * self._numbers

    @property
    def _numbers(self) -> int:
        """Micro-batches of an update."""
        return self._scene.passes * self._scene.size

    def step(self, number: int) -> None:
        history = self._scene.history
        update, index = self._begin()
        history.write("begun", u=update, n=index)
        try:
            self._make([self._gradient(parameter, update, index) for parameter in self._parameters])
            history.write("made", u=update, n=index, skips=False)
        except BadBatchError:
            history.write("made", u=update, n=index, skips=True)
        with (
            contextlib.suppress(BadBatchError),
            history.waiting("round"),
        ):  # in a round hook: the update has been applied
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _begin(self) -> tuple[int, int]:
        try:
            with self._scene.history.waiting("begin"):
                begun: tuple[int, int] = self._optimizer.begin_micro_batch()
                return begun
        except BadBatchError:  # in a round hook
            return self._begin()

    def _gradient(self, parameter: torch.nn.Parameter, update: int, index: int) -> torch.Tensor:
        """Of a micro-batch, with the weights that this rank has now: what the parameter has fallen by for all numbers."""
        fallen = -parameter.detach().reshape(COPIES, -1)[:, : self._numbers].sum(1)
        copies = micro_batch(self._scene.rank, update, index, self._numbers, [int(copy) for copy in fallen.tolist()])
        return torch.tensor(copies, dtype=torch.float64).reshape(-1)

    def _tell_results(self) -> None:
        super()._tell_results()
        self._scene.tell_model(self._parameters)

    def flush(self) -> None:
        try:
            super().flush()
        except BadBatchError:  # in a round hook
            self.flush()

    def tell_closings(self) -> None:
        """No promise depends on them."""


class Models:
    """Averages of models. Only how calls end is told, and the models that a flush makes equal."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        torch.manual_seed(0)
        self._parameter = torch.nn.Parameter(torch.randn(1000))
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self._parameter], lr=0.01), sync=MODELS[scene.policy](), process_set=scene.process_set
        )

    def step(self, number: int) -> None:
        self._optimizer.zero_grad()
        (self._parameter * (self._scene.rank + number)).sum().backward()
        with self._scene.history.waiting("round"):
            self._optimizer.step()

    def flush(self) -> None:
        with self._scene.history.waiting("flush"):
            self._optimizer.flush()
        self._scene.history.write("flushed")
        self._scene.tell_model([self._parameter])

    def tell_closings(self) -> None:
        """No promise depends on them."""


LOADS: dict[str, Callable[[Scene], Any]] = {
    "operations": Operations,
    "optimizer": Optimizer,
    "sharing": Sharing,
    "models": Models,
}


class _WithBackward(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return gradient, None
