"""Work sharing in TensorFlow: sums the gradients of this rank's micro-batches, and applies updates in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from horovod_partial import _attach
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.exchange.gradients import Kind, Planned, plan, step_name
from horovod_partial.runtime import bucket_config
from horovod_partial.tensorflow.buckets import functions_of, repeat
from horovod_partial.tensorflow.gradients import framework
from horovod_partial.tensorflow.graph import runtime, wire_dtype


class _Bucket:
    """Gradients of some variables, one after the other in memory of the host.

    `positions` are the positions of the bucket's gradients in a step. `sum` is the sum of this rank's gradients in
    `made` micro-batches of the open update. After `take`, `sum` has the gradients of the update. `wire` is the memory
    that travels: `sum` itself, or a copy in the type that travels. `handle` is the last arrival in the open update;
    None before the first arrival.
    """

    def __init__(self, planned: Planned, shapes: list[Any], dtype: Any) -> None:
        self.name, self.positions, self.members = planned.name, planned.positions, planned.members
        sizes = [shape.num_elements() for shape in shapes]
        self.sum: npt.NDArray[Any] = np.zeros(sum(sizes), dtype)
        self.wire = self.sum if planned.dtype == dtype else np.zeros(sum(sizes), planned.dtype)
        self.handle: _attach.Handle | None = None
        self.made = 0
        parts = np.split(self.sum, np.cumsum(sizes)[:-1])
        self.views = [part.reshape(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


class SharedGradients:
    """The sum of the gradients of the micro-batches that this rank computes under `hvd.WorkSharing`.

    The sum lies in memory of the host, so gradients on a GPU are copied to the host, and results are copied back.
    `name` is the prefix of the buckets' names. The gradients are those of `variables`.
    """

    def __init__(self, name: str, options: BucketOptions, variables: list[Any]) -> None:
        self.process_set = options.process_set
        self.options = options
        self._variables = variables
        shapes = [tf.TensorShape(variable.shape) for variable in variables]
        kinds = []
        for variable, shape in zip(variables, shapes, strict=True):
            dtype = wire_dtype(tf.as_dtype(variable.dtype))
            travels = options.compression.compress(tf.zeros([0], dtype))[0].dtype
            # With a loss scale, gradients travel unscaled, and as float32, because small ones would be 0 in float16.
            travels = tf.float32 if options.unscaled and travels == tf.float16 else travels
            kinds.append(Kind(travels.name, shape.num_elements() * travels.size, dtype.name))
        name = step_name(framework, name, options, variables, kinds)
        self._buckets = [
            _Bucket(each, [shapes[i] for i in each.positions], kinds[each.positions[0]].place)
            for each in plan(framework, name, options, variables, kinds)
        ]
        self.family = runtime.family(self.process_set, [bucket.name for bucket in self._buckets])

    def _config(self, bucket: _Bucket) -> _attach.BucketConfig:
        """Return what a bucket is declared with now. (An elastic job may change the number of ranks.)"""
        spec = self.options.spec(bucket.members, grants=bucket is self._buckets[0])
        dtype = bucket_config.DTYPES[bucket.wire.dtype.name]
        return _attach.BucketConfig(spec, dtype=dtype, shape=[bucket.wire.size], device=-1)

    def declare(self) -> None:
        """Declare the buckets. The first bucket also keeps account of which micro-batches ranks have received."""
        for bucket in self._buckets:
            runtime.declare(self.process_set.process_set_id, bucket.name, self._config(bucket))

    def add(self, gradients: Sequence[tf.Tensor], *, arrives: bool) -> None:
        """Add a micro-batch's gradients. If `arrives`, contribute the sums to the round, in the first bucket last."""
        for bucket in reversed(self._buckets):
            if bucket.handle is not None and bucket.handle.poll():
                runtime.wait(bucket.handle)  # an arrival that ended before the update has failed: raise its error
            for view, position in zip(bucket.views, bucket.positions, strict=True):
                gradient = gradients[position].numpy()
                if bucket.made:
                    view += gradient
                else:
                    view[...] = gradient
            bucket.made += 1
            if bucket.wire is not bucket.sum:
                bucket.wire[...] = bucket.sum
            if arrives:
                address, number = bucket.wire.ctypes.data, self.process_set.process_set_id
                config = self._config(bucket)
                bucket.handle = runtime.submit(number, bucket.name, config, address, address, work=0, stream=0)

    def take(self) -> bool:
        """Take the oldest complete update. Returns False if there is no such update, or if it has no gradient."""
        if not self.family.take_round([bucket.wire.ctypes.data for bucket in self._buckets], []):
            return False
        for bucket in self._buckets:
            if bucket.wire is not bucket.sum:
                bucket.sum[...] = bucket.wire
        return True

    def results(self, *, alone: bool) -> list[npt.NDArray[Any]]:
        """Return copies of the gradients of the update that `take` took. `alone` says that no other ranks exist."""
        factor = self.options.factor if alone else 1.0
        results: list[Any] = [None] * len(self._variables)
        for bucket in self._buckets:
            bucket.handle, bucket.made = None, 0
            for view, position in zip(bucket.views, bucket.positions, strict=True):
                results[position] = view * view.dtype.type(factor)
        return results


def updater(
    take: Callable[[], list[Any] | None],
    must_apply: Callable[[], bool],
    apply: Callable[[list[Any]], None],
    variables: Sequence[Any],
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Return two functions that apply updates of `variables` until no update is left, in eager code or in a graph.

    The first function is for the end of a step. Its argument says whether there is an update now. After each update
    `must_apply` says whether there is another update. The second function is for flushes. `take` returns the gradients
    of an update; None if the update has no gradient.
    """
    kinds = [(tf.as_dtype(variable.dtype), variable.shape) for variable in variables]
    zeros = [np.zeros(tuple(shape), dtype.as_numpy_dtype) for dtype, shape in kinds]

    def taken() -> list[Any]:
        results = take()
        return [results is not None, *(zeros if results is None else results)]

    def take_one() -> None:
        there, *results = tf.py_function(taken, [], [tf.bool, *(dtype for dtype, _ in kinds)])
        for result, (_, shape) in zip(results, kinds, strict=True):
            result.set_shape(shape)
        tf.cond(there, lambda: apply(results), lambda: None)

    def apply_all(begins: tf.Tensor) -> None:
        repeat(take_one, begins, lambda: tf.ensure_shape(tf.py_function(must_apply, [], tf.bool), []))

    def flush() -> None:
        with tf.init_scope():
            in_flush(tf.constant(must_apply()))

    in_training, in_flush = functions_of(apply_all)
    return lambda begins: in_training(tf.convert_to_tensor(begins)), flush
