"""TensorFlow's buckets of gradients: contributes gradients to them, and applies the rounds that have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.exchange.gradients import Apply, Planned, Wire
from horovod_partial.tensorflow.graph import arrive, bucket_resource, graph_operations, placed, plain_errors, runtime


class Buckets:
    """The buckets of the gradients of one set of variables: `horovod_partial.exchange.gradients.Buckets` in TensorFlow.

    `arrive` returns the result tensors, bucket by bucket. `take_first` and `take_all` write the results of rounds to
    the memory of these tensors. Nothing else uses this memory.
    """

    def __init__(
        self, planned: Sequence[Planned], variables: list[Any], options: BucketOptions, apply: Apply | None
    ) -> None:
        self.family = runtime.family(options.process_set, [bucket.name for bucket in planned])
        self._planned = planned
        self._variables = variables
        self._options = options
        self._apply = apply
        # The gradients of the first arrival, in the order of the step, without their tensors.
        self._wires: Sequence[Wire] = ()
        self._shapes: list[tf.TensorShape] = []  # the shapes of these gradients
        self._device = ""  # TensorFlow's name of the first bucket's device; "" if TensorFlow chooses it
        # The functions by which training and flushes apply rounds. A tape applies no rounds, and makes buckets in each
        # step, so it has no such functions: they would keep the buckets alive until the garbage collector runs.
        self._functions = None if apply is None else functions_of(self._apply_all)

    def arrive(self, wires: Sequence[Wire]) -> list[tf.Tensor]:
        memory: list[tf.Tensor] = []
        for bucket in self._planned:
            spec = self._options.spec(bucket.members)
            tensors = [wires[i].tensor for i in bucket.positions]
            memory += arrive(tensors, bucket.name, self._options.process_set, spec)[0]
        if not self._wires:
            self._wires = [wire._replace(tensor=None) for wire in wires]
            self._shapes = [wire.tensor.shape for wire in wires]
            self._device = memory[0].device
        return memory

    def sums(self, arrived: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Convert result tensors to gradients, in the order of the step.

        For a tape, the result tensors of a late rank hold the sum of the results that the rank has missed.
        """
        gradients: list[Any] = [None] * len(arrived)
        positions = [i for bucket in self._planned for i in bucket.positions]
        for i, result in zip(positions, arrived, strict=True):
            restore = self._wires[i].restore
            gradients[i] = result if restore is None else restore(result)
        return gradients

    def take_first(self, arrived: list[tf.Tensor], apply: Apply) -> None:
        self._apply_round(arrived, apply, nullcontext())

    def take_all(self, arrived: list[tf.Tensor] | None) -> None:
        assert self._functions is not None
        in_training, in_flush = self._functions
        with self._on_device():
            if arrived is None:
                in_flush(self._new_memory())
            else:
                in_training(arrived)

    def _on_device(self) -> AbstractContextManager[None]:
        """Context that places operations on the device of the buckets, whatever device the user has chosen.

        Every operation between an arrival and the taking of its round must run on this device. Otherwise TensorFlow
        would copy the results, and later rounds would be written to the copy, not to the memory of the results.
        """
        return tf.device(self._device or None)

    def _new_memory(self) -> list[tf.Tensor]:
        """Allocate tensors for gradients, without values. A bucket's tensors lie side by side. Only for eager code."""
        tensors: list[tf.Tensor] = []
        with placed():
            for bucket in self._planned:
                shapes = [self._shapes[i] for i in bucket.positions]
                tensors += graph_operations.horovod_partial_memory(T=bucket.dtype, N=len(shapes), shapes=shapes)
        return tensors

    def _apply_round(self, memory: Sequence[tf.Tensor], apply: Apply, where: AbstractContextManager[None]) -> None:
        """Take the oldest round that has ended in all buckets, if any. Apply it in the context `where`."""
        counts = [len(bucket.positions) for bucket in self._planned]
        with plain_errors(), self._on_device(), placed():
            taken, count = graph_operations.horovod_partial_take_round(
                memory=memory, counts=counts, **self._attributes()
            )
        gradients = self.sums(taken)
        with where:  # `count` is 0 if there was no round, and the values are undefined then
            steps = runtime.steps_of(self.family, count)
            tf.cond(count > 0, lambda: apply(gradients, self._variables, steps), lambda: None)

    def _has_round(self) -> tf.Tensor:
        """Return as a tensor whether `_apply_round` would take a round, because one has ended in all buckets."""
        with self._on_device(), placed():
            return graph_operations.horovod_partial_has_round(**self._attributes())

    def _attributes(self) -> dict[str, Any]:
        names, process_set = self.family.names, self._options.process_set.process_set_id
        return {"handles": [bucket_resource(name) for name in names], "buckets": names, "process_set": process_set}

    def _apply_all(self, memory: list[tf.Tensor]) -> None:
        apply = self._apply
        assert apply is not None

        def apply_one(*memory: tf.Tensor) -> None:
            self._apply_round(memory, apply, tf.device(None))  # TensorFlow chooses the device of updates

        repeat(apply_one, self._has_round(), self._has_round, memory)


def functions_of(apply_all: Callable[[Any], None]) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Return the functions by which training and flushes call `apply_all`, which applies all rounds or updates.

    TensorFlow optimizes graphs, so an update in a graph and the same update in eager code may differ in the last bit.
    The optimizations of a function also depend on the function's caller. Training in a graph calls the function from
    within another function. So after training in a graph, a flush does the same.
    """
    if tf.executing_eagerly():
        return apply_all, apply_all
    in_training = tf.function(apply_all, autograph=False, experimental_attributes={"_noinline": True})
    return in_training, tf.function(lambda argument: in_training(argument), autograph=False)


def repeat(
    apply_one: Callable[..., None], begins: tf.Tensor, more: Callable[[], tf.Tensor], memory: Sequence[tf.Tensor] = ()
) -> None:
    """Call `apply_one(*memory)` if `begins`, and again as long as `more()`, in eager code or in a graph."""

    def another(_: tf.Tensor, *memory: tf.Tensor) -> list[tf.Tensor]:
        apply_one(*memory)
        # TensorFlow does not order side effects of different iterations. So run `more`, which starts the next, last.
        before = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
        with tf.control_dependencies(before):
            return [more(), *memory]

    tf.while_loop(lambda more, *_: more, another, [begins, *memory], parallel_iterations=1)
