"""Broadcasts of variables of TensorFlow and of Keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import mpi_ops

from horovod_partial.exchange import replicas
from horovod_partial.tensorflow.graph import native, runtime

# Dtypes that Horovod 0.28.1 cannot broadcast, each with the integer dtype in which its bits travel.
_BITS = {tf.bfloat16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Give variables of TensorFlow or of Keras the values of one rank. Every rank must call this.

    Unlike Horovod's function, this one matches variables by their order and not by their names. Keras numbers all
    models and layers of a program, so an additional model on one rank changes the names of later models there. In a
    graph the broadcast is part of each run, same as in Horovod, and does not check that ranks have equal variables.

    Args:
        variables: the variables; on every rank the same dtypes and shapes in the same order.
        root_rank: the rank whose values all ranks get.
        process_set: the ranks that take part.
        inplace: whether to receive values directly in the variables' memory. Horovod supports this for some dtypes.

    Returns:
        The operation in a graph, otherwise None.

    Raises:
        ValueError: Horovod has not been initialised, or the ranks have different variables (then on every rank).
    """
    runtime.check_initialized()
    natives = [native(variable) for variable in variables]
    if not tf.executing_eagerly():
        return _in_place(natives, root_rank, process_set) if inplace else _by_copies(natives, root_rank, process_set)
    kinds = [f"{variable.dtype.name} {tuple(variable.shape)}" for variable in natives]
    replicas.prepare_broadcast(kinds, runtime, process_set)
    if inplace:
        _in_place(natives, root_rank, process_set)
    else:
        _by_copies_at_once(natives, root_rank, process_set)
    return None


def _by_copies(variables: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet) -> tf.Operation:
    assignments = []
    for index, variable in enumerate(variables):
        wire = _BITS.get(variable.dtype)
        sent = tf.convert_to_tensor(variable) if wire is None else tf.bitcast(variable, wire)
        received = mpi_ops.broadcast(sent, root_rank, name=f"broadcast_variables.{index}", process_set=process_set)
        assignments.append(variable.assign(received if wire is None else tf.bitcast(received, variable.dtype)))
    return tf.group(*assignments)


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _by_copies_at_once(variables: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast all variables in one graph. Eager code would broadcast one variable after the other."""
    _by_copies(variables, root_rank, process_set)


def _in_place(variables: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet) -> tf.Operation:
    by_device: dict[str, list[int]] = {}
    for index, variable in enumerate(variables):
        by_device.setdefault(variable.device, []).append(index)
    return tf.group(
        *(
            mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
                [variables[index].handle for index in indices],
                variable_names=[str(index) for index in indices],
                name="broadcast_variables",
                root_rank=root_rank,
                process_set_id=process_set.process_set_id,
            )
            for indices in by_device.values()
        )
    )
