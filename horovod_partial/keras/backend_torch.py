"""Keras on PyTorch: see `horovod_partial.keras.backend`."""

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
from horovod_partial.policies import ModelPolicy, Policy, Quorum
from horovod_partial.torch import model_operations, operations
from horovod_partial.torch.buckets import GradientBucket, kind, take_round
from horovod_partial.torch.devices import device_number
from horovod_partial.torch.elastic import run
from horovod_partial.torch.full_optimizer import widening
from horovod_partial.torch.model_buckets import ModelBucket
from horovod_partial.torch.model_operations import signal
from horovod_partial.torch.operations import PartialHandle, make_config, runtime, submit
from horovod_partial.torch.replicas import gather_bytes

__all__ = [
    "GradientReducer",
    "KerasState",
    "Variable",
    "average_",
    "average_numbers",
    "broadcast_",
    "broadcast_variables",
    "check_devices",
    "gather_bytes",
    "horovod",
    "native",
    "number_of",
    "operations",
    "outside_graphs",
    "run",
    "runtime",
    "signal",
    "uncompiled",
    "when_it_runs",
]

Variable = torch.Tensor  # which `native` makes of Keras's
_numbers = gradients.Numbers(runtime)

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Run a function, and all that it calls, as it is where `jit_compile=True` compiles the training around it.

    What counts, waits or keeps weak references must not be traced: on some of it, such as `weakref.finalize`, PyTorch's
    compiler fails, and not every time.
    """
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


outside_graphs = nullcontext  # there are none


def when_it_runs(function: Callable[..., Any], *inputs: Any, **kind: Any) -> Any:
    """Call a function: there are no graphs."""
    return function(*inputs)


def native(variable: Any) -> Any:
    """PyTorch's parameter behind a variable of Keras; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def number_of(variable: Any, process_set: ProcessSet) -> int:
    """A number that tells a variable from all others of a process set, the same on every rank of it."""
    return _numbers.of(native(variable), process_set)


class _Arrived(NamedTuple):
    """A family at which a step has arrived."""

    buckets: list[GradientBucket]
    parameters: list[torch.nn.Parameter]  # in the order of the gradients

    def results(self) -> list[torch.Tensor]:
        """What is in the buckets."""
        views = {parameter: view for bucket in self.buckets for parameter, view in bucket.views.items()}
        return [views[parameter] for parameter in self.parameters]

    def take(self, process_set: ProcessSet) -> int:
        """Let the results be those of the oldest round that this rank has not taken; how many gradients are in them."""
        return take_round(self.buckets, process_set.process_set_id)


class _Family(gradients.Family):
    def __init__(
        self, reducer: gradients.GradientReducer, arrived: _Arrived, variables: list[Any], apply: gradients.Apply
    ) -> None:
        super().__init__(reducer, [bucket.name for bucket in arrived.buckets], variables, apply)
        self._arrived = arrived

    def apply_arrived(self, arrived: _Arrived) -> None:
        self._arrived = arrived
        self.apply_rounds()

    def apply_rounds(self) -> None:
        while count := self._arrived.take(self.process_set):
            self._apply(self._arrived.results(), self._variables, self.steps_of(count))


class GradientReducer(gradients.GradientReducer):
    """Combines the gradients of a step after backward has made them all; nobody's gradients are changed in place.

    Each bucket arrives as soon as it is packed; then all are waited for. Results are valid until the next step.
    """

    average, total, runtime = Average, Sum, runtime
    number_of = staticmethod(number_of)
    __call__ = uncompiled(gradients.GradientReducer.__call__)
    apply_combined = uncompiled(gradients.GradientReducer.apply_combined)

    def __init__(self, name: str, sync: Policy, arguments: dict[str, Any], **options: Any) -> None:
        if arguments["fusion"] is not None:
            raise ValueError(
                "fusion cannot be used with Keras on PyTorch: it hands gradients over when backward has made them all, and "
                "then nothing is left to win by a plan"
            )
        super().__init__(name, sync, arguments, **options)
        # By what their names begin with. With the variables that they hold, in the order of the parameters.
        self._buckets: dict[str, list[tuple[GradientBucket, list[Any]]]] = {}

    @staticmethod
    def _divided(gradient: Any, divisor: int) -> Any:
        return gradient / divisor

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_sparse:
            return gradient.detach()
        if not self._arguments["sparse_as_dense"]:
            raise ValueError("Keras cannot apply sparse gradients on PyTorch; pass sparse_as_dense=True")
        return gradient.detach().to_dense()

    # --- Full

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
        # One by one, but for the groups that were asked for.
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

    # --- Partial

    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
        _, arrived, infos = self._arrive(gradients, variables)
        for bucket in arrived.buckets:
            bucket.unpack()
        return arrived.results(), infos

    def _arrive(self, gradients: list[Any], variables: list[Any]) -> tuple[str, _Arrived, list[Any]]:
        dense = [self._dense(gradient) for gradient in gradients]
        parameters = [native(variable) for variable in variables]
        name = self._step_name(variables, [parameter.dtype for parameter in parameters])
        try:
            buckets = [bucket for bucket, _ in self._buckets_of(name, variables)]
            infos = self._exchange(name, dict(zip(parameters, dense, strict=True)))
        except BaseException:
            # What is under way may go on reading and writing them; the handles keep their memory alive.
            self._buckets.pop(name, None)
            raise
        return name, _Arrived(buckets, parameters), infos

    def _buckets_of(self, name: str, variables: list[Any]) -> list[tuple[GradientBucket, list[Any]]]:
        if name not in self._buckets:
            parameters = [native(variable) for variable in variables]
            sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
            compression = self._arguments["compression"]
            self._buckets[name] = []
            for index, planned in enumerate(self._plan(variables, list(map(kind, parameters)), sizes)):
                own = [variables[i] for i in planned]
                members = self._members(own)
                packed = [parameters[i] for i in planned]
                bucket = GradientBucket(f"{name}.{index}", packed, compression, members, unscaled=self.unscaled)
                self._buckets[name].append((bucket, own))
            self._own(bucket.name for bucket, _ in self._buckets[name])
        return self._buckets[name]

    # --- Families

    def _family_of(self, arrived: _Arrived, variables: list[Any], apply: gradients.Apply) -> gradients.Family:
        return _Family(self, arrived, variables, apply)

    def _apply_first(self, arrived: _Arrived, apply: Callable[[list[Any], Any], None]) -> None:
        count = arrived.take(self.process_set)
        if count:
            apply(arrived.results(), count)

    @staticmethod
    def _unless_empty(infos: list[Any], apply: Callable[[], None]) -> None:
        if not infos or not all(info.empty for info in infos):
            apply()

    def _exchange(self, name: str, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> list[Any]:
        for bucket, _ in self._buckets[name]:
            for parameter in bucket.parameters:
                bucket.put(parameter, gradients[parameter])
            bucket.arrive(partial(self._start, bucket.name, bucket.members), 1.0)
        infos = []
        for bucket, _ in self._buckets[name]:
            handle: Any = bucket.handle
            bucket.wait()
            bucket.handle = None
            infos.append(handle.handle.info())
        return infos

    def _start(self, name: str, members: tuple[str, ...], wire: torch.Tensor) -> PartialHandle:
        # Asked for anew in each step: an elastic job may have another size by then. Made once for each size.
        config = make_config(
            dtype=wire.dtype,
            shape=tuple(wire.shape),
            device=device_number(wire.device),
            sync=self._sync,
            size=self.runtime.size_of(self.process_set),
            op=self._arguments["op"],
            members=members,
            **self._options,
        )
        return submit(wire, wire, name, self.process_set, config)

    def _bucket_names(self) -> Iterable[str]:
        return [bucket.name for buckets in self._buckets.values() for bucket, _ in buckets]

    # --- Rounds

    def _missed(self) -> list[tuple[Any, torch.Tensor]]:
        process_set = self.process_set.process_set_id
        missed: list[tuple[Any, torch.Tensor]] = []
        for buckets in self._buckets.values():
            for bucket, variables in buckets:
                bucket.collect(process_set)
                bucket.unpack()
                if not bucket.empty:
                    missed += zip(variables, bucket.views.values(), strict=True)
        return missed


# --- Models


def average_(
    variables: Sequence[Any],
    name: str,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    *,
    steps: torch.Tensor | int = 0,
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
) -> RoundInfo:
    """As on TensorFlow: average floating-point variables as the policy says, as one message."""
    bucket = ModelBucket([native(variable) for variable in variables])
    bucket.pack()
    handle = model_operations.average_async(
        bucket.flat, bucket.flat, name, policy, process_set, int(steps), max_staleness, grace_ms
    )
    handle.synchronize()
    info = handle.info()
    if takes_late(policy) or not info.late:
        bucket.unpack()
    return info


# --- Callbacks


def check_devices(**devices: str) -> None:
    """Raise ValueError where a device is given."""
    given = [name for name, device in devices.items() if device]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be used with Keras on PyTorch: tensors are reduced on the device that they are on"
        )


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Give variables of Keras, or tensors, the values of one rank: see `horovod_partial.tensorflow.broadcast_variables`."""
    # What is late belongs to the values before.
    runtime.flush(horovod.global_process_set.process_set_id, compares=False)
    named = [(f"broadcast_variables.{index}", native(variable)) for index, variable in enumerate(variables)]
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for _, tensor in named]
    everyone = horovod.global_process_set
    gather = partial(gather_bytes, name="broadcast_variables.kinds", process_set=everyone)
    check_alike(kinds, gather, range(horovod.size()))
    horovod.broadcast_parameters([(name, _as_sent(tensor.detach())) for name, tensor in named], root_rank)


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, as a type that Horovod 0.28.1 broadcasts: the others travel as their bits."""
    bits = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(tensor.dtype)
    return tensor if bits is None else tensor.view(bits)


def broadcast_(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """As `broadcast_variables`, which knows no devices."""
    broadcast_variables(variables, root_rank)


def average_numbers(numbers: Sequence[float], name: str, device: str) -> list[float]:
    """Means over all ranks, in double precision."""
    return horovod.allreduce(torch.tensor(numbers, dtype=torch.float64), name=name).tolist()


# --- Elastic jobs


class KerasState(elastic.KerasState):
    """A model of Keras and its optimizer, and further properties: see `horovod_partial.tensorflow.elastic`."""

    functions = elastic.Functions(broadcast_variables, horovod.broadcast_object, horovod.rank)
