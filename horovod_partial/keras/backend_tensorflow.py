"""What the Keras front end needs of TensorFlow. `backend_torch` has the same names for PyTorch."""

# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from horovod_partial.exchange.models import takes_late
from horovod_partial.policies import ModelPolicy, Quorum
from horovod_partial.runtime import bucket_config
from horovod_partial.tensorflow import operations
from horovod_partial.tensorflow.balancing import BalancedBatchSampler
from horovod_partial.tensorflow.elastic import TensorFlowKerasState as KerasState
from horovod_partial.tensorflow.elastic import run
from horovod_partial.tensorflow.gradients import dense, framework
from horovod_partial.tensorflow.graph import RoundInfo, arrive, native, refuse_xla, runtime
from horovod_partial.tensorflow.variables import broadcast_variables
from horovod_partial.tensorflow.work_sharing import SharedGradients, updater

Variable = tf.Variable  # the class of the framework's own variables, to which `native` converts Keras's variables
outside_graphs = tf.init_scope

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Return the function unchanged, because collectives raise their own error if XLA is to compile them."""
    return function


def when_it_runs(
    function: Callable[..., Any], *inputs: tf.Tensor, dtype: str = "int32", shape: Sequence[int] = ()
) -> Any:
    """Call a function now, or in a graph each time that the graph runs. Its result has this `dtype` and `shape`."""
    if tf.executing_eagerly():
        return function(*inputs)
    refuse_xla()
    return tf.ensure_shape(tf.py_function(function, inputs, tf.as_dtype(dtype)), shape)


def check_devices(**devices: str) -> None:
    """Accept any devices, because TensorFlow places operations on them. (On PyTorch a device is refused.)"""


def broadcast_(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """Give variables the values of one rank. `device` is TensorFlow's name of the device to use, or "" for any."""
    with tf.device(device):
        broadcast_variables(variables, root_rank)


def average_numbers(numbers: Sequence[float], name: str, device: str) -> list[float]:
    """Return the mean of each number over all ranks, in double precision."""
    averages = horovod.allreduce(tf.constant(numbers, tf.float64), device_dense=device, name=name)
    return averages.numpy().tolist()


def average_(
    variables: Sequence[Any],
    name: str,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    *,
    steps: tf.Tensor | int = 0,
) -> RoundInfo:
    """Average floating-point variables over ranks, in place, in one message, in eager code or in a graph.

    Copies of the variables travel, because the optimizer may write the variables meanwhile. Half precision travels as
    float32, so that the average is exact enough. If one variable is float64, all travel as float64. If this rank was
    late, and late ranks do not use the result under this policy (`takes_late`), the variables stay unchanged. `steps`,
    a number of steps or an iteration, decides the weight of this rank's model.
    """
    natives = [native(variable) for variable in variables]
    wide = tf.float64 if any(variable.dtype == tf.float64 for variable in natives) else tf.float32
    copies = [tf.cast(variable, wide) for variable in natives]
    options, average = bucket_config.of_models(policy), horovod.Average
    results, info = operations.reduce(copies, name, average, policy, process_set, options, work=steps, return_info=True)
    if not takes_late(policy):
        results = [tf.where(info.late == 1, *pair) for pair in zip(copies, results, strict=True)]
    for variable, result in zip(natives, results, strict=True):
        variable.assign(tf.cast(result, variable.dtype))
    return info


def signal(name: str, process_set: ProcessSet) -> None:
    """Run a round of the bucket `name`, to tell other ranks that this rank has called `signal`. Only for eager code."""
    spec = bucket_config.arguments(size=runtime.size_of(process_set), average=True, **bucket_config.of_signals())
    arrive([tf.zeros([1])], name, process_set, spec)
