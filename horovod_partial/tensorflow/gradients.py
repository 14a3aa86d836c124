"""Gradients combined over the ranks, for the tape and for Keras's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from horovod.tensorflow import _make_allreduce_grads_fn
from horovod.tensorflow.mpi_ops import Average, Sum

from horovod_partial.exchange import gradients
from horovod_partial.fusion import FusionPlan, MergedGradients
from horovod_partial.fusion.planner import Gradient
from horovod_partial.policies import Policy
from horovod_partial.tensorflow.buckets import Member, collect
from horovod_partial.tensorflow.fusion import Fusion, fusion_of
from horovod_partial.tensorflow.graph import RoundInfo, arrive, native, refuse_xla, runtime, wire_dtype

_numbers = gradients.Numbers(runtime)


class GradientReducer(gradients.GradientReducer):
    """Combines the gradients of a step in eager code or in a graph; a bucket arrives as soon as its gradients are there."""

    average, total, runtime = Average, Sum, runtime

    def __init__(self, name: str, sync: Policy, arguments: dict[str, Any], **options: Any) -> None:
        super().__init__(name, sync, arguments, **options)
        self._buckets: dict[str, list[tuple[Any, Member]]] = {}  # by name, with the variables; or, with fusion:
        self._merged: dict[str, tuple[Fusion, list[Any]]] = {}

    @staticmethod
    def number_of(variable: Any) -> int:
        return _numbers.of(native(variable))

    @staticmethod
    def _divided(gradient: Any, divisor: int) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
        return gradient / divisor

    # --- Full

    def _reduce_fully(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        refuse_xla()
        arguments = self._arguments
        groups = arguments["groups"]
        if isinstance(groups, list):
            groups = [[native(variable) for variable in group] for group in groups]
        if self._owner is not None and not tf.executing_eagerly():
            # Horovod would name a reduction after its tensor, and Keras numbers its layers through the process: a rank that
            # has made one model more than the others, to look at a checkpoint, would wait for ever.
            with tf.name_scope(f"{self.name}/"):
                gradients = [
                    tf.nest.map_structure(tf.identity, gradient, expand_composites=True) for gradient in gradients
                ]
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
        return reduce(gradients, [native(variable) for variable in variables])

    # --- Partial

    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[RoundInfo]]:
        compression = self._arguments["compression"]
        if not all(isinstance(native(variable), tf.Variable) for variable in variables):
            raise ValueError("a partial policy needs variables as sources: their gradients are told apart by them")
        wires, members = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            wire, restore = _compressed(self._dense(gradient, variable), compression)
            wires.append(wire)
            members.append(Member(wire.dtype, wire.shape, restore))
        dtypes = [wire.dtype for wire in wires]
        sizes = [wire.shape.num_elements() * wire.dtype.size for wire in wires]
        name, planned = self._step_name(variables, dtypes), self._plan(variables, dtypes, sizes)
        if self._fusion is not None:
            return self._merge(self._fusion, f"{name}.merged", wires, members, variables, planned)
        spec = self._bucket_spec()
        self._own({f"{name}.{index}" for index in range(len(planned))} - self._buckets.keys())
        for index, bucket in enumerate(planned):
            self._buckets[f"{name}.{index}"] = [(variables[i], members[i]) for i in bucket]
        results: list[Any] = [None] * len(wires)
        infos = []
        for index, bucket in enumerate(planned):
            reduced, info = arrive([wires[i] for i in bucket], f"{name}.{index}", self.process_set, spec)
            infos.append(info)
            for i, result in zip(bucket, reduced, strict=True):
                results[i] = members[i].restore(result)
        return results, infos

    def _merge(
        self,
        fusion: MergedGradients,
        name: str,
        wires: list[tf.Tensor],
        members: list[Member],
        variables: list[Any],
        messages: list[list[int]],
    ) -> tuple[list[Any], list[RoundInfo]]:
        described = [
            Gradient(
                # By position: Keras numbers its layers through the process.
                name=f"{position}.{variable.name.removesuffix(':0')}",
                kind=wire.dtype.name,
                shape=tuple(wire.shape),
                dtype=native(variable).dtype.name,
                nbytes=wire.shape.num_elements() * wire.dtype.size,
            )
            for position, (variable, wire) in enumerate(zip(variables, wires, strict=True))
        ]
        merged = fusion_of(name, fusion, self.process_set, described, messages, lives_on=self._owner is None)
        self._merged[name] = merged, variables
        return merged.reduce(wires, members, self._bucket_spec())

    def _dense(self, gradient: Any, variable: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._arguments["sparse_as_dense"]:
            raise ValueError(
                "buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full() without fusion"
            )
        tensor = tf.convert_to_tensor(gradient)
        if not tensor.shape.is_fully_defined():
            tensor = tf.ensure_shape(tensor, variable.shape)
        return tensor

    # --- Rounds, in eager code

    def _bucket_names(self) -> Iterable[str]:
        return self._buckets

    def _missed(self) -> list[tuple[Any, tf.Tensor]]:
        missed: list[tuple[Any, tf.Tensor]] = []
        for name, bucket in self._buckets.items():
            results = collect(self.process_set, name, [member for _, member in bucket])
            missed += [(variable, result) for (variable, _), result in zip(bucket, results, strict=False)]
        for merged, variables in self._merged.values():
            missed += [(variables[i], result) for i, result in merged.collect()]
        return missed

    @property
    def rounds(self) -> int:
        if self._fusion is None:
            return super().rounds
        return min((merged.rounds for merged, _ in self._merged.values()), default=0)

    @property
    def fusion_plan(self) -> FusionPlan | None:
        return next((merged.plan for merged, _ in reversed(self._merged.values())), None)


def _compressed(tensor: tf.Tensor, compression: Any) -> tuple[tf.Tensor, Any]:
    wire, context = compression.compress(tensor)
    if wire.shape != tensor.shape:
        raise ValueError("buckets need a compression that changes the dtype only; use Full() without fusion for others")
    dtype = wire.dtype
    return tf.cast(wire, wire_dtype(dtype)), lambda result: compression.decompress(tf.cast(result, dtype), context)
