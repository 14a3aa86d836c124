"""The optimizers of every front end, and TensorFlow's tape, each with the same small trainings.

A test that takes the fixture `trainer` is a case for all of them, or for those that `@pytest.mark.trainers` names.
Whoever calls a training hands over numbers and reads numbers, so that the test need not know the framework.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from harness.matrix import FRONT_END, WITH_TWO_RANKS
from harness.world import World

EVERYBODY = "quorum:1.0"  # a partial policy under which every rank is on time: results are those of `Full()`

Loss = Callable[..., Any]  # of a trainer, its parameters, and what a step is given

SHAPES = ((4, 8), (8, 8), (8, 2))  # of the kernels of a network; each has a bias


def arrays_of_network() -> list[np.ndarray]:
    """Kernels and biases, the same on every rank."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=part) / 2 for shape in SHAPES for part in (shape, shape[1:])]


def network(trainer: Trainer, parameters: Sequence[Any], x: Any, y: Any) -> Any:
    """The squared error of a network of three layers."""
    values = x
    for number, (kernel, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
        values = trainer.like(trainer.tanh(values) if number else values, kernel) @ kernel + bias
    return trainer.mean((trainer.like(values, y) - y) ** 2)


def near(numbers: list[float], tolerance: float = 1e-5) -> Any:
    return pytest.approx(numbers, abs=tolerance)


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank trains a network with in a step."""
    generator = np.random.default_rng(1000 * rank + step)
    return generator.normal(size=(6, 4)).astype("float32"), generator.normal(size=(6, 2)).astype("float32")


def joined(world: World, *steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The batches of all ranks as one."""
    xs, ys = zip(*(batch(rank, step) for step in steps for rank in world.ranks), strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def linear(trainer: Trainer, parameters: Sequence[Any], *gradients: Any) -> Any:
    """A loss with these gradients. The last parameters are not used if there are more of them."""
    pairs = zip(parameters, gradients, strict=False)
    return sum(trainer.total(parameter * trainer.like(gradient, parameter)) for parameter, gradient in pairs)


def table(trainer: Trainer, parameters: Sequence[Any], rows: Any) -> Any:
    """The sum of some rows of the only parameter, whose gradient is sparse."""
    return trainer.total(trainer.rows(parameters[0], rows))


@dataclass(frozen=True)
class Form:
    """What frameworks say of a training in ways of their own.

    Attributes:
        make: which of `makers`.
        scale: the first scale of the loss.
        clip: the largest norm of all gradients.
        decay: what the rate is multiplied by in each round.
        passes: of backward in a step, whose gradients are added.
    """

    make: str = "momentum"
    scale: float | None = None
    clip: float | None = None
    decay: float | None = None
    passes: int = 1


class Training:
    """Parameters, and steps that change them.

    Attributes:
        optimizer: wraps the framework's; it is the framework's own where the policy is None, and None for a tape.
    """

    def __init__(
        self, trainer: Trainer, world: World, parameters: Sequence[Any], optimizer: Any, step: Callable[..., None]
    ) -> None:
        self.trainer = trainer
        self.world = world
        self.parameters = parameters
        self.optimizer = optimizer
        self._step = step

    def step(self, *inputs: Any) -> None:
        """Compute gradients of what a step is given, and hand them over."""
        self._step(*map(self.trainer.tensor, inputs))

    def train(self, steps: int, first: int = 0) -> None:
        """Take steps of a network, with this rank's batches."""
        for number in range(first, first + steps):
            self.step(*batch(self.world.rank, number))

    def train_alone(self, steps: int, passes: int = 1) -> Training:
        """Take steps of a network, each with the batches of all ranks and of so many passes."""
        for number in range(steps):
            self.step(*joined(self.world, *range(passes * number, passes * (number + 1))))
        return self

    def values(self) -> list[list[float]]:
        """The numbers of each parameter."""
        return [self.trainer.array(parameter).reshape(-1).tolist() for parameter in self.parameters]

    def weights(self) -> list[float]:
        """The numbers of all parameters."""
        return list(itertools.chain(*self.values()))

    def state(self) -> list[float]:
        """The numbers of the optimizer's state."""
        return self.trainer.state(self.optimizer, self.parameters)

    def ended(self) -> int:
        """How many rounds have ended here, whether they have been applied or not."""
        return min(map(self.trainer.completed, self.trainer.buckets(self.optimizer)))

    def stats(self) -> dict[str, Any]:
        """Statistics of the first bucket."""
        return self.trainer.hvd.partial_stats()[self.trainer.buckets(self.optimizer)[0]]

    def assign(self, values: Sequence[Any]) -> None:
        """Give the parameters these numbers."""
        for parameter, numbers in zip(self.parameters, values, strict=True):
            self.trainer.assign(parameter, np.reshape(numbers, parameter.shape))

    def flush(self) -> None:
        """Flush, and check that replicas are equal bit for bit."""
        self.optimizer.flush()
        assert self.optimizer.flushed()
        self.world.same((self.values(), self.state(), self.optimizer.rounds))


class Trainer:
    """What a case needs of an optimizer or a tape.

    Attributes:
        hvd: the module whose functions are tested.
        operations: the module of the framework, which has every reduction.
        runtime: the framework's way into the extension.
        disagreement: what a step raises where the ranks disagree about a bucket.
        makers: makes optimizers of parameters, by name; `unit` is plain SGD with a rate of 1.
        tensor: makes what is in a loss, of numbers.
        like: a tensor with the dtype of another one.
        tanh, mean: of a tensor.
        total: the sum of a tensor, in float32.
        rows: some rows of a parameter.
        refused: what is refused here besides what every front end refuses, and what is said of it.
        arguments: those that are there under every policy, and that `harness.arguments` has wrong values for.
        arguments_of_gradients: those that are there where gradients travel.
    """

    module: str
    framework: str
    is_tape = graph = False
    makers: dict[str, Callable[[Sequence[Any]], Any]]
    tensor: Callable[[Any], Any]
    like: Callable[[Any, Any], Any]
    tanh: Callable[[Any], Any]
    mean: Callable[[Any], Any]
    total: Callable[[Any], Any]
    rows: Callable[[Any, Any], Any]
    arguments = "num_groups process_set sparse_as_dense sync"
    arguments_of_gradients = " compression gradient_predivide_factor op groups"

    def __init__(self) -> None:
        self.hvd = importlib.import_module(f"horovod_partial.{self.module}")
        self.operations = importlib.import_module(f"horovod_partial.{self.framework}")
        self.runtime = importlib.import_module(f"horovod_partial.{self.framework}.operations").runtime
        self.disagreement: type[Exception] = self.hvd.HorovodInternalError
        self.refused: list[tuple[dict[str, Any], str]] = []

    def parameter(self, array: np.ndarray, dtype: str) -> Any:
        raise NotImplementedError

    def array(self, parameter: Any) -> np.ndarray:
        """The numbers of a parameter: float64."""
        raise NotImplementedError

    def assign(self, parameter: Any, array: np.ndarray) -> None:
        """Give a parameter these numbers."""
        parameter.assign(array)

    def completed(self, name: str) -> int:
        """How many rounds of a bucket have ended on this rank."""
        return self.runtime.statistics(0).get(name, {"completed": 0})["completed"]

    def averages(self, optimizer: Any) -> Any:
        """What averages the models of an optimizer; it has the names of the buckets."""
        raise NotImplementedError

    def plain(self) -> Any:
        """Some optimizer or tape of the framework's."""
        raise NotImplementedError

    def wrap(self, *wrapped: Any, **options: Any) -> Any:
        """Wrap what is given, or something plain."""
        needed = {} if wrapped else {"optimizer": self.plain()}
        return self.hvd.DistributedOptimizer(*wrapped, **(needed | options))

    def begin(
        self, loss: Loss, parameters: Sequence[Any], sync: Any, form: Form, options: dict[str, Any]
    ) -> tuple[Any, Callable[..., None]]:
        """The optimizer of a training, and its step."""
        raise NotImplementedError

    def training(
        self,
        world: World,
        sync: Any = "full",
        make: str = "momentum",
        loss: Loss = network,
        arrays: Sequence[np.ndarray] | None = None,
        dtypes: Sequence[str] = ("float32",),
        parameters: Sequence[Any] | None = None,
        **options: Any,
    ) -> Training:
        """A training.

        Args:
            world: the ranks whose gradients are combined.
            sync: the policy; None trains by itself.
            make: which of `makers`.
            loss: what is minimised.
            arrays: what its parameters are at first; those of a network if None.
            dtypes: of the parameters, in turns.
            parameters: of another training, which this one goes on with.
            options: of an optimizer or a tape, and those of a `Form`.
        """
        arrays = arrays_of_network() if arrays is None else arrays
        if parameters is None:
            parameters = [self.parameter(array, dtype) for array, dtype in zip(arrays, itertools.cycle(dtypes))]
        if isinstance(groups := options.get("groups"), list):
            options["groups"] = [[parameters[index] for index in group] for group in groups]
        form = Form(make, **{field: options.pop(field) for field in Form.__dataclass_fields__ if field in options})
        return Training(self, world, parameters, *self.begin(loss, parameters, sync, form, options))


class TensorsOfTorch(Trainer):
    """Tensors of PyTorch, for its own optimizers and those of Keras."""

    framework = "torch"

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch
        self.tensor = lambda values: torch.from_numpy(np.array(values)).to(torch.get_default_device())  # a copy
        self.like = lambda values, other: values.to(other.dtype)
        self.tanh, self.mean = torch.tanh, torch.mean
        self.total = lambda values: values.sum().float()
        self.rows = lambda table, rows: torch.nn.functional.embedding(rows, table, sparse=True)


class Torch(TensorsOfTorch):
    module = "torch"
    arguments = (
        f"{Trainer.arguments} optimizer named_parameters backward_passes_per_step max_grad_norm max_grad_value "
        "grad_transform grad_scaler named_buffers"
    )
    arguments_of_gradients = f"{Trainer.arguments_of_gradients} merging"

    def __init__(self) -> None:
        super().__init__()
        optim = self.torch.optim
        self.makers = {
            "unit": lambda parameters: optim.SGD(parameters, lr=1.0),
            "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
            "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
            "Adam": lambda parameters: optim.Adam(parameters, lr=0.01),
            "RMSprop": lambda parameters: optim.RMSprop(parameters, lr=0.01),
            "AdamW of two groups": lambda parameters: optim.AdamW(
                [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "weight_decay": 0.1}], lr=0.01
            ),
        }

        weight = self.parameter(np.zeros(2), "float32")
        other = self.parameter(np.zeros(2), "float32")
        self.refused = [
            ({"groups": [["x"]]}, "groups must be"),
            ({"groups": [[weight], [weight]]}, "only appear once"),
            ({"optimizer": optim.LBFGS([weight])}, "LBFGS"),
            ({"optimizer": optim.SGD([weight]), "named_parameters": [weight]}, "sequence of tuples"),
            ({"optimizer": optim.SGD([weight, other]), "named_parameters": [("a", weight)]}, "were not named"),
            (
                {"optimizer": optim.SGD([weight, other]), "named_parameters": [("a", weight), ("a", other)]},
                "must be unique",
            ),
        ]

    def parameter(self, array: np.ndarray, dtype: str) -> Any:
        return self.torch.nn.Parameter(self.tensor(array).to(getattr(self.torch, dtype)))

    def array(self, parameter: Any) -> np.ndarray:
        return parameter.detach().double().cpu().numpy()

    def assign(self, parameter: Any, array: np.ndarray) -> None:
        parameter.data.copy_(self.torch.from_numpy(array))

    def averages(self, optimizer: Any) -> Any:
        return optimizer._exchange

    def name_of(self, number: int, parameter: Any) -> str:
        return "x".join(map(str, (number, *parameter.shape)))

    def state(self, optimizer: Any, parameters: Sequence[Any]) -> list[float]:
        states = [optimizer.state[parameter] for parameter in parameters]
        tensors = [value for state in states for _, value in sorted(state.items()) if self.torch.is_tensor(value)]
        return [number for tensor in tensors for number in tensor.double().reshape(-1).tolist()]

    def buckets(self, optimizer: Any) -> list[str]:
        return [bucket.name for bucket in optimizer._exchange.buckets]

    def plain(self) -> Any:
        return self.torch.optim.SGD([self.parameter(np.zeros(2), "float32")], lr=0.1)

    def begin(
        self, loss: Loss, parameters: Sequence[Any], sync: Any, form: Form, options: dict[str, Any]
    ) -> tuple[Any, Callable[..., None]]:
        device = self.torch.get_default_device().type
        scaler = self.torch.amp.GradScaler(device, init_scale=form.scale or 1.0, enabled=form.scale is not None)
        optimizer = self.makers[form.make](parameters)
        if sync is not None:
            optimizer = self.hvd.DistributedOptimizer(
                optimizer,
                [(self.name_of(number, parameter), parameter) for number, parameter in enumerate(parameters)],
                sync=sync,
                backward_passes_per_step=form.passes,
                max_grad_norm=form.clip,
                grad_scaler=None if form.scale is None else scaler,
                **options,
            )
        schedule = self.torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=form.decay or 1.0)
        if sync is not None and form.decay is not None:
            self.hvd.follow_rounds(schedule)
        optimizer.scaler = scaler
        calls = itertools.count(1)

        def step(*inputs: Any) -> None:
            scaler.scale(loss(self, parameters, *inputs)).backward()
            if next(calls) % form.passes:
                return
            if sync is None and form.clip is not None:
                self.torch.nn.utils.clip_grad_norm_(parameters, form.clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()

        return optimizer, step

    def scale_of(self, training: Training) -> float:
        return training.optimizer.scaler.get_scale()


class Keras(Trainer):
    """Optimizers of Keras, on either backend."""

    module = "keras"
    arguments = (
        f"{Trainer.arguments} optimizer name device_dense device_sparse scale_local_gradients "
        "average_aggregated_gradients backward_passes_per_step"
    )

    def __init__(self) -> None:
        super().__init__()
        import keras

        from harness import keras_training

        self.keras = keras
        unit = lambda: keras.optimizers.SGD(1.0)
        # Graphs take longer to trace than to run.
        names = ("SGD", "momentum", "Adam", *keras_training.MAKERS_OF_MAKERS) if self.graph else keras_training.MAKERS
        makers = {"unit": unit} | {name: keras_training.MAKERS[name] for name in names}
        self.makers = {name: lambda _, make=make: make() for name, make in makers.items()}
        self.refused = [
            ({"backward_passes_per_step": 0}, "backward_passes_per_step must be"),
            ({"sync": "group_average:2", "groups": 2}, "groups cannot be used"),
            ({"sync": self.hvd.GroupAverage(2, overlap=True)}, "overlap"),
            ({"sync": self.hvd.GroupAverage(2, average=("parameters", "buffers"))}, "buffers"),
        ]

    def parameter(self, array: np.ndarray, dtype: str) -> Any:
        return self.keras.Variable(array, dtype=dtype, name="x".join(map(str, array.shape)))

    def array(self, parameter: Any) -> np.ndarray:
        return self.keras.ops.convert_to_numpy(self.keras.ops.cast(parameter, "float64"))

    def state(self, optimizer: Any, parameters: Sequence[Any]) -> list[float]:
        return [number for variable in optimizer.variables for number in self.array(variable).reshape(-1).tolist()]

    def averages(self, optimizer: Any) -> Any:
        return optimizer._horovod._made

    def buckets(self, optimizer: Any) -> list[str]:
        return list(self.averages(optimizer).bucket_names)

    def plain(self) -> Any:
        return self.keras.optimizers.SGD(0.1)

    def gradients(self, loss: Callable[[], Any], values: Sequence[Any]) -> Sequence[Any]:
        """Of a loss by the values of variables; None of those that it does not use."""
        raise NotImplementedError

    def compiled(self, step: Callable[..., None]) -> Callable[..., None]:
        return step

    def begin(
        self, loss: Loss, parameters: Sequence[Any], sync: Any, form: Form, options: dict[str, Any]
    ) -> tuple[Any, Callable[..., None]]:
        optimizers = self.keras.optimizers
        optimizer = self.makers[form.make](parameters)
        if form.clip is not None or form.decay is not None:
            config = optimizer.get_config() | {"global_clipnorm": form.clip}
            if form.decay is not None:
                rate = optimizers.schedules.ExponentialDecay(config["learning_rate"], 1, form.decay)
                config["learning_rate"] = optimizers.schedules.serialize(rate)
            optimizer = type(optimizer).from_config(config)
        if form.scale is not None:
            optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=form.scale)
        if form.passes > 1:
            options["backward_passes_per_step"] = form.passes
        if sync is not None:
            optimizer = self.hvd.DistributedOptimizer(optimizer, sync=sync, **options)
        optimizer.build(parameters)

        def step(*inputs: Any) -> None:
            values = [parameter.value for parameter in parameters]
            gradients = self.gradients(lambda: optimizer.scale_loss(loss(self, values, *inputs)), values)
            optimizer.apply(gradients, parameters)

        return optimizer, self.compiled(step)

    def scale_of(self, training: Training) -> float:
        return float(training.optimizer.dynamic_scale)


class KerasOnTorch(Keras, TensorsOfTorch):
    def __init__(self) -> None:
        super().__init__()
        of_torch = self.torch.optim.SGD([self.torch.nn.Parameter(self.torch.zeros(2))], lr=0.1)
        self.refused += [
            ({"device_dense": "/cpu:0"}, "device_dense cannot be used"),
            ({"device_sparse": "/cpu:0"}, "device_sparse cannot be used"),
            ({"optimizer": of_torch}, "must be one of Keras 3"),
        ]

    def gradients(self, loss: Callable[[], Any], values: Sequence[Any]) -> Sequence[Any]:
        return self.torch.autograd.grad(loss(), values, allow_unused=True)


class TensorsOfTensorFlow(Trainer):
    framework = "tensorflow"

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        self.tf = tf
        self.tensor, self.tanh, self.mean, self.rows = tf.constant, tf.tanh, tf.reduce_mean, tf.gather
        self.like = lambda values, other: tf.cast(values, other.dtype)
        self.total = lambda values: tf.cast(tf.reduce_sum(values), "float32")
        if self.graph:
            self.disagreement = tf.errors.UnknownError

    def compiled(self, step: Callable[..., None]) -> Callable[..., None]:
        return self.tf.function(step, autograph=False) if self.graph else step


class KerasOnTensorFlow(TensorsOfTensorFlow, Keras):
    def __init__(self) -> None:
        super().__init__()
        of_tensorflow = self.tf.compat.v1.train.GradientDescentOptimizer(0.1)
        self.refused.append(({"optimizer": of_tensorflow}, "must be one of Keras 3"))

    def gradients(self, loss: Callable[[], Any], values: Sequence[Any]) -> Sequence[Any]:
        with self.tf.GradientTape() as tape:
            result = loss()
        return tape.gradient(result, values)


class KerasInGraph(KerasOnTensorFlow):
    graph = True


class Tape(TensorsOfTensorFlow):
    """Gradients that a tape has combined, applied by SGD, which this makes itself: TensorFlow 2.15 has no Keras 3."""

    module = "tensorflow"
    is_tape = True
    makers = dict.fromkeys(("unit", "momentum"))  # type: ignore[assignment]
    arguments = f"{Trainer.arguments} gradtape device_dense device_sparse scale_local_gradients"

    def __init__(self) -> None:
        super().__init__()
        self.refused = [({"sync": policy}, "averages models") for policy in ("group_average", "partial_reduce:2")]

    def parameter(self, array: np.ndarray, dtype: str) -> Any:
        return self.tf.Variable(self.tf.cast(array, dtype), name="x".join(map(str, array.shape)))

    def array(self, parameter: Any) -> np.ndarray:
        return self.tf.cast(parameter, "float64").numpy()

    def plain(self) -> Any:
        return self.tf.GradientTape()

    def wrap(self, *wrapped: Any, **options: Any) -> Any:
        needed = {} if wrapped else {"gradtape": self.plain()}
        return self.hvd.DistributedGradientTape(*wrapped, **(needed | options))

    def begin(
        self, loss: Loss, parameters: Sequence[Any], sync: Any, form: Form, options: dict[str, Any]
    ) -> tuple[Any, Callable[..., None]]:
        rate, momentum = {"unit": (1.0, 0.0), "momentum": (0.1, 0.9)}[form.make]
        velocities = [self.tf.Variable(self.tf.zeros_like(parameter)) for parameter in parameters]

        def step(*inputs: Any) -> None:
            with self.tf.GradientTape() as tape:
                result = loss(self, parameters, *inputs)
            if sync is not None:
                tape = self.hvd.DistributedGradientTape(tape, sync=sync, **options)
            gradients = tape.gradient(result, parameters)
            for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                if gradient is not None:
                    velocity.assign(momentum * velocity + self.tf.convert_to_tensor(gradient))
                    parameter.assign_sub(rate * velocity)

        return None, self.compiled(step)


class TapeInGraph(Tape):
    graph = True


class Scripted:
    """One number, whose gradient on rank r in step s is (s + 1) * 10 ** r. Rank `late` misses rounds."""

    def __init__(self, trainer: Trainer, world: World, late: int, make: str = "unit", **bounds: Any) -> None:
        self.world = world
        self.late = world.rank == late
        self._late = late
        sync = trainer.hvd.Quorum(world.size - 1, grace_ms=0, **bounds)
        array = np.zeros(1)
        self.training = trainer.training(world, sync, make, linear, [array], ["float64"], op=trainer.hvd.Sum)
        self.optimizer = self.training.optimizer
        self.rounds = 0

    def step(self, gradient: float) -> None:
        self.training.step(np.array([gradient]))

    def first(self) -> None:
        """The first round, which waits for every rank."""
        self.rounds += 1
        self.step(0.0)
        self.world.barrier()

    def rounds_without_the_late_rank(self, *numbers: int) -> None:
        """The others take these steps."""
        for number in numbers:
            self.rounds += 1
            if self.late:
                self.world.until(lambda: self.training.ended() >= self.rounds, "the others' round has ended here")
            else:
                self.step((number + 1) * 10.0**self.world.rank)

    def total(self, *numbers: int) -> float:
        """What is in those rounds."""
        ranks = [rank for rank in self.world.ranks if rank != self._late]
        return sum((number + 1) * 10.0**rank for number in numbers for rank in ranks)

    @property
    def way(self) -> float:
        """How far the number has gone."""
        return -self.training.weights()[0]


KINDS: dict[str, type[Trainer]] = {
    "torch": Torch,
    "keras_torch": KerasOnTorch,
    "keras_eager": KerasOnTensorFlow,
    "keras_graph": KerasInGraph,
    "tape_eager": Tape,
    "tape_graph": TapeInGraph,
}
# The marks of a launch that each trainer has, where a case has none.
_KERAS = {**WITH_TWO_RANKS, "framework": "tensorflow"}
_TAPE = {**FRONT_END, "framework": "tensorflow"}
TRAINERS: dict[str, dict[str, Any]] = {
    "torch": {**FRONT_END, "framework": "torch"},
    "keras_torch": {**WITH_TWO_RANKS, "framework": "torch"},
    "keras_eager": _KERAS,
    "keras_graph": _KERAS,
    "tape_eager": _TAPE,
    "tape_graph": _TAPE,
}
_LONG = ("keras_eager", "tape_eager")
_TRACED = ("keras_graph", "tape_graph")
MARKS = dict.fromkeys(_LONG, pytest.mark.full_matrix) | dict.fromkeys(_TRACED, pytest.mark.one_in(6))

optimizers = pytest.mark.trainers("torch", "keras_torch", "keras_eager", "keras_graph")


@functools.cache
def trainer_of(name: str) -> Trainer:
    """The trainer of a name; its framework is imported."""
    return KINDS[name]()
