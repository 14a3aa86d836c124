"""Horovod's collectives of Keras's values, in eager code."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow
import tensorflow as tf
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """`horovod.keras.allreduce`: of anything that `tf.constant` takes; the average, unless `op` says otherwise."""
    return horovod.tensorflow.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """`horovod.keras.allgather`: along the first dimension."""
    return horovod.tensorflow.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """`horovod.keras.broadcast`: the root rank's value."""
    return horovod.tensorflow.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> tf.Tensor:
    """`horovod.keras.reducescatter`: along the first dimension."""
    return horovod.tensorflow.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
