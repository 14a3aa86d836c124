"""Gradients combined over the ranks, for the tape and for Keras's optimizers."""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.tensorflow import _make_allreduce_grads_fn
from horovod.tensorflow.mpi_ops import Average, Sum

from horovod_partial import _core, bucket_config, bucket_plan
from horovod_partial.arguments import is_average
from horovod_partial.policies import Full, Policy
from horovod_partial.settings import settings
from horovod_partial.tensorflow.graph import RoundInfo, arrive, native, refuse_xla, runtime, wire_dtype

_generation = 0  # of Horovod: ranks that are new in an elastic job count from the start, and so do the others then
_numbers: dict[int, int] = {}  # of variables, in the order in which they are first seen: the same on all ranks
_counter = itertools.count()


def number_of(variable: Any) -> int:
    """A number that tells a variable from all others of this process, the same on every rank."""
    global _generation, _counter
    if _generation != runtime.generation:
        _generation, _counter = runtime.generation, itertools.count()
        _numbers.clear()
    key = id(variable)
    if key not in _numbers:
        _numbers[key] = next(_counter)
        weakref.finalize(variable, _numbers.pop, key, None)
    return _numbers[key]


class GradientReducer:
    """Combines the gradients of a step under a gradient policy.

    Under `Full` this is Horovod's own path, tensor by tensor. Under a partial policy gradients are packed into buckets, in
    reverse order of the variables and of one type each, which arrive as soon as their gradients are there.

    Args:
        name: prefix of the names of tensors and buckets.
        sync: the policy.
        arguments: those of Horovod's optimizer (`compression`, `sparse_as_dense`, `op`, `gradient_predivide_factor`, `groups`,
            `process_set`, `device_dense`, `device_sparse`, `scale_local_gradients`), and `max_staleness`, `missed`, `divisor`
            and `grace_ms`.
        drop_nonfinite_results: as in the core: for trainings that skip a step whose gradients are not finite.
    """

    def __init__(
        self, name: str, sync: Policy, arguments: dict[str, Any], *, drop_nonfinite_results: bool = False
    ) -> None:
        self.name = name
        self.process_set: ProcessSet = arguments["process_set"]
        self._sync = sync
        self._arguments = arguments
        # By bucket: variable, wire's dtype and shape, and what makes a gradient of it.
        self.layouts: dict[str, list[tuple[Any, tf.DType, tf.TensorShape, Callable[[tf.Tensor], tf.Tensor]]]] = {}
        self._local: set[int] = set()  # numbers of variables whose gradients stay on this rank
        predivide = arguments["gradient_predivide_factor"]
        if predivide != 1.0 and arguments["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if isinstance(sync, Full):
            return
        self._average = is_average(arguments["op"], Average, Sum)
        self._options = {
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide,
            "max_staleness": arguments["max_staleness"],
            "grace_ms": arguments["grace_ms"],
            "missed": arguments["missed"],
            "divisor": arguments["divisor"],
            "drop_nonfinite": True,
            "drop_nonfinite_results": drop_nonfinite_results,
        }
        self._bucket_arguments()  # wrong settings fail here, not in the first step

    def register_local(self, variable: Any) -> None:
        """Leave this variable's gradient to this rank; it is divided by the number of ranks, as the others' are."""
        self._local.add(number_of(native(variable)))

    def is_local(self, variable: Any) -> bool:
        """Whether this variable's gradient stays on this rank."""
        return number_of(native(variable)) in self._local

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[RoundInfo]]:
        """The combined gradients, None where there was none; and what became of each bucket, in no order."""
        combined = list(gradients)
        shared = [i for i, variable in enumerate(variables) if combined[i] is not None and not self.is_local(variable)]
        if self._arguments["scale_local_gradients"]:
            for i in set(range(len(variables))) - set(shared):
                if combined[i] is not None:
                    combined[i] = _divided(combined[i], self.process_set.size())
        if not shared or not self.process_set.included():
            return combined, []
        reduce = self._reduce_fully if isinstance(self._sync, Full) else self._reduce_partially
        results, infos = reduce([combined[i] for i in shared], [variables[i] for i in shared])
        for i, result in zip(shared, results, strict=True):
            combined[i] = result
        return combined, infos

    # --- Full

    def _reduce_fully(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[RoundInfo]]:
        refuse_xla()
        arguments = self._arguments
        groups = arguments["groups"]
        if isinstance(groups, list):
            groups = [[native(variable) for variable in group] for group in groups]
        # Another one in eager code than in a graph; Horovod keeps both.
        reduce = _make_allreduce_grads_fn(
            self.name,
            arguments["device_dense"],
            arguments["device_sparse"],
            arguments["compression"],
            arguments["sparse_as_dense"],
            arguments["op"],
            arguments["gradient_predivide_factor"],
            groups,
            process_set=self.process_set,
        )
        return reduce(gradients, [native(variable) for variable in variables]), []

    # --- Partial

    def _bucket_arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return bucket_config.arguments(
            sync=self._sync,
            size=self.process_set.size(),
            average=self._average,
            **self._options,
        )

    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[RoundInfo]]:
        if self.process_set.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1":
            return gradients, []
        compression = self._arguments["compression"]
        if not all(isinstance(native(variable), tf.Variable) for variable in variables):
            raise ValueError("a partial policy needs variables as sources: their gradients are told apart by them")
        wires, restores = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            wire, restore = _compressed(self._dense(gradient, variable), compression)
            wires.append(wire)
            restores.append(restore)
        numbers = [number_of(native(variable)) for variable in variables]
        planned = bucket_plan.plan(
            [wire.dtype for wire in wires],
            [wire.shape.num_elements() * wire.dtype.size for wire in wires],
            self._groups(numbers),
            settings().bucket_mb * 1e6,
        )
        members = f"{self.process_set.process_set_id} {numbers} {[str(wire.dtype) for wire in wires]}"
        name = f"{self.name}.{hashlib.sha256(members.encode()).hexdigest()[:8]}"
        arguments = self._bucket_arguments()
        for index, bucket in enumerate(planned):
            self.layouts[f"{name}.{index}"] = [
                (variables[i], wires[i].dtype, wires[i].shape, restores[i]) for i in bucket
            ]
        results: list[Any] = [None] * len(wires)
        infos = []
        for index, bucket in enumerate(planned):
            reduced, info = arrive(
                [wires[i] for i in bucket],
                f"{name}.{index}",
                self.process_set,
                *arguments,
                step=name,
                step_buckets=len(planned),
            )
            infos.append(info)
            for i, result in zip(bucket, reduced, strict=True):
                results[i] = restores[i](result)
        return results, infos

    def _dense(self, gradient: Any, variable: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._arguments["sparse_as_dense"]:
            raise ValueError("buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full()")
        tensor = tf.convert_to_tensor(gradient)
        if not tensor.shape.is_fully_defined():
            tensor = tf.ensure_shape(tensor, variable.shape)
        return tensor

    def _groups(self, numbers: list[int]) -> list[list[int]]:
        groups = self._arguments["groups"]
        if groups is None:
            return []
        if isinstance(groups, int):
            return split_list(list(range(len(numbers))), groups)
        positions = {number: i for i, number in enumerate(numbers)}
        wanted = [[number_of(native(variable)) for variable in group] for group in groups]
        return [[positions[number] for number in group if number in positions] for group in wanted]

    # --- Rounds, in eager code

    def flush(self) -> list[tuple[Any, tf.Tensor]]:
        """Deliver what any rank has pending; every rank must come.

        Returns the gradients that this rank has missed, with their variables.
        """
        process_set = self.process_set.process_set_id
        runtime.flush(process_set)
        missed: list[tuple[Any, tf.Tensor]] = []
        for name, layout in self.layouts.items():
            dtype = layout[0][1].as_numpy_dtype
            offsets = _core.packed_offsets(
                [shape.num_elements() for _, _, shape, _ in layout], np.dtype(dtype).itemsize
            )
            flat = np.zeros(offsets[-1], dtype)
            handle = runtime.collect(process_set, name, flat.ctypes.data)
            if handle is None or handle.info().empty:
                continue
            for (variable, _, shape, restore), begin in zip(layout, offsets, strict=False):
                result = flat[begin : begin + shape.num_elements()].reshape(shape)
                missed.append((variable, restore(tf.constant(result))))
        return missed

    @property
    def rounds(self) -> int:
        """Rounds that all buckets have ended on this rank; 0 before the first step."""
        process_set = self.process_set.process_set_id
        return min((runtime.completed(process_set, name) for name in self.layouts), default=0)


def _divided(gradient: Any, divisor: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


def _compressed(tensor: tf.Tensor, compression: Any) -> tuple[tf.Tensor, Any]:
    wire, context = compression.compress(tensor)
    if wire.shape != tensor.shape:
        raise ValueError("buckets need a compression that changes the dtype only; use Full() for others")
    travelling = tf.cast(wire, wire_dtype(wire.dtype))
    return travelling, lambda result: compression.decompress(tf.cast(result, wire.dtype), context)


def subclass(base: type, methods: type, **members: Any) -> type:
    """A subclass of the same name, with `methods` in it, that passes for its base in what is saved."""
    body = {key: value for key, value in vars(methods).items() if key not in ("__dict__", "__weakref__")}
    return type(base.__name__, (base,), {**body, "__module__": base.__module__, "_base": base, **members})


def check_arguments(arguments: dict[str, Any]) -> None:
    """Horovod's checks of the arguments of an optimizer or a tape, with its messages."""
    groups = arguments["groups"]
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
    missed = arguments["missed"]
    if missed not in (None, "auto", "sum", "latest"):
        raise ValueError(
            f"missed must be 'auto', 'sum' or 'latest' with TensorFlow, not {missed!r}: an optimizer of Keras counts its "
            "steps for all variables together, and cannot replay those of one bucket"
        )
    if missed in (None, "auto"):
        default = settings().missed
        arguments["missed"] = default if default == "latest" else "sum"
