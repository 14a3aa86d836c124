"""What the Keras front end needs of PyTorch. `backend_tensorflow` has the same names for TensorFlow."""

# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import horovod.torch as horovod
import keras
import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.mpi_ops import Average, Sum

from horovod_partial.exchange import elastic, gradients
from horovod_partial.exchange.models import takes_late
from horovod_partial.exchange.replicas import check_alike
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.exchange.work_sharing import Updater
from horovod_partial.policies import ModelPolicy, Policy, Quorum, SharedUpdates
from horovod_partial.torch import model_operations, operations
from horovod_partial.torch.buckets import GradientBucket, kind
from horovod_partial.torch.elastic import run
from horovod_partial.torch.family import GradientFamily
from horovod_partial.torch.full_optimizer import widening
from horovod_partial.torch.model_buckets import ModelBucket
from horovod_partial.torch.model_operations import signal
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replicas import gather_bytes
from horovod_partial.torch.work_sharing import MicroBatchBucket

Variable = torch.Tensor  # the class of the framework's own variables, to which `native` converts Keras's variables
_numbers = gradients.Numbers(runtime)

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Keep `jit_compile=True` from compiling a function, and all that it calls.

    Code that counts, waits or keeps weak references must not be traced: PyTorch's compiler sometimes fails on parts of
    it, such as `weakref.finalize`.
    """
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


outside_graphs = nullcontext  # does nothing: on PyTorch, code within `outside_graphs()` never runs in a graph


def when_it_runs(function: Callable[..., Any], *inputs: Any, **kind: Any) -> Any:
    """Call a function at once, because PyTorch has no graph here. (On TensorFlow: each time that the graph runs.)"""
    return function(*inputs)


def native(variable: Any) -> Any:
    """Return PyTorch's parameter behind a variable of Keras. Anything else is returned unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def number_of(variable: Any, process_set: ProcessSet) -> int:
    """Return the number of a variable in a process set, the same on every rank."""
    return _numbers.of(native(variable), process_set)


class _Step(NamedTuple):
    """The buckets that the gradients of a step travel in, and the variables that the gradients belong to."""

    family: GradientFamily
    parameters: list[torch.nn.Parameter]  # PyTorch's parameters, in the order of the gradients
    variables: list[Any]  # variables of Keras, in the order of the gradients

    def results(self) -> list[torch.Tensor]:
        """Return the gradients that lie in the buckets, in the order in which the step gave them."""
        views = {parameter: view for bucket in self.family.buckets for parameter, view in bucket.views.items()}
        return [views[parameter] for parameter in self.parameters]


class _StepApplier(gradients.StepApplier):
    def __init__(self, exchange: gradients.GradientExchange, step: _Step, apply: gradients.Apply) -> None:
        super().__init__(exchange, step.family, step.variables, apply)
        self._step = step

    def apply_arrived(self, arrived: _Step) -> None:
        self.apply_rounds()

    def apply_rounds(self) -> None:
        while count := self._step.family.take_into_buckets():
            self._apply(self._step.results(), self._variables, runtime.steps_of(self._family, count))


class GradientExchange(gradients.GradientExchange):
    """Combines the gradients of a step over the ranks, for Keras on PyTorch, after backward has made all of them.

    The rank arrives at each bucket as soon as it is packed, then waits for the rounds of all buckets. The results are
    views of the buckets, and are valid until the next step. The gradients of the caller are not changed.
    """

    average, total, runtime = Average, Sum, runtime
    number_of = staticmethod(number_of)
    __call__ = uncompiled(gradients.GradientExchange.__call__)
    apply_combined = uncompiled(gradients.GradientExchange.apply_combined)

    def __init__(self, name: str, sync: Policy | SharedUpdates, arguments: dict[str, Any], **options: Any) -> None:
        super().__init__(name, sync, arguments, **options)
        self._steps: dict[
            str, _Step
        ] = {}  # the buckets for each set of trained variables, by the prefix of the buckets' names

    @staticmethod
    def _divided(gradient: Any, divisor: int) -> Any:
        return gradient / divisor

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_sparse:
            return gradient.detach()
        if not self._arguments["sparse_as_dense"]:
            raise ValueError("Keras cannot apply sparse gradients on PyTorch; pass sparse_as_dense=True")
        return gradient.detach().to_dense()

    def _reduce_fully(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        predivide = self._arguments["gradient_predivide_factor"]
        options = {
            "op": self._arguments["op"],
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide,
            "process_set": self.process_set,
        }
        compression: Any = widening(self._arguments["compression"])
        wires, contexts = zip(*(compression.compress(self._dense(gradient)) for gradient in gradients), strict=True)
        handles = []
        # With `bucket_bytes=0` each gradient travels alone, unless it is in a group that the user has asked for.
        planned = self._plan(variables, list(map(kind, wires)), [1] * len(wires), bucket_bytes=0)
        for members in planned:
            name = f"{self.name}.{self._number(variables[members[0]])}"
            tensors = [wires[i].contiguous() for i in members]
            if len(members) == 1:
                handles.append(horovod.allreduce_async(tensors[0], name=name, **options))
            else:
                handles.append(horovod.grouped_allreduce_async(tensors, name=name, **options))
        results: list[Any] = [None] * len(wires)
        for members, handle in zip(planned, handles, strict=True):
            reduced = horovod.synchronize(handle)
            for i, result in zip(members, [reduced] if len(members) == 1 else reduced, strict=True):
                results[i] = compression.decompress(result, contexts[i])
        return results

    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        _, step = self._arrive(gradients, variables)
        step.family.take_results()
        return step.results()

    def _arrive(self, gradients: list[Any], variables: list[Any]) -> tuple[str, _Step]:
        dense = [self._dense(gradient) for gradient in gradients]
        name = self._step_name(variables, [native(variable).dtype for variable in variables])
        step = self._step_of(name, variables)
        by_parameter = dict(zip(step.parameters, dense, strict=True))
        try:
            for bucket in step.family.buckets:
                for parameter in bucket.parameters:
                    bucket.put(parameter, by_parameter[parameter])
                step.family.arrive(bucket)
            step.family.wait()
        except BaseException:
            step.family.abandon()
            raise
        return name, step

    def _step_of(self, name: str, variables: list[Any], kind_of_bucket: type[GradientBucket] = GradientBucket) -> _Step:
        if name not in self._steps:
            parameters = [native(variable) for variable in variables]
            sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
            buckets = [
                kind_of_bucket(
                    f"{name}.{index}",
                    [parameters[i] for i in planned],
                    self._arguments["compression"],
                    self._members([variables[i] for i in planned]),
                    unscaled=self.unscaled,
                )
                for index, planned in enumerate(self._plan(variables, list(map(kind, parameters)), sizes))
            ]
            options = self._options | {"sync": self._sync, "op": self._arguments["op"]}
            family = GradientFamily(self.process_set, buckets, options)
            self._own(family.names)
            self._steps[name] = _Step(family, parameters, variables)
        return self._steps[name]

    def _applier_of(self, arrived: _Step, variables: list[Any], apply: gradients.Apply) -> gradients.StepApplier:
        return _StepApplier(self, arrived, apply)

    def _apply_first(self, arrived: _Step, apply: Callable[[list[Any], Any], None]) -> None:
        count = arrived.family.take_into_buckets()
        if count:
            apply(arrived.results(), count)

    def _bucket_names(self) -> Iterable[str]:
        return [name for step in self._steps.values() for name in step.family.names]


class SharedGradients(GradientExchange):
    """The sum of the gradients of the micro-batches that this rank makes under `hvd.WorkSharing`."""

    def prepare(self, variables: list[Any]) -> None:
        """Make the buckets for the gradients of `variables`."""
        name = self._step_name(variables, [native(variable).dtype for variable in variables])
        self._step = self._step_of(name, variables, MicroBatchBucket)
        self.family = self._step.family
        self._sums: list[Any] = self.family.buckets  # the family's buckets. Each is a MicroBatchBucket

    def _policy_of(self, bucket: GradientBucket) -> dict[str, Any]:
        assert isinstance(self._sync, SharedUpdates)
        return {"sync": SharedUpdates(self._sync.passes, grants=bucket is self._sums[0])}

    def declare(self) -> None:
        """Declare the buckets. The first bucket also keeps account of the micro-batches that were granted."""
        self.family.declare(self._policy_of)

    def dense(self, gradients: Sequence[Any]) -> list[torch.Tensor]:
        """Return the gradients as dense tensors; None counts as zeros."""
        pairs = zip(gradients, self._step.parameters, strict=True)
        return [torch.zeros_like(each) if gradient is None else self._dense(gradient) for gradient, each in pairs]

    def add(self, gradients: Sequence[torch.Tensor], *, arrives: bool) -> None:
        """Add the gradients of a micro-batch. If `arrives`, arrive with the sums at all buckets.

        The bucket that keeps account of grants comes last, because the arrival there says that the micro-batch is done.
        """
        by_parameter = dict(zip(self._step.parameters, gradients, strict=True))
        for bucket in reversed(self._sums):
            for parameter in bucket.parameters:
                bucket.add(parameter, by_parameter[parameter], 1.0)
            if arrives:
                self.family.arrive(bucket, **self._policy_of(bucket))
            else:
                bucket.made += 1
            bucket.reset()

    def take(self) -> bool:
        """Take the oldest update that this rank has not taken. Returns False if the update has no gradient."""
        return self.family.take_into_buckets() > 0

    def results(self, *, alone: bool) -> list[torch.Tensor]:
        """Return the gradients of the update that `take` took, valid until `add`. `alone`: no other ranks exist."""
        for bucket in self._sums:
            bucket.begin_update()
        factor = self._options["prescale_factor"] * self._options["postscale_factor"] if alone else 1.0
        return [result * factor if factor != 1.0 else result for result in self._step.results()]


def average_(
    variables: Sequence[Any],
    name: str,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    *,
    steps: torch.Tensor | int = 0,
) -> RoundInfo:
    """Average floating-point variables of Keras over ranks, in place, in the bucket `name`.

    `steps` are the steps, or the iteration, that decide the weight of this rank's model. If this rank was late, and the
    policy's results are not for late ranks (`takes_late`), the variables stay unchanged.
    """
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
    # Late gradients belong to the variables' old values, so deliver these gradients before the broadcast.
    runtime.flush(horovod.global_process_set.process_set_id, compares=False)
    named = [(f"broadcast_variables.{index}", native(variable)) for index, variable in enumerate(variables)]
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for _, tensor in named]
    everyone = horovod.global_process_set
    gather = partial(gather_bytes, name="broadcast_variables.kinds", process_set=everyone)
    check_alike(kinds, gather, range(horovod.size()))
    horovod.broadcast_parameters([(name, _as_sent(tensor.detach())) for name, tensor in named], root_rank)


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that Horovod 0.28.1 can broadcast. bfloat16 and bool travel as integers of their bits."""
    bits = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(tensor.dtype)
    return tensor if bits is None else tensor.view(bits)


def broadcast_(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """Give variables the values of one rank. `device` must be empty on PyTorch; `check_devices` refuses others."""
    broadcast_variables(variables, root_rank)


def average_numbers(numbers: Sequence[float], name: str, device: str) -> list[float]:
    """Return the mean of each number over all ranks, in double precision."""
    return horovod.allreduce(torch.tensor(numbers, dtype=torch.float64), name=name).tolist()


class KerasState(elastic.KerasState):
    """The state of an elastic job with Keras on PyTorch: a model, its optimizer, and further properties."""

    functions = elastic.Functions(broadcast_variables, horovod.broadcast_object, horovod.rank)
