"""Combines the gradients of a step over the ranks, for TensorFlow's tape and for Keras's optimizers on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import _make_allreduce_grads_fn
from horovod.tensorflow.mpi_ops import Average, Sum

from horovod_partial.exchange import gradients
from horovod_partial.exchange.arguments import warn_of_float32
from horovod_partial.policies import Policy, SharedUpdates
from horovod_partial.tensorflow.buckets import (
    Arrived,
    Member,
    has_round,
    memory_of,
    new_memory,
    on_device_of,
    take_round,
)
from horovod_partial.tensorflow.graph import arrive, native, refuse_xla, runtime, wire_dtype

_numbers = gradients.Numbers(runtime)


class GradientExchange(gradients.GradientExchange):
    """Combines a step's gradients over the ranks, also in graphs. Arrives at a bucket when all its gradients exist."""

    average, total, runtime = Average, Sum, runtime

    def __init__(self, name: str, sync: Policy | SharedUpdates, arguments: dict[str, Any], **options: Any) -> None:
        super().__init__(name, sync, arguments, **options)
        # The variables of each bucket, by the bucket's name. With each variable comes a description of its gradient.
        self._buckets: dict[str, list[tuple[Any, Member]]] = {}

    @staticmethod
    def number_of(variable: Any, process_set: ProcessSet) -> int:
        return _numbers.of(native(variable), process_set)

    @staticmethod
    def _divided(gradient: Any, divisor: int) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
        return gradient / divisor

    def _reduce_fully(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        refuse_xla()
        arguments = self._arguments
        groups = arguments["groups"]
        if isinstance(groups, list):
            groups = [[native(variable) for variable in group] for group in groups]
        if self._owner is not None and not tf.executing_eagerly():
            # Keras numbers the layers of all models that a rank makes, so names of tensors may differ between ranks.
            # Horovod names reductions after tensors. Give these equal names on all ranks, or ranks would wait for ever.
            with tf.name_scope(f"{self.name}/"):
                gradients = [
                    tf.nest.map_structure(tf.identity, gradient, expand_composites=True) for gradient in gradients
                ]
        # Horovod caches the reducing function, so making it in each step costs little.
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
        return reduce(gradients, [native(variable) for variable in variables])

    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        _, arrived = self._arrive(gradients, variables)
        results: list[Any] = [None] * len(gradients)
        for bucket in arrived:
            for i, member, result in zip(bucket.positions, bucket.members, bucket.results, strict=True):
                results[i] = member.restore(result)
        return results

    def _wires(self, gradients: list[Any], variables: list[Any]) -> tuple[list[tf.Tensor], list[Member]]:
        if not all(isinstance(native(variable), tf.Variable) for variable in variables):
            raise ValueError("a partial policy needs variables as sources, because buckets are named after variables")
        wires, members = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            dense = self._dense(gradient, variable)
            wire, restore = _compressed(dense, self._arguments["compression"])
            if self.unscaled and wire.dtype == tf.float16:  # in float16, small gradients without loss scale become 0
                warn_of_float32()
                wire, restore = tf.cast(dense, tf.float32), partial(tf.cast, dtype=dense.dtype)
            wires.append(wire)
            members.append(Member(wire.dtype, wire.shape, restore))
        return wires, members

    def _arrive(self, gradients: list[Any], variables: list[Any]) -> tuple[str, list[Arrived]]:
        wires, members = self._wires(gradients, variables)
        dtypes = [wire.dtype for wire in wires]
        name = self._step_name(variables, dtypes)
        plan = self._plan(variables, dtypes, [wire.shape.num_elements() * wire.dtype.size for wire in wires])
        arrived = []
        planned = {f"{name}.{index}": positions for index, positions in enumerate(plan)}
        self._own(planned.keys() - self._buckets.keys())
        for bucket, positions in planned.items():
            own = [members[i] for i in positions]
            self._buckets[bucket] = [(variables[i], members[i]) for i in positions]
            spec = self._bucket_spec(self._members([variables[i] for i in positions]))
            results, _ = arrive([wires[i] for i in positions], bucket, self.process_set, spec)
            arrived.append(Arrived(bucket, positions, own, results, results[0].device))
        return name, arrived

    def _applier_of(self, arrived: list[Arrived], variables: list[Any], apply: gradients.Apply) -> StepApplier:
        return StepApplier(self, arrived, variables, apply)

    def _apply_first(self, arrived: list[Arrived], apply: Callable[[list[Any], Any], None]) -> None:
        results, count = take_round(self.process_set, arrived, memory_of(arrived))
        tf.cond(count > 0, lambda: done(lambda: apply(results, count)), nothing)

    def _dense(self, gradient: Any, variable: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._arguments["sparse_as_dense"]:
            raise ValueError("buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full()")
        tensor = tf.convert_to_tensor(gradient)
        if not tensor.shape.is_fully_defined():
            tensor = tf.ensure_shape(tensor, variable.shape)
        return tensor

    def _bucket_names(self) -> Iterable[str]:
        return self._buckets


class StepApplier(gradients.StepApplier):
    """Applies the rounds of a step's gradients, in TensorFlow. Training and flushes apply them by the same function.

    TensorFlow optimizes graphs, so an update in a graph and the same update in eager code may differ in the last bit.
    How it optimizes a function depends on the function's caller. So a flush calls the function in the same way as
    training: from within another function.
    """

    def __init__(
        self, exchange: gradients.GradientExchange, arrived: list[Arrived], variables: list[Any], apply: gradients.Apply
    ) -> None:
        family = runtime.family(exchange.process_set, [bucket.name for bucket in arrived])
        super().__init__(exchange, family, variables, apply)
        self._buckets = [bucket._replace(results=[]) for bucket in arrived]
        self._in_training = self._in_flush = self._apply_all
        if not tf.executing_eagerly():
            as_it_is = {"_noinline": True}
            self._in_training = tf.function(self._apply_all, autograph=False, experimental_attributes=as_it_is)
            self._in_flush = tf.function(lambda memory: self._in_training(memory), autograph=False)

    def apply_arrived(self, arrived: list[Arrived]) -> None:
        with on_device_of(arrived):
            self._in_training(memory_of(arrived))

    def apply_rounds(self) -> None:
        with on_device_of(self._buckets):
            self._in_flush(new_memory(self._buckets))

    def _apply_all(self, memory: list[tf.Tensor]) -> None:
        def another(_: tf.Tensor, *memory: tf.Tensor) -> list[tf.Tensor]:
            results, count = take_round(self.process_set, self._buckets, memory)
            with tf.device(None):  # let TensorFlow choose the device on which variables are updated
                update = lambda: self._apply(results, self._variables, runtime.steps_of(self._family, count))
                tf.cond(count > 0, lambda: done(update), nothing)
            # Run `has_round` last: it begins a new iteration. TensorFlow orders side effects only within an iteration.
            before = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
            with tf.control_dependencies(before):
                return [has_round(self.process_set, self._buckets), *memory]

        more = has_round(self.process_set, self._buckets)
        tf.while_loop(lambda more, *_: more, another, [more, *memory], parallel_iterations=1)


def nothing() -> tf.Tensor:
    """Apply nothing: the branch of `tf.cond` where there is no round or gradient to apply."""
    return tf.constant(0)


def done(apply: Callable[[], None]) -> tf.Tensor:
    """Apply the gradients of a round: the branch of `tf.cond` where there are gradients."""
    apply()
    return tf.constant(1)


def _compressed(tensor: tf.Tensor, compression: Any) -> tuple[tf.Tensor, Any]:
    wire, context = compression.compress(tensor)
    if wire.shape != tensor.shape:
        raise ValueError("buckets need a compression that changes the dtype only; use Full() for others")
    dtype = wire.dtype
    return tf.cast(wire, wire_dtype(dtype)), lambda result: compression.decompress(tf.cast(result, dtype), context)
