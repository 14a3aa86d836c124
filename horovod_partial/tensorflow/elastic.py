"""Elastic jobs: `horovod.tensorflow.elastic` for TensorFlow 2 and Keras 3, with a `run` for partial collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import elastic as horovods
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import rank

from horovod_partial import policies
from horovod_partial.exchange import elastic
from horovod_partial.settings import settings
from horovod_partial.tensorflow.graph import runtime
from horovod_partial.tensorflow.variables import broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of an elastic training, same as `horovod.tensorflow.elastic.run`.

    A graph that was traced for another number of ranks raises an error: make each `tf.function` within `func`, or in a
    reset callback. (With `TensorFlowKerasState`, `model.fit` traces again.) If ranks are added or removed, late
    gradients are delivered before Horovod restarts. If a rank fails, everything since the last commit is lost.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except tf.errors.UnknownError as error:
            if "Horovod" not in error.message:
                raise
            raise HorovodInternalError(error.message) from error

    return elastic.run(translated, runtime)


class TensorFlowState(elastic.VariablesState):
    """The state of an elastic job: variables and further properties that are equal on all ranks.

    The variables are TensorFlow's or Keras's, in the same order on every rank. `kwargs` become attributes. Horovod's
    own class of this name does not broadcast variables of TensorFlow 2.
    """

    functions = broadcast_variables, broadcast_object, rank


class TensorFlowKerasState(elastic.KerasState):
    """The state of an elastic job: a model of Keras 3, its optimizer, and further properties.

    Horovod's own class of this name fails on Keras 3. If the number of ranks changes, the next `fit` traces the model
    again. If `optimizer` is None, the state takes the model's compiled optimizer. `kwargs` become attributes. Raises
    ValueError if the model has not been built, has no optimizer, or has an optimizer of Keras 2 (package tf_keras).
    Raises ImportError if there is no Keras 3. For legacy Keras under `hvd.Full()` this is Horovod's own state.
    """

    functions = TensorFlowState.functions

    def __new__(cls, model: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        if not hasattr(tf.keras, "ops") and isinstance(policies.resolve(None, settings().sync), policies.Full):
            # Horovod's own optimizers support Keras 2, and `DistributedOptimizer` returns them there. Do the same here.
            return horovods.TensorFlowKerasState(model, optimizer, **kwargs)
        return super().__new__(cls)

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        import horovod_partial.keras  # noqa: F401 - this import raises an error on Keras 2

        super().__init__(model, optimizer, **kwargs)
