"""What lies in a bucket of gradients, and what a rank has missed of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from horovod_partial import _core
from horovod_partial.tensorflow.graph import runtime


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


def collect(process_set: ProcessSet, name: str, members: Sequence[Member]) -> list[tf.Tensor]:
    """The gradients that this rank has missed; none at all if there is nothing. In eager code."""
    dtype = members[0].dtype.as_numpy_dtype
    offsets = _core.packed_offsets([member.shape.num_elements() for member in members], np.dtype(dtype).itemsize)
    flat = np.zeros(offsets[-1], dtype)
    handle = runtime.collect(process_set.process_set_id, name, flat.ctypes.data)
    if handle is None or handle.info().empty:
        return []
    return [
        member.restore(tf.constant(flat[begin : begin + member.shape.num_elements()].reshape(member.shape)))
        for member, begin in zip(members, offsets, strict=False)
    ]
