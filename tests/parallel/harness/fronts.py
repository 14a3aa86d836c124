"""The front ends of the protocol: PyTorch's operations, and TensorFlow's in eager code and in graphs.

A test that takes the fixture `front` is a case for all of them. It makes and reads tensors with the front's help, and
begins operations with `bind`.
"""

import functools
import importlib
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import pytest
from horovod.common.process_sets import global_process_set

from harness.matrix import FRONT_END
from harness.world import World
from horovod_partial.exchange.rounds import RoundInfo


class Arrival(Protocol):
    """An operation that has begun."""

    def done(self) -> bool:
        """Whether `end` would return at once."""

    def end(self) -> tuple[Any, RoundInfo]:
        """Wait for the result."""


class Front:
    """What a case of the protocol needs of a front end.

    Attributes:
        hvd: the module whose functions are tested.
        disagreement: what every rank gets where the ranks disagree about a bucket.
        misfit: what a call gets that does not fit the declaration of its bucket.
        unsupported: names of dtypes that are not reduced.
    """

    framework: str
    disagreement: type[Exception]
    misfit: type[Exception]
    unsupported: tuple[str, ...] = ("uint8", "int8", "bool", "int16", "complex64")

    def __init__(self) -> None:
        self.hvd = importlib.import_module(f"horovod_partial.{self.framework}")
        self.runtime = importlib.import_module(f"horovod_partial.{self.framework}.operations").runtime
        self.fences = 0

    def bind(
        self, kind: str = "partial_allreduce", /, *, in_place: bool = False, **options: Any
    ) -> Callable[..., Arrival]:
        """An operation with all but its tensor: calling it begins one. In graphs each has one graph.

        In place it takes a `variable`, and writes the result there.
        """
        raise NotImplementedError

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        """A tensor of numbers."""
        raise NotImplementedError

    def variable(self, values: Any, dtype: str = "float32") -> Any:
        """A tensor of numbers that can be written."""
        raise NotImplementedError

    def fill(self, variable: Any, number: float) -> None:
        """Write a number all over a variable."""
        raise NotImplementedError

    def array(self, tensor: Any) -> np.ndarray:
        """The numbers of a tensor: float64, or int64."""
        raise NotImplementedError

    def dtype(self, tensor: Any) -> str:
        """The name of a tensor's dtype."""
        return str(tensor.dtype).removeprefix("torch.").removeprefix("<dtype: '").removesuffix("'>")

    def message(self, error: BaseException) -> str:
        """What an error says; TensorFlow adds, before and behind that, where in a graph it was."""
        return re.sub(r"^{{.*?}} |\n\t \[\[.*", "", str(error), flags=re.DOTALL)

    def run(self, tensor: Any, kind: str = "partial_allreduce", /, **options: Any) -> tuple[Any, RoundInfo]:
        """One operation, to its end."""
        return self.bind(kind, **options)(tensor).end()

    def reduce(self, values: Any, dtype: str = "float32", /, **options: Any) -> list[Any]:
        """The numbers that a partial allreduce of numbers returns."""
        return self.array(self.run(self.tensor(values, dtype), **options)[0]).tolist()

    def completed(self, name: str) -> int:
        """How many rounds of a bucket have ended on this rank."""
        return self.runtime.family(global_process_set, [name]).taken

    def collect(self, name: str, like: np.ndarray, process_set: int = 0) -> np.ndarray:
        """The results that this rank has missed, zeros if there are none. After a flush: what it would get later."""
        output = np.zeros_like(like)
        self.runtime.core.collect(process_set, name, output.ctypes.data)
        return output

    def fence(self, world: World) -> None:
        """When this returns, the coordinator has decided on everything that any rank has submitted before.

        An ordinary collective of all ranks is negotiated behind what was submitted before it.
        """
        for _ in range(2):
            self.hvd.allreduce(self.tensor([0.0]), name=world.name(f"fence.{self.fences}"), op=self.hvd.Sum)
            self.fences += 1

    def check_that_the_job_goes_on(self, world: World) -> None:
        options = {"name": world.name("after"), "op": self.hvd.Sum, "sync": "solo"}
        assert self.reduce([world.rank + 1], "int64", **options) == [sum(rank + 1 for rank in world.ranks)]
        full = self.hvd.allreduce(self.tensor([1.0]), name=world.name("after.full"), op=self.hvd.Sum)
        assert self.array(full).tolist() == [world.size]


class Torch(Front):
    framework = "torch"

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch
        self.device = torch.get_default_device()  # also for threads, which have a default of their own
        self.disagreement, self.misfit = self.hvd.HorovodInternalError, ValueError

    def bind(
        self, kind: str = "partial_allreduce", /, *, in_place: bool = False, **options: Any
    ) -> Callable[..., Arrival]:
        begin = getattr(self.hvd, f"{kind}_async_" if in_place else f"{kind}_async")
        return lambda tensor: TorchArrival(self.hvd, begin(tensor, **options))

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        return self.torch.as_tensor(np.array(values)).to(self.device, getattr(self.torch, dtype))

    variable = tensor

    def fill(self, variable: Any, number: float) -> None:
        variable.fill_(number)

    def array(self, tensor: Any) -> np.ndarray:
        return (tensor.double() if tensor.is_floating_point() else tensor.long()).cpu().numpy()

    def collect(self, name: str, like: np.ndarray, process_set: int = 0) -> np.ndarray:
        output = self.tensor(np.zeros_like(like), str(like.dtype))
        self.runtime.core.collect(process_set, name, output.data_ptr())
        return self.array(output)


class TorchArrival:
    """Of a handle, which PyTorch's operations return."""

    def __init__(self, hvd: Any, handle: Any) -> None:
        self.hvd = hvd
        self.handle = handle

    def done(self) -> bool:
        return self.hvd.poll(self.handle)

    def end(self) -> tuple[Any, RoundInfo]:
        return self.hvd.synchronize(self.handle), self.hvd.round_info(self.handle)


class Eager(Front):
    framework = "tensorflow"
    unsupported = (*Front.unsupported, "string")

    def __init__(self) -> None:
        super().__init__()
        import tensorflow

        self.tf = tensorflow
        self.threads = ThreadPoolExecutor(8)
        self.disagreement, self.misfit = self.hvd.HorovodInternalError, ValueError

    def bind(
        self, kind: str = "partial_allreduce", /, *, in_place: bool = False, **options: Any
    ) -> Callable[..., Arrival]:
        def operation(tensor: Any) -> Any:
            result, info = getattr(self.hvd, kind)(tensor, return_info=True, **options)
            return tensor.assign(result) if in_place else result, info

        function = self.function(operation)
        # In a thread of its own, which the operation blocks.
        return lambda tensor: TensorFlowArrival(self.threads.submit(function, tensor))

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        if dtype == "string":
            return self.tf.fill(np.shape(values), "x")
        return self.tf.cast(self.tf.constant(np.array(values)), dtype)

    def variable(self, values: Any, dtype: str = "float32") -> Any:
        return self.tf.Variable(self.tensor(values, dtype))

    def fill(self, variable: Any, number: float) -> None:
        variable.assign(self.tf.cast(self.tf.fill(variable.shape, number), variable.dtype))

    def array(self, tensor: Any) -> np.ndarray:
        return self.tf.cast(tensor, self.tf.float64 if tensor.dtype.is_floating else self.tf.int64).numpy()


class Graph(Eager):
    def __init__(self) -> None:
        super().__init__()
        self.disagreement, self.misfit = self.tf.errors.UnknownError, self.tf.errors.InvalidArgumentError

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.tf.function(function, autograph=False)


class TensorFlowArrival:
    """Of a thread that waits for the result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def end(self) -> tuple[Any, RoundInfo]:
        result, info = self.future.result()
        fields = {name: getattr(info, name).numpy().tolist() for name in info._fields if name != "empty"}
        fields |= {"late": bool(fields["late"]), "members": tuple(fields["members"]), "work": tuple(fields["work"])}
        return result, RoundInfo(**fields)


# The marks of a launch that each front end has, where a case has none.
FRONTS: dict[str, dict[str, Any]] = {
    "torch": {"framework": "torch"},
    "eager": {"framework": "tensorflow", **FRONT_END},
    "graph": {"framework": "tensorflow", **FRONT_END},
}
# To trace a graph takes longer than to run it. In eager code an operation is that of a graph of its own.
MARKS = {"eager": pytest.mark.full_matrix, "graph": pytest.mark.one_in(6)}


@functools.cache
def front_of(name: str) -> Front:
    """The front end of a name; its framework is imported."""
    return {"torch": Torch, "eager": Eager, "graph": Graph}[name]()
