"""The functions of PyTorch that the Keras front end uses. `backend_tensorflow` has them for TensorFlow."""

# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import horovod.torch as horovod
import keras
import torch
from horovod.common.process_sets import ProcessSet

from horovod_partial.exchange import elastic
from horovod_partial.exchange.bucket_options import BucketOptions, pack, positions_of
from horovod_partial.exchange.gradients import Apply, Kind, Numbers, Planned, Wire, plan, step_name
from horovod_partial.exchange.models import takes_late
from horovod_partial.exchange.replicas import prepare_broadcast
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.policies import ModelPolicy, Quorum
from horovod_partial.torch import model_operations, operations
from horovod_partial.torch.balancing import BalancedBatchSampler
from horovod_partial.torch.buckets import GradientBucket, GradientFamily, MicroBatchBucket, kind
from horovod_partial.torch.elastic import run
from horovod_partial.torch.full_optimizer import widening
from horovod_partial.torch.model_operations import ModelBucket, signal
from horovod_partial.torch.operations import runtime

Variable = torch.Tensor  # the class of the framework's own variables, to which `native` converts Keras's variables

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Keep `jit_compile=True` from compiling a function, and all that the function calls.

    PyTorch's compiler must not trace code that counts, waits or keeps weak references. The compiler sometimes fails on
    such code, for example on `weakref.finalize`.
    """
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


outside_graphs = nullcontext  # does nothing: on PyTorch, code within `outside_graphs()` never runs in a graph


def when_it_runs(function: Callable[..., Any], *inputs: Any, **kind: Any) -> Any:
    """Call a function now, because PyTorch has no graph here. (TensorFlow's version calls it when the graph runs.)"""
    return function(*inputs)


def native(variable: Any) -> Any:
    """Return the PyTorch parameter within a variable of Keras. Anything else is returned unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def dense(gradient: torch.Tensor | None, variable: Any, *, sparse_as_dense: bool) -> torch.Tensor:
    """Return a variable's gradient as a dense tensor, zeros for None. Sparse gradients need `sparse_as_dense`."""
    if gradient is None:
        return torch.zeros_like(native(variable))
    if not gradient.is_sparse:
        return gradient.detach()
    if not sparse_as_dense:
        raise ValueError("Keras cannot apply sparse gradients on PyTorch; pass sparse_as_dense=True")
    return gradient.detach().to_dense()


def _kind_of(variable: Any) -> Kind:
    parameter = native(variable)
    return Kind(parameter.dtype, parameter.nbytes, parameter.device)


class _Buckets:
    """The buckets of the gradients of one set of variables: `horovod_partial.exchange.gradients.Buckets` in PyTorch.

    The rank sends each bucket as soon as the bucket is packed, then waits for the rounds of all buckets. The results
    are views of the buckets, and are valid until the next step. The caller's gradients do not change.
    """

    def __init__(
        self, planned: Sequence[Planned], variables: list[Any], options: BucketOptions, apply: Apply | None
    ) -> None:
        self.parameters = [native(variable) for variable in variables]
        make = MicroBatchBucket if options.shares_work else GradientBucket
        buckets = [
            make(name, [self.parameters[i] for i in positions], options, members)
            for name, positions, members, _ in planned
        ]
        self.family = GradientFamily(options, buckets)
        self._variables = variables
        self._apply = apply

    def arrive(self, wires: Sequence[Wire]) -> None:
        by_parameter = {parameter: wire.tensor for parameter, wire in zip(self.parameters, wires, strict=True)}
        try:
            for bucket in self.family.buckets:
                for parameter in bucket.parameters:
                    bucket.put(parameter, by_parameter[parameter])
                self.family.arrive(bucket)
            self.family.wait()
        except BaseException:
            self.family.abandon()
            raise

    def results(self) -> list[torch.Tensor]:
        """Return the gradients in the buckets, in the order of the step's variables."""
        views = {parameter: view for bucket in self.family.buckets for parameter, view in bucket.views.items()}
        return [views[parameter] for parameter in self.parameters]

    def take_first(self, arrived: None, apply: Apply) -> None:
        if count := self.family.take_into_buckets():
            apply(self.results(), self._variables, runtime.steps_of(self.family, count))

    def take_all(self, arrived: None) -> None:
        assert self._apply is not None
        while count := self.family.take_into_buckets():
            self._apply(self.results(), self._variables, runtime.steps_of(self.family, count))


class _Torch:
    """Implements `horovod_partial.exchange.gradients.Framework`. Gradients come only after the whole backward pass."""

    runtime, buckets = runtime, _Buckets
    number_of = staticmethod(Numbers(runtime, native).of)

    def divided(self, gradient: Any, divisor: int) -> Any:
        return gradient / divisor

    def wire(self, gradient: Any, variable: Any, options: BucketOptions) -> Wire:
        return Wire(dense(gradient, variable, sparse_as_dense=options.sparse_as_dense), _kind_of(variable))

    def reduce_fully(
        self, name: str, gradients: list[Any], variables: list[Any], arguments: dict[str, Any], *, is_optimizer: bool
    ) -> list[Any]:
        predivide, process_set = arguments["gradient_predivide_factor"], arguments["process_set"]
        options = {
            "op": arguments["op"],
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide,
            "process_set": process_set,
        }
        compression: Any = widening(arguments["compression"])
        tensors = [
            dense(*pair, sparse_as_dense=arguments["sparse_as_dense"])
            for pair in zip(gradients, variables, strict=True)
        ]
        wires, contexts = zip(*map(compression.compress, tensors), strict=True)
        handles = []
        number = partial(self.number_of, process_set=process_set)
        groups = positions_of(arguments["groups"], list(map(number, variables)), number)
        # With buckets of 0 bytes each gradient travels alone, unless it is in a group that the user has asked for.
        planned = pack(list(map(kind, wires)), [1] * len(wires), groups, 0)
        for members in planned:
            operation = f"{name}.{number(variables[members[0]])}"
            sent = [wires[i].contiguous() for i in members]
            if len(sent) == 1:
                handles.append(horovod.allreduce_async(sent[0], name=operation, **options))
            else:
                handles.append(horovod.grouped_allreduce_async(sent, name=operation, **options))
        results: list[Any] = [None] * len(wires)
        for members, handle in zip(planned, handles, strict=True):
            reduced = horovod.synchronize(handle)
            for i, result in zip(members, [reduced] if len(members) == 1 else reduced, strict=True):
                results[i] = compression.decompress(result, contexts[i])
        return results


framework = _Torch()


class SharedGradients:
    """Same as `horovod_partial.tensorflow.work_sharing.SharedGradients`, but the sums stay on the gradients' device."""

    def __init__(self, name: str, options: BucketOptions, variables: list[Any]) -> None:
        kinds = [_kind_of(variable) for variable in variables]
        planned = plan(framework, step_name(framework, name, options, variables, kinds), options, variables, kinds)
        self.options = options
        self._buckets = _Buckets(planned, variables, options, None)
        self.family = self._buckets.family
        self.declare = self.family.declare
        self._sums: list[Any] = self.family.buckets  # each is a MicroBatchBucket

    def add(self, gradients: Sequence[torch.Tensor], *, arrives: bool) -> None:
        """Add the gradients of a micro-batch. If `arrives`, contribute the sums to the rounds of all buckets.

        The first bucket comes last, because an arrival there tells other ranks that the micro-batch is done.
        """
        by_parameter = dict(zip(self._buckets.parameters, gradients, strict=True))
        for bucket in reversed(self._sums):
            for parameter in bucket.parameters:
                bucket.add(parameter, by_parameter[parameter], 1.0)
            if arrives:
                self.family.arrive(bucket)
            else:
                bucket.stay()
            bucket.reset()

    def take(self) -> bool:
        """Take the oldest complete update that has a gradient. Returns False if there is no such update."""
        return self.family.take_into_buckets() > 0

    def results(self, *, alone: bool) -> list[torch.Tensor]:
        """Return the gradients of the taken update, valid until the next `add`. `alone`: there are no other ranks."""
        for bucket in self._sums:
            bucket.begin_update()
        factor = self.options.factor if alone else 1.0
        return [result * factor if factor != 1.0 else result for result in self._buckets.results()]


def updater(
    take: Callable[[], list[Any] | None],
    must_apply: Callable[[], bool],
    apply: Callable[[list[Any]], None],
    variables: Sequence[Any],
) -> tuple[Callable[[bool], None], Callable[[], None]]:
    """Same as `horovod_partial.tensorflow.work_sharing.updater`, but the functions never run in a graph."""

    def train(begins: bool) -> None:
        while begins:
            results = take()
            if results is not None:
                apply(results)
            begins = must_apply()

    return train, lambda: train(must_apply())


def average_(
    variables: Sequence[Any],
    name: str,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    *,
    steps: torch.Tensor | int = 0,
) -> RoundInfo:
    """Same as `backend_tensorflow.average_`, but never in a graph."""
    bucket = ModelBucket([native(variable) for variable in variables])
    bucket.pack()
    handle = model_operations.arrive(bucket.flat, bucket.flat, name, policy, process_set, int(steps))
    handle.synchronize()
    info = handle.info()
    if takes_late(policy) or not info.late:
        bucket.unpack()
    return info


def check_devices(**devices: str) -> None:
    """Refuse device arguments with ValueError, because tensors are reduced on their own devices."""
    given = [name for name, device in devices.items() if device]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be used with Keras on PyTorch: tensors are reduced on the device that they are on"
        )


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Give variables of Keras, or tensors, the values of one rank. Every rank must call this.

    Variables are matched by their order, not by their names.

    Raises:
        ValueError: the ranks have different variables. Every rank raises it.
    """
    named = [(f"broadcast_variables.{index}", native(variable)) for index, variable in enumerate(variables)]
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for _, tensor in named]
    prepare_broadcast(kinds, runtime, horovod.global_process_set)
    bits = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # dtypes that Horovod 0.28.1 cannot broadcast
    sent = [(name, tensor.detach().view(bits.get(tensor.dtype, tensor.dtype))) for name, tensor in named]
    horovod.broadcast_parameters(sent, root_rank)


def broadcast_(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """Give variables the values of one rank. `device` must be empty on PyTorch; `check_devices` refuses others."""
    broadcast_variables(variables, root_rank)


def average_numbers(numbers: Sequence[float], name: str, device: str) -> list[float]:
    """Return the mean of each number over all ranks, in double precision."""
    return horovod.allreduce(torch.tensor(numbers, dtype=torch.float64), name=name).tolist()


class KerasState(elastic.KerasState):
    """The state of an elastic job with Keras on PyTorch: a model, its optimizer, and further properties."""

    functions = broadcast_variables, horovod.broadcast_object, horovod.rank
