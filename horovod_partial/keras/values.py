"""Horovod's collectives (`allreduce`, `allgather` and so on) for tensors of Keras. Only for eager code."""

from __future__ import annotations

from typing import Any

import keras

from horovod_partial.keras.backend import backend

Average, Compression = backend.horovod.Average, backend.horovod.Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a value over all ranks, same as `horovod.keras.allreduce`. The default is the average.

    The value may be anything that `keras.ops.convert_to_tensor` takes. Only for eager code.
    """
    return backend.horovod.allreduce(
        keras.ops.convert_to_tensor(value),
        average=average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate values of all ranks along the first dimension, as `horovod.keras.allgather`. Only for eager code."""
    return backend.horovod.allgather(keras.ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank` on all ranks, same as `horovod.keras.broadcast`. Only for eager code."""
    return backend.horovod.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce a value over all ranks, and return this rank's part along the first dimension.

    The same as `horovod.keras.reducescatter`. Only for eager code.
    """
    return backend.horovod.reducescatter(keras.ops.convert_to_tensor(value), op=op, name=name)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Horovod's function is for graphs of TensorFlow 1, and Keras 3 keeps no list of variables."""
    raise RuntimeError(
        "Keras 3 keeps no list of global variables: use hvd.broadcast_variables(model.weights, "
        f"root_rank={root_rank}), or hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})"
    )
