"""Elastic jobs: `horovod.tensorflow.elastic` for TensorFlow 2 and Keras 3, with a `run` that knows of partial collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import rank

from horovod_partial.exchange import elastic
from horovod_partial.tensorflow.graph import runtime
from horovod_partial.tensorflow.variables import broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.tensorflow.elastic.run`.

    A graph that was traced for another number of ranks raises: make tf.functions within `func`, or in a reset callback.
    (`TensorFlowKerasState` lets `model.fit` trace again by itself.) Where ranks are added or removed, what is pending is
    delivered first; where a rank has failed, it is lost, as is all that happened after the last commit.
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
    """Variables, and further properties, that all ranks have in common; Horovod's own broadcasts none in TensorFlow 2.

    Args:
        variables: of TensorFlow or of Keras; on every rank the same, in one order.
        kwargs: further properties, which become attributes.
    """

    functions = elastic.Functions(broadcast_variables, broadcast_object, rank)


class TensorFlowKerasState(elastic.KerasState):
    """A model of Keras 3 and its optimizer, and further properties; Horovod's own fails on Keras 3.

    After a change of ranks the model is traced again by its next `fit`, for the new number.

    Args:
        model: which has been built.
        optimizer: None takes the one that the model was compiled with.
        kwargs: further properties, which become attributes.

    Raises:
        ValueError: the model has not been built, or has no optimizer.
        ImportError: the model is one of Keras 2.
    """

    functions = TensorFlowState.functions

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        import horovod_partial.keras  # noqa: F401 - which refuses Keras 2

        super().__init__(model, optimizer, **kwargs)
