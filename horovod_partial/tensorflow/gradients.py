"""TensorFlow's part in combining gradients over the ranks, for tapes and for optimizers of Keras on TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf
from horovod.tensorflow import _make_allreduce_grads_fn

from horovod_partial.exchange.arguments import warn_of_float32
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.exchange.gradients import Kind, Numbers, Restore, Wire
from horovod_partial.tensorflow.buckets import Buckets
from horovod_partial.tensorflow.graph import native, refuse_xla, runtime, wire_dtype


class TensorFlow:
    """Implements `horovod_partial.exchange.gradients.Framework`, in eager code and in graphs."""

    runtime, buckets = runtime, Buckets
    number_of = staticmethod(Numbers(runtime, native).of)

    def divided(self, gradient: Any, divisor: int) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
        return gradient / divisor

    def wire(self, gradient: Any, variable: Any, options: BucketOptions) -> Wire:
        if not isinstance(native(variable), tf.Variable):
            raise ValueError("a partial policy needs variables as sources, because buckets are named after variables")
        tensor, compression = dense(gradient, variable, sparse_as_dense=options.sparse_as_dense), options.compression
        wire, context = compression.compress(tensor)
        if wire.shape != tensor.shape:
            raise ValueError("buckets need a compression that changes the dtype only; use Full() for others")
        dtype = wire.dtype
        wire = tf.cast(wire, wire_dtype(dtype))
        restore: Restore = lambda result: compression.decompress(tf.cast(result, dtype), context)
        if options.unscaled and wire.dtype == tf.float16:  # in float16, small gradients without loss scale would be 0
            warn_of_float32()
            wire, restore = tf.cast(tensor, tf.float32), partial(tf.cast, dtype=tensor.dtype)
        return Wire(wire, Kind(wire.dtype, wire.shape.num_elements() * wire.dtype.size), restore)

    def reduce_fully(
        self, name: str, gradients: list[Any], variables: list[Any], arguments: dict[str, Any], *, is_optimizer: bool
    ) -> list[Any]:
        refuse_xla()
        groups = arguments["groups"]
        if isinstance(groups, list):
            groups = [[native(variable) for variable in group] for group in groups]
        if is_optimizer and not tf.executing_eagerly():
            # Horovod names reductions after tensors. If the names differ between ranks, the ranks wait for ever. Keras
            # numbers all layers of a process, so the names may differ. Copy gradients to tensors with equal names.
            with tf.name_scope(f"{name}/"):
                gradients = [
                    tf.nest.map_structure(tf.identity, gradient, expand_composites=True) for gradient in gradients
                ]
        # Horovod caches the reducing function, so making it in each step costs little.
        reduce = _make_allreduce_grads_fn(
            name,
            arguments["device_dense"],
            arguments["device_sparse"],
            arguments["compression"],
            arguments["sparse_as_dense"],
            arguments["op"],
            arguments["gradient_predivide_factor"],
            groups,
            process_set=arguments["process_set"],
        )
        return reduce(gradients, [native(variable) for variable in variables])


def dense(gradient: Any, variable: Any, *, sparse_as_dense: bool) -> tf.Tensor:
    """Return a variable's gradient as a dense tensor, zeros for None. Sparse gradients need `sparse_as_dense`."""
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
        raise ValueError("buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full()")
    tensor = tf.convert_to_tensor(gradient)
    return tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, variable.shape)


framework = TensorFlow()
