"""What lies in a bucket of gradients, and what a rank has missed of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from horovod_partial import _core
from horovod_partial.tensorflow.graph import memory, round_is_there, runtime, taken_round


class Member(NamedTuple):
    """A gradient in a bucket.

    Attributes:
        dtype: that travels.
        shape: of the gradient.
        restore: makes a gradient of what has travelled.
    """

    dtype: tf.DType
    shape: tf.TensorShape
    restore: Callable[[tf.Tensor], tf.Tensor]


class Arrived(NamedTuple):
    """A bucket of a family at which a step has arrived.

    Attributes:
        name: of the bucket.
        positions: of its gradients within the step.
        members: these gradients.
        results: what came out of the arrival, in whose memory the next result may be.
        device: on which the bucket lies, as TensorFlow names it; empty where that is TensorFlow's choice.
    """

    name: str
    positions: list[int]
    members: list[Member]
    results: list[tf.Tensor]
    device: str


def on_device_of(family: Sequence[Arrived]) -> AbstractContextManager[None]:
    """Where the rounds of a family are taken, whatever device is chosen around: where its buckets lie.

    That holds for all between an arrival and the taking: a copy of the results would not be what the arrival has lent.
    """
    return tf.device(family[0].device or None)


def memory_of(family: Sequence[Arrived]) -> list[tf.Tensor]:
    """The memory of the arrivals' own results, which nobody else uses."""
    return [result for bucket in family for result in bucket.results]


def new_memory(family: Sequence[Arrived]) -> list[tf.Tensor]:
    """Memory of the same kind."""
    with on_device_of(family):
        return [
            tensor
            for bucket in family
            for tensor in memory([(member.dtype, member.shape) for member in bucket.members])
        ]


def take_round(
    process_set: ProcessSet, family: Sequence[Arrived], memory: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Take the oldest round that has ended in all buckets of a family, in eager code or in a graph.

    Args:
        process_set: the ranks that take part.
        family: the buckets.
        memory: where the results come to, of `memory_of` or `new_memory`.

    Returns:
        The results in the order of the step; and how many gradients are in them: where there are none, results are undefined.
    """
    names, counts = [bucket.name for bucket in family], [len(bucket.members) for bucket in family]
    with on_device_of(family):
        taken, count = taken_round(process_set, names, counts, memory)
    gradients: list[tf.Tensor] = [None] * len(taken)
    members = [(i, member) for bucket in family for i, member in zip(bucket.positions, bucket.members, strict=True)]
    for (position, member), result in zip(members, taken, strict=True):
        gradients[position] = member.restore(result)
    return gradients, count


def has_round(process_set: ProcessSet, family: Sequence[Arrived]) -> tf.Tensor:
    """Whether there is a round to take."""
    with on_device_of(family):
        return round_is_there(process_set, [bucket.name for bucket in family])


def collect(process_set: ProcessSet, name: str, members: Sequence[Member]) -> list[tf.Tensor]:
    """The gradients that this rank has missed; none at all if there is nothing. In eager code."""
    dtype = members[0].dtype.as_numpy_dtype
    offsets = _core.packed_offsets([member.shape.num_elements() for member in members], np.dtype(dtype).itemsize)
    flat = np.zeros(offsets[-1], dtype)
    handle = runtime.collect(process_set.process_set_id, name, flat.ctypes.data, to_host=True)
    if handle is None or handle.info().empty:
        return []
    return [
        member.restore(tf.constant(flat[begin : begin + member.shape.num_elements()].reshape(member.shape)))
        for member, begin in zip(members, offsets, strict=False)
    ]
