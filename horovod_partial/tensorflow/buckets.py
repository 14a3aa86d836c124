"""Takes the results of rounds, and missed results, from TensorFlow's buckets of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from horovod_partial.tensorflow.graph import bucket_resource, graph_operations, placed, plain_errors


class Member(NamedTuple):
    """A gradient in a bucket. It travels in `dtype`, and `restore` makes it from the travelled tensor."""

    dtype: tf.DType
    shape: tf.TensorShape
    restore: Callable[[tf.Tensor], tf.Tensor]


class Arrived(NamedTuple):
    """A bucket of a family at which this rank has arrived in a step.

    `positions` are those of the bucket's gradients within the step. Later results may overwrite the memory of
    `results`. `device` is TensorFlow's name of the bucket's device; empty if TensorFlow chooses it.
    """

    name: str
    positions: list[int]
    members: list[Member]
    results: list[tf.Tensor]
    device: str


def on_device_of(family: Sequence[Arrived]) -> AbstractContextManager[None]:
    """Context that places operations on the device of a family's buckets, whatever device the user has chosen.

    Every operation between an arrival and the taking of its round must run on this device. Otherwise TensorFlow would
    copy the results, and later rounds would be written to the copy, not to the memory of the results.
    """
    return tf.device(family[0].device or None)


def memory_of(family: Sequence[Arrived]) -> list[tf.Tensor]:
    """Return the result tensors of a step's arrivals. Rounds write their results to them. Nothing else uses them."""
    return [result for bucket in family for result in bucket.results]


def new_memory(family: Sequence[Arrived]) -> list[tf.Tensor]:
    """Allocate undefined tensors for gradients, those of a bucket side by side in memory. Only for eager code."""
    tensors: list[tf.Tensor] = []
    with on_device_of(family), placed():
        for bucket in family:
            shapes = [member.shape for member in bucket.members]
            tensors += graph_operations.horovod_partial_memory(T=bucket.members[0].dtype, N=len(shapes), shapes=shapes)
    return tensors


def take_round(
    process_set: ProcessSet, family: Sequence[Arrived], memory: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Take the oldest round that has ended in all buckets of a family, in eager code or in a graph.

    Results are written to `memory`, from `memory_of` or `new_memory`. Returns the combined gradients in the order of
    the step, and how many gradients of ranks they contain. If this number is 0 there was no round, and the values are
    undefined.
    """
    names = [bucket.name for bucket in family]
    with plain_errors(), on_device_of(family), placed():
        taken, count = graph_operations.horovod_partial_take_round(
            handles=[bucket_resource(name) for name in names],
            memory=memory,
            buckets=names,
            counts=[len(bucket.members) for bucket in family],
            process_set=process_set.process_set_id,
        )
    gradients: list[tf.Tensor] = [None] * len(taken)
    members = [(i, member) for bucket in family for i, member in zip(bucket.positions, bucket.members, strict=True)]
    for (position, member), result in zip(members, taken, strict=True):
        gradients[position] = member.restore(result)
    return gradients, count


def has_round(process_set: ProcessSet, family: Sequence[Arrived]) -> tf.Tensor:
    """Return as a tensor whether a round has ended in all buckets of a family, so that `take_round` would take it."""
    names = [bucket.name for bucket in family]
    with on_device_of(family), placed():
        return graph_operations.horovod_partial_has_round(
            handles=[bucket_resource(name) for name in names], buckets=names, process_set=process_set.process_set_id
        )
