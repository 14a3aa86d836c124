"""Gradients combined over the ranks, for the tape and for Keras's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import _make_allreduce_grads_fn
from horovod.tensorflow.mpi_ops import Average, Sum

from horovod_partial import _core, gradients
from horovod_partial.policies import Policy
from horovod_partial.tensorflow.graph import RoundInfo, arrive, native, refuse_xla, runtime, wire_dtype

_numbers = gradients.Numbers(runtime)


class GradientReducer(gradients.GradientReducer):
    """Combines the gradients of a step in eager code or in a graph; a bucket arrives as soon as its gradients are there."""

    average, total, runtime = Average, Sum, runtime

    def __init__(
        self, name: str, sync: Policy, arguments: dict[str, Any], *, drop_nonfinite_results: bool = False
    ) -> None:
        super().__init__(name, sync, arguments, drop_nonfinite_results=drop_nonfinite_results)
        # By bucket: variable, wire's dtype and shape, and what makes a gradient of it.
        self.layouts: dict[str, list[tuple[Any, tf.DType, tf.TensorShape, Callable[[tf.Tensor], tf.Tensor]]]] = {}

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
        wires, restores = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            wire, restore = _compressed(self._dense(gradient, variable), compression)
            wires.append(wire)
            restores.append(restore)
        dtypes = [wire.dtype for wire in wires]
        sizes = [wire.shape.num_elements() * wire.dtype.size for wire in wires]
        name, planned = self._step_name(variables, dtypes), self._plan(variables, dtypes, sizes)
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

    def _bucket_names(self) -> Iterable[str]:
        return self.layouts

    # --- Rounds, in eager code

    def flush(self) -> list[tuple[Any, tf.Tensor]]:
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


def _compressed(tensor: tf.Tensor, compression: Any) -> tuple[tf.Tensor, Any]:
    wire, context = compression.compress(tensor)
    if wire.shape != tensor.shape:
        raise ValueError("buckets need a compression that changes the dtype only; use Full() for others")
    travelling = tf.cast(wire, wire_dtype(wire.dtype))
    return travelling, lambda result: compression.decompress(tf.cast(result, wire.dtype), context)
