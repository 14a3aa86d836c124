"""Work sharing in TensorFlow: the sum of the gradients of this rank's micro-batches, and updates in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from horovod_partial import _attach
from horovod_partial.exchange import work_sharing
from horovod_partial.policies import SharedUpdates
from horovod_partial.runtime import bucket_config
from horovod_partial.tensorflow.gradients import GradientExchange, done, nothing
from horovod_partial.tensorflow.graph import wire_dtype

_TYPES = {"float16": 6, "float32": 7, "float64": 8}  # the numbers of dtypes in Horovod's C++ code


class _Bucket:
    """Gradients of some variables, one after the other in memory of the host.

    `positions` are those of its gradients in a step. `sum` is the sum of this rank's gradients in `made` micro-batches
    of the open update; after `take` it has the gradients of the update. `wire` is the memory that travels: `sum`,
    unless another type travels. `handle` is the last arrival in the open update; None before the first one.
    """

    def __init__(self, name: str, positions: list[int], shapes: list[Any], dtype: str, wire: str) -> None:
        self.name = name
        self.positions = positions
        sizes = [shape.num_elements() for shape in shapes]
        self.sum: npt.NDArray[Any] = np.zeros(sum(sizes), dtype)
        self.wire = self.sum if wire == dtype else np.zeros(sum(sizes), wire)
        self.handle: _attach.Handle | None = None
        self.made = 0
        offsets = np.cumsum([0, *sizes])
        self.views = [
            self.sum[first:last].reshape(shape)
            for first, last, shape in zip(offsets, offsets[1:], map(tuple, shapes), strict=False)
        ]


class SharedGradients(GradientExchange):
    """The sum of the gradients of the micro-batches that this rank makes under `hvd.WorkSharing`.

    The sum lies in memory of the host, so gradients on a GPU are copied to the host, and results are copied back.
    """

    def prepare(self, variables: list[Any]) -> None:
        """Make the buckets for the gradients of `variables`."""
        compress = self._arguments["compression"].compress
        kinds = []
        for variable in variables:
            dtype = wire_dtype(tf.as_dtype(variable.dtype))
            travels = compress(tf.zeros([0], dtype))[0].dtype
            # With a loss scale, gradients travel unscaled, and as float32, because small ones would be 0 in float16.
            kinds.append((dtype.name, "float32" if self.unscaled and travels == tf.float16 else travels.name))
        self._variables = variables
        name = self._step_name(variables, [wire for _, wire in kinds])
        sizes = [
            tf.TensorShape(variable.shape).num_elements() * np.dtype(wire).itemsize
            for variable, (_, wire) in zip(variables, kinds, strict=True)
        ]
        self._buckets_of_sum = [
            _Bucket(
                f"{name}.{index}", planned, [tf.TensorShape(variables[i].shape) for i in planned], *kinds[planned[0]]
            )
            for index, planned in enumerate(self._plan(variables, kinds, sizes))
        ]
        self.family = self.runtime.family(self.process_set, [bucket.name for bucket in self._buckets_of_sum])
        self._own(self.family.names)

    def _config(self, bucket: _Bucket) -> _attach.BucketConfig:
        assert isinstance(self._sync, SharedUpdates)
        policy = SharedUpdates(self._sync.passes, grants=bucket is self._buckets_of_sum[0])
        spec = bucket_config.arguments(
            sync=policy,
            size=self.runtime.size_of(self.process_set),
            average=self._average,
            members=self._members([self._variables[i] for i in bucket.positions]),
            **self._options,
        )
        return _attach.BucketConfig(spec, dtype=_TYPES[bucket.wire.dtype.name], shape=[bucket.wire.size], device=-1)

    def declare(self) -> None:
        """Declare the buckets. The first bucket also keeps account of the micro-batches that were granted."""
        for bucket in self._buckets_of_sum:
            self.runtime.declare(self.process_set.process_set_id, bucket.name, self._config(bucket))

    def dense(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Return the gradients as dense tensors; None counts as zeros."""
        pairs = zip(gradients, self._variables, strict=True)
        return [
            tf.zeros(variable.shape, variable.dtype) if gradient is None else self._dense(gradient, variable)
            for gradient, variable in pairs
        ]

    def add(self, gradients: Sequence[tf.Tensor], *, arrives: bool) -> None:
        """Add a micro-batch's gradients. If `arrives`, arrive with the sums. The bucket with the grants comes last."""
        for bucket in reversed(self._buckets_of_sum):
            if bucket.handle is not None and bucket.handle.poll():
                self.runtime.wait(bucket.handle)  # an operation that ended before this micro-batch has failed: raise
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
                address = bucket.wire.ctypes.data
                number = self.process_set.process_set_id
                bucket.handle = self.runtime.submit(
                    number, bucket.name, self._config(bucket), address, address, work=0, stream=0
                )

    def take(self) -> bool:
        """Take the oldest update that this rank has not taken. Returns False if the update has no gradient."""
        addresses = [bucket.wire.ctypes.data for bucket in self._buckets_of_sum]
        gradients = self.family.take_round(addresses)
        if not gradients:
            return False
        for bucket in self._buckets_of_sum:
            if bucket.wire is not bucket.sum:
                bucket.sum[...] = bucket.wire
        return True

    def results(self, *, alone: bool) -> list[npt.NDArray[Any]]:
        """Return copies of the gradients of the update that `take` took. `alone` says that no other ranks exist."""
        factor = self._options["prescale_factor"] * self._options["postscale_factor"] if alone else 1.0
        results: list[Any] = [None] * len(self._variables)
        for bucket in self._buckets_of_sum:
            bucket.handle, bucket.made = None, 0
            for view, position in zip(bucket.views, bucket.positions, strict=True):
                results[position] = view * view.dtype.type(factor)
        return results


@dataclass(eq=False)
class Updater(work_sharing.Updater):
    """Applies updates under `hvd.WorkSharing`, in eager code or in a graph.

    The same update in a graph and in eager code may differ in the last bit. How TensorFlow optimizes a function depends
    on its caller. So a flush after training in a graph calls the same function, from within another one.
    """

    def __post_init__(self) -> None:
        self._kinds = [(tf.as_dtype(variable.dtype), variable.shape) for variable in self.variables]
        self._in_training = self._in_flush = self._apply_all
        if not tf.executing_eagerly():
            self._in_training = tf.function(
                self._apply_all, autograph=False, experimental_attributes={"_noinline": True}
            )
            self._in_flush = tf.function(lambda there: self._in_training(there), autograph=False)

    def train(self, must_apply: tf.Tensor | bool) -> None:
        """Apply updates until there is none left, at the end of a step. `must_apply` says whether there is one now."""
        self._in_training(tf.convert_to_tensor(must_apply))

    def flush(self) -> None:
        """Apply the updates that this rank has not applied yet, until none is left, between two steps."""
        with tf.init_scope():
            self._in_flush(tf.constant(self.must_apply()))

    def _apply_all(self, must_apply: tf.Tensor) -> None:
        zeros = [np.zeros(tuple(shape), dtype.as_numpy_dtype) for dtype, shape in self._kinds]
        types = [tf.bool, *(dtype for dtype, _ in self._kinds)]
        take, more = self.take, self.must_apply

        def taken() -> list[Any]:
            results = take()
            return [results is not None, *(zeros if results is None else results)]

        def another(_: tf.Tensor) -> list[tf.Tensor]:
            there, *results = tf.py_function(taken, [], types)
            for result, (_dtype, shape) in zip(results, self._kinds, strict=True):
                result.set_shape(shape)
            tf.cond(there, lambda: done(lambda: self.apply(results)), nothing)
            # Run `more` last: it begins a new iteration. TensorFlow orders side effects only within an iteration.
            before = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
            with tf.control_dependencies(before):
                return [tf.ensure_shape(tf.py_function(more, [], tf.bool), [])]

        tf.while_loop(lambda must_apply: must_apply, another, [must_apply], parallel_iterations=1)
